"""config.json of the stock class."""

from __future__ import annotations

from typing import Any

import torch

from latentfold.convert.dtypes import dtype_name
from latentfold.convert.model.shape import longest_context
from latentfold.convert.targets.deepseek.ladders import Ladder
from latentfold.convert.targets.deepseek.norm import LATENT_EPS
from latentfold.convert.text.windows import DEFAULT_WINDOW

MODEL_TYPE = "deepseek_v3"

ARCHITECTURE = "DeepseekV3ForCausalLM"


def target_config(source: Any, ladder: Ladder, head_dim: int, rank: int, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of the converted model, without biases or tied embeddings.

    Args:
        source: the source's transformers config.
    """
    rope = {k: v for k, v in ladder.parameters.items() if k not in ("rope_type", "rope_theta")}
    scaling = {"type": "yarn", "rope_type": "yarn", **rope} if rope else None
    heads = source.num_attention_heads
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "dtype": dtype_name(dtype),
        "torch_dtype": dtype_name(dtype),
        "vocab_size": source.vocab_size,
        "hidden_size": source.hidden_size,
        "intermediate_size": source.intermediate_size,
        "num_hidden_layers": source.num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "hidden_act": "silu",
        "max_position_embeddings": longest_context(source) or DEFAULT_WINDOW,
        "initializer_range": source.initializer_range,
        "rms_norm_eps": LATENT_EPS,
        "use_cache": True,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": source.bos_token_id,
        "eos_token_id": source.eos_token_id,
        "pad_token_id": source.pad_token_id,
        "q_lora_rank": None,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": head_dim,
        "qk_rope_head_dim": ladder.rope_dim,
        "v_head_dim": head_dim,
        # both spellings: transformers >= 5 reads the first, vLLM, SGLang, llama.cpp and MLX the others
        "rope_parameters": dict(ladder.parameters),
        "rope_theta": ladder.parameters["rope_theta"],
        "rope_scaling": scaling,
        "rope_interleave": True,
        # every layer is dense; the expert sizes are required by some loaders and used by none
        "first_k_dense_replace": source.num_hidden_layers,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "routed_scaling_factor": 1.0,
        "moe_intermediate_size": source.intermediate_size,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
