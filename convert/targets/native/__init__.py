"""Our own target: the source family's transformers model with latent attention in place of its own.

Importing this package makes `AutoConfig` and `AutoModelForCausalLM` know it, so that its checkpoints load without
`trust_remote_code`.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from latentfold.convert.targets.native.configuration_latentfold import LatentfoldConfig
from latentfold.convert.targets.native.modeling_latentfold import LatentfoldForCausalLM

__all__ = ["LatentfoldConfig", "LatentfoldForCausalLM"]

AutoConfig.register(LatentfoldConfig.model_type, LatentfoldConfig, exist_ok=True)
AutoModelForCausalLM.register(LatentfoldConfig, LatentfoldForCausalLM, exist_ok=True)
