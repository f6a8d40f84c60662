"""Models whose layers are not all alike, one layer at a time."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from latentfold.convert.errors import InputError
from latentfold.convert.model.walk import logits
from tests.conftest import SIZES, load, random_tokens, streamed
from tests.families import save_family

HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "time_step_limit": [0.0, 1e9],
        "num_local_experts": 0,
        "shared_intermediate_size": 32,
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 4,
        "use_mamba_kernels": False,
    },
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}
"""Models of which only some layers have attention."""


@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_without_attention(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **deepcopy(SIZES | HYBRIDS[name]))  # completed in place
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    model, tokens = streamed(tmp_path), random_tokens(2, 24)
    model.check_headers(model.checkpoint.headers)
    with torch.no_grad():
        expected = load(tmp_path)(tokens).logits
    assert (logits(model, tokens) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_rotation_goes_by_the_layers_type(tmp_path: Path) -> None:
    model = streamed(save_family(tmp_path / "source", "gemma3"))
    sliding, full = (model.rotation(layer)[0] for layer in range(2))
    assert sliding[1] == pytest.approx(100.0**-0.25) and full[1] == pytest.approx(10000.0**-0.25 / 2)
    model.config.layer_types = ["sliding_attention", "conv"]
    assert len(model.rotation(0)[0]) == 4 and len(model.rotation(1)[0]) == 0


@pytest.mark.parametrize(("types", "found"), [(None, 0), ([], 0), (["full_attention"], 1)])
def test_types_that_the_config_does_not_give(types: list[str] | None, found: int, tmp_path: Path) -> None:
    model = streamed(save_family(tmp_path / "source", "gemma3"))
    model.config.layer_types = types
    with pytest.raises(InputError, match=f"'gemma3_text': .*expected layer_types of 2 layers.*found {found}"):
        model.rotation(1)
