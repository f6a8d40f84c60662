"""Letting `AutoConfig` and `AutoModelForCausalLM` know our class, so that it loads without `trust_remote_code`."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig
from wrapt import wrap_function_wrapper

from latentfold.convert.targets.native.configuration_latentfold import LatentfoldConfig


def register() -> None:
    """Register the configuration now, the model with the first configuration made: it takes a second to load."""
    AutoConfig.register(LatentfoldConfig.model_type, LatentfoldConfig, exist_ok=True)
    wrap_function_wrapper(LatentfoldConfig, "__init__", _registering_model)


def _registering_model(make: Any, instance: Any, args: Any, kwargs: Any) -> None:
    from transformers import AutoModelForCausalLM

    from latentfold.convert.targets.native.modeling_latentfold import LatentfoldForCausalLM

    AutoModelForCausalLM.register(LatentfoldConfig, LatentfoldForCausalLM, exist_ok=True)
    make(*args, **kwargs)
