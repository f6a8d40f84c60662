"""Sizes that differ by layer, and layers that are left as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from latentfold.convert import InputError, LayerSize, convert_checkpoint, plan_conversion, read_recipe
from latentfold.eval import EvaluationConfig, evaluate
from tests.conftest import MakeModel, load, random_tokens
from tests.families import save_family

FULL = LayerSize(32, 16)
"""All of two KV heads of 8."""
NAMES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3, longrope", "gpt2", "qwen3_moe")


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_that_is_left_stays_what_it_was(name: str, tmp_path: Path, options: dict[str, Any]) -> None:
    """Full size in one layer, the source's own attention in the other: the same model."""
    source, out = save_family(tmp_path / "source", name), tmp_path / "out"
    sizes = (None, LayerSize(32, 0) if name == "gpt2" else FULL)  # where nothing rotates
    recipe = convert_checkpoint(str(source), str(out), sizes=sizes, target="native", **options).recipe
    assert recipe.layers[0] is None and recipe.layers[1] is not None and recipe.sizes[0] is None
    assert recipe == read_recipe(out) and recipe.size is None and recipe.options.kv_rank is None
    tokens = random_tokens(2, 16)
    original, converted = load(source), load(out)
    with torch.no_grad():
        expected, found = original(tokens).logits, converted(tokens, use_cache=True)
        first = converted(tokens[:, :12], use_cache=True)
        rest = converted(tokens[:, 12:], cache=first.cache, use_cache=True).logits
    assert (found.logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (rest - expected[:, 12:]).abs().max() <= 1e-4 * expected.abs().max()
    untouched = {key for key in original.state_dict() if ".0." in key}
    assert untouched <= set(converted.state_dict())


def test_layers_of_different_sizes(tmp_path: Path, options: dict[str, Any], text_file: Path) -> None:
    source, out = save_family(tmp_path / "source", "qwen2", num_hidden_layers=4), tmp_path / "out"
    sizes = [LayerSize(8, 4), None, LayerSize(20, 2), FULL]
    plan = plan_conversion(str(source), sizes=sizes)
    assert plan.target.name == "native" and plan.sizes == tuple(sizes) and plan.cache_values == (128, 12 + 32 + 22 + 48)
    recipe = convert_checkpoint(str(source), str(out), sizes=sizes, **options).recipe
    assert (recipe.cache_values.source, recipe.cache_values.converted) == plan.cache_values
    config = json.loads((out / "config.json").read_text())
    assert config["kv_lora_rank"] == [8, None, 20, 32] and config["frequencies"][1] is None
    model, tokens = load(out), random_tokens(1, 20)
    cache = model(tokens, use_cache=True).cache
    held = [layer.keys.numel() + layer.values.numel() for layer in cache.layers]
    assert held == [20 * values for values in (12, 32, 22, 48)]
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(load(tmp_path / "again")(tokens).logits, model(tokens).logits)
    found = evaluate(
        str(source), str(out), EvaluationConfig(text=(str(text_file),), seq_len=32, windows=1), progress=False
    )
    assert found.layers is not None and [layer.layer for layer in found.layers] == [0, 2, 3]
    assert found.cache_converted.counted == found.cache_converted.measured == 4 * (12 + 32 + 22 + 48)


def test_sizes_that_mean_nothing(make_model: MakeModel) -> None:
    source = str(make_model())
    for sizes, message in (
        ([FULL], "sizes of 1 layers: expected 2"),
        ([None, None], "no layer is to be converted"),
        ([FULL, LayerSize(33, 8)], "kv_rank 33: .* at most 32"),
        ([FULL, LayerSize(8, 18)], "rope_dim 18: .* rotates 16"),
    ):
        with pytest.raises(InputError, match=message):
            plan_conversion(source, sizes=sizes)
    with pytest.raises(InputError, match="the stock class has one size for all"):
        plan_conversion(source, sizes=[FULL, None], target="deepseek")
    with pytest.raises(InputError, match="expected one of cache_values, cache_ratio, sizes"):
        plan_conversion(source, sizes=[FULL, FULL], kv_rank=8)
    assert plan_conversion(source, sizes=[LayerSize(8, 4)] * 2).target.name == "deepseek"
