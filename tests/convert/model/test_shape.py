"""What layers cache, against transformers' own cache and our own config."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING, DynamicCache
from transformers.cache_utils import DynamicLayer

from latentfold.convert.model.shape import LayerKind, model_shape
from latentfold.convert.targets.native.configuration_latentfold import LatentfoldConfig

HYBRIDS = [
    "bamba",
    "cohere2",
    "falcon_h1",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gpt_oss",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm3",
    "llama4",
    "mimo_v2_flash",
    "minimax",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5",
    "qwen3_next",
    "recurrent_gemma",
    "zamba2",
]


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_layers_are_what_transformers_caches(model_type: str) -> None:
    """Which layers hold tokens, and how many at most."""
    config = CONFIG_MAPPING[model_type]()
    held = [
        (isinstance(layer, DynamicLayer), getattr(layer, "sliding_window", None))
        for layer in DynamicCache(config=config).layers
    ]
    shape = model_shape(config)
    assert [(layer.values > 0, layer.window) for layer in shape.layers] == held


def test_a_layer_left_as_it_is_keeps_its_values_and_its_window() -> None:
    """Our own config around its source's: sizes by layer, None where the attention is the source's own."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_size": 64,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "max_position_embeddings": 256,
    }
    source = CONFIG_MAPPING["gemma3_text"](**sizes)
    config = LatentfoldConfig(
        text_config=source, kv_lora_rank=[12, None, 20], frequencies=[[1.0, 0.5], None, [1.0, 0.5, 0.25]]
    )
    shape = model_shape(config)
    assert shape.layer_values == (12 + 4, 2 * 2 * 16, 20 + 6)
    assert shape.windows == (32, 32, None)
    assert [layer.kind for layer in shape.layers] == [LayerKind.SLIDING, LayerKind.SLIDING, LayerKind.FULL]
    assert shape.is_mla and (shape.kv_lora_rank, shape.qk_rope_head_dim) == (20, 6)
    assert shape.cache_bytes(100) == 2 * (32 * 16 + 32 * 64 + 100 * 26)
