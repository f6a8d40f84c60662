"""`inspect` on published shapes, from config.json alone."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from latentfold.convert import inspect_model
from latentfold.convert.cli import main
from latentfold.convert.targets.kernels import engine_kernels

LLAMA_3_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
GEMMA_3_27B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
DEEPSEEK_V2 = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_theta": 10000,
    "torch_dtype": "bfloat16",
    "vocab_size": 102400,
}


def write(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_llama_3_70b(tmp_path: Path) -> None:
    found = inspect_model(write(tmp_path, LLAMA_3_70B))
    assert found.attention == "GQA" and found.convertible
    assert (found.shape.num_heads, found.shape.num_kv_heads, found.shape.head_dim) == (64, 8, 128)
    assert found.cache_bytes_per_token == 2 * 80 * 8 * 128 * 2  # 320 KiB
    assert found.cache_bytes[131072] == 40 * 2**30
    assert found.proposal is not None
    assert (found.proposal.kv_rank, found.proposal.rope_dim) == (512, 64)
    assert found.proposal.cached_share == 576 / 2048
    assert "FlashMLA" in found.proposal.kernels and "CUTLASS MLA" in found.proposal.kernels


def test_gemma_3_27b_counts_windows_as_windows(tmp_path: Path) -> None:
    found = inspect_model(write(tmp_path, GEMMA_3_27B))
    assert (found.shape.num_heads, found.shape.num_kv_heads) == (32, 16)
    per_layer = 2 * 16 * 128 * 2
    full = found.shape.windows.count(None)
    assert full == 10  # every sixth of 62
    assert found.cache_bytes_per_token == 62 * per_layer
    assert found.cache_bytes[32768] == per_layer * (10 * 32768 + 52 * 1024)
    assert not found.convertible and "image encoder" in found.reasons[0]
    assert any("1024 tokens on 52 of 62 layers" in text for text in found.unusual)


def test_deepseek_v2_already_is_mla(tmp_path: Path) -> None:
    found = inspect_model(write(tmp_path, DEEPSEEK_V2))
    assert found.attention == "MLA" and found.proposal is None
    assert found.cache_bytes_per_token == 60 * 576 * 2
    assert "already MLA" in found.reasons[0]
    assert found.shape.num_heads == 128


def test_table_and_json_say_the_same(tmp_path: Path) -> None:
    folder = write(tmp_path, LLAMA_3_70B)
    table = CliRunner().invoke(main, ["inspect", folder])
    data = CliRunner().invoke(main, ["inspect", folder, "--json"])
    assert table.exit_code == data.exit_code == 0
    parsed = json.loads(data.stdout)
    assert parsed["proposal"]["kv_rank"] == 512 and "--kv-rank 512 --rope-dim 64" in table.stdout
    assert parsed["cache_bytes"]["4096"] == 4096 * 320 * 1024 and "1.2 GiB" in table.stdout


@pytest.mark.parametrize(
    ("sizes", "present", "absent"),
    [
        ((512, 64), "CUTLASS MLA", None),
        ((256, 64), "FlashMLA", "CUTLASS MLA"),
        ((96, 32), "Triton MLA", "FlashMLA"),
    ],
)
def test_kernels(sizes: tuple[int, int], present: str, absent: str | None) -> None:
    found = engine_kernels(*sizes)
    assert present in found and absent not in found


@pytest.mark.parametrize("kv_heads", [1, 2, 8, 32])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_proposals_are_always_possible(kv_heads: int, head_dim: int, tmp_path: Path) -> None:
    config = LLAMA_3_70B | {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": 32,
        "head_dim": head_dim,
        "hidden_size": 32 * head_dim,
    }
    found = inspect_model(write(tmp_path, config))
    assert found.proposal is not None
    assert 1 <= found.proposal.kv_rank <= found.shape.max_kv_rank
    assert found.proposal.rope_dim % 2 == 0 and found.proposal.rope_dim <= kv_heads * head_dim
    assert found.proposal.cached_share < 0.5


HYBRIDS: dict[str, tuple[dict[str, Any], int, list[tuple[int, int | None]]]] = {
    # config, values of a layer that caches tokens, (how many layers, tokens they hold)
    "Qwen3-Next-80B-A3B": (
        {"model_type": "qwen3_next", "num_hidden_layers": 48, "num_key_value_heads": 2, "head_dim": 256},
        1024,
        [(12, None)],
    ),
    "Kimi-K2.5": ({"model_type": "kimi_k25"}, 576, [(61, None)]),
    "Llama-4-Scout": (
        {"model_type": "llama4", "text_config": {"model_type": "llama4_text", "num_hidden_layers": 48}},
        2048,
        [(36, 8192), (12, None)],
    ),
    "LFM2-1.2B": (
        {
            "model_type": "lfm2",
            "num_hidden_layers": 16,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
        },
        1024,
        [(6, None)],
    ),
    "gpt-oss-20b": ({"model_type": "gpt_oss", "num_hidden_layers": 24}, 1024, [(12, 128), (12, None)]),
    "Jamba": ({"model_type": "jamba"}, 2048, [(4, None)]),
    "Gemma 3n": ({"model_type": "gemma3n"}, 1024, [(16, 512), (4, None)]),
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_that_remember_otherwise(name: str, tmp_path: Path) -> None:
    """Windows, chunks, recurrent states and shared caches are counted as what they are, nested configs too."""
    config, values, caching = HYBRIDS[name]
    found = inspect_model(write(tmp_path, config | {"torch_dtype": "bfloat16"}))
    layers = [layer for layer in found.shape.layers if layer.values]
    assert {layer.values for layer in layers} == {values}
    assert Counter(layer.window for layer in layers) == {window: count for count, window in caching}
    assert found.cache_bytes_per_token == 2 * values * len(layers)
    for tokens, counted in found.cache_bytes.items():
        held = sum(count * min(tokens, window or tokens) for count, window in caching)
        assert counted == 2 * values * held
    table = CliRunner().invoke(main, ["inspect", str(tmp_path)]).stdout
    if len(layers) == found.shape.num_layers:
        assert f"{values} values per token and layer" in table
    else:
        assert f"values per token: {values} in {len(layers)} of {found.shape.num_layers} layers" in table
    assert (found.attention == "MLA") == (name == "Kimi-K2.5")
