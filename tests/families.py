"""One tiny model of every family. A new family is one entry here, and then has passed the contract test or not."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.conftest import DEFAULT_ROPE, LLAMA3_ROPE, SIZES, tiny_tokenizer

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 2.0],
    "long_factor": [1.5, 3.0, 5.0, 8.0],
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, MHA, biases": {
        "model_type": "llama",
        "num_key_value_heads": 4,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": LLAMA3_ROPE,
    },
    "llama, yarn, tied": {"model_type": "llama", "rope_parameters": YARN, "tie_word_embeddings": True},
    "mistral, window": {"model_type": "mistral", "sliding_window": 8},
    "qwen2": {"model_type": "qwen2"},
    "qwen2, windows above": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3"},
    "gemma": {"model_type": "gemma"},
    "gemma2": {
        "model_type": "gemma2",
        "sliding_window": 8,
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 6.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 8,
        "query_pre_attn_scalar": 12,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        },
    },
    "granite": {
        "model_type": "granite",
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0]},
    "olmo": {"model_type": "olmo"},
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {"model_type": "olmo3", "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo3, yarn on some layers": {
        "model_type": "olmo3",
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": YARN,
        },
    },
    "phi3": {"model_type": "phi3", "sliding_window": 8},
    "phi3, longrope": {"model_type": "phi3", "rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
    "phi4 mini": {"model_type": "phi3", "rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.5}},
    "phi": {"model_type": "phi", "rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.5}},
    "stablelm": {
        "model_type": "stablelm",
        "use_qkv_bias": True,
        "rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.25},
    },
    "starcoder2": {"model_type": "starcoder2", "sliding_window": None},
    "glm": {"model_type": "glm", "attention_bias": True},
    "glm4": {"model_type": "glm4"},
    "cohere": {"model_type": "cohere"},
    "gpt_neox": {
        "model_type": "gpt_neox",
        "num_key_value_heads": 4,
        "rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.5},
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [1],
    },
    "olmoe": {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "gpt2": {"model_type": "gpt2", "num_key_value_heads": 4, "rope_parameters": None},
    "opt": {"model_type": "opt", "num_key_value_heads": 4, "word_embed_proj_dim": 32, "rope_parameters": None},
    "opt, narrow embedding": {
        "model_type": "opt",
        "num_key_value_heads": 4,
        "word_embed_proj_dim": 16,
        "do_layer_norm_before": False,
        "rope_parameters": None,
    },
    "qwen3, biases, yarn": {"model_type": "qwen3", "attention_bias": True, "rope_parameters": YARN},
}
"""What each model's configuration adds to `SIZES`."""


def save_family(folder: Path, name: str, **changes: Any) -> Path:
    """Write a random tiny model of `MODELS` with its tokenizer."""
    options = deepcopy(SIZES | MODELS[name] | changes)  # transformers completes rope parameters in place
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # enough spread for attention to be far from uniform, gains and biases that matter
            if "norm" in key and key.endswith("weight"):
                parameter.normal_(parameter.mean().round().item(), 0.2)
            else:
                parameter.normal_(0.0, 0.25)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
