"""Biases in the stock class, for transformers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3ForCausalLM

from latentfold.convert import InputError, convert_checkpoint, enable_absorbed_decode
from latentfold.eval import EvaluationConfig, evaluate
from tests.conftest import MakeModel, random_tokens
from tests.families import save_family

FULL = {"kv_rank": 16, "rope_dim": 8}
"""Of one KV head of 8: it rotates in the source's own frequencies, and the stock class is exact."""


@pytest.mark.parametrize("name", ["qwen2", "llama, MHA, biases"])
def test_biases_are_exact(name: str, tmp_path: Path, options: dict[str, Any]) -> None:
    changes = {
        "num_key_value_heads": 1,
        "mlp_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    source, out = save_family(tmp_path / "source", name, **changes), tmp_path / "out"
    options |= {"target": "deepseek", "engine": "transformers"}
    recipe = convert_checkpoint(str(source), str(out), **FULL, **options).recipe
    assert recipe.options.engine == "transformers"
    converted = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    assert type(converted) is DeepseekV3ForCausalLM
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    tokens = random_tokens(2)
    with torch.no_grad():
        expected, found = original(tokens).logits, converted(tokens).logits
        enable_absorbed_decode(converted)
        cache = converted(tokens[:, :-1], use_cache=True).cache
        last = converted(tokens[:, -1:], cache=cache).logits[:, 0]
    assert (found - expected).norm() <= 1e-4 * expected.norm()
    assert (last - expected[:, -1]).norm() <= 1e-4 * expected[:, -1].norm()
    tensors = load_file(out / "model.safetensors")
    for part in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"):  # the biases do something
        cut = {n: torch.zeros_like(t) if n.endswith(f"{part}.bias") else t for n, t in tensors.items()}
        save_file(cut, out / "model.safetensors", metadata={"format": "pt"})
        with torch.no_grad():
            other = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()(tokens).logits
        assert (other - expected).norm() > 1e-3 * expected.norm()


@pytest.mark.parametrize(("eps", "tied"), [(1e-6, True), (1e-5, False)])
def test_a_tied_head_stays_tied_where_it_can(eps: float, tied: bool, tmp_path: Path, options: dict[str, Any]) -> None:
    """transformers ties the class; a scaled residual stream, or another engine, needs the head apart."""
    changes = {"num_key_value_heads": 1, "tie_word_embeddings": True, "rms_norm_eps": eps}
    source, out = save_family(tmp_path / "source", "qwen2", **changes), tmp_path / "out"
    options |= {"target": "deepseek", "engine": "transformers"}
    recipe = convert_checkpoint(str(source), str(out), **FULL, **options).recipe
    assert ("lm_head.weight" not in load_file(out / "model.safetensors")) == tied
    assert recipe.untied_parameters == (0 if tied else 259 * 32)
    original, converted = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in (source, out)
    )
    tokens = random_tokens(2)
    with torch.no_grad():
        expected, found = original(tokens).logits, converted(tokens).logits
    assert (found - expected).norm() <= 1e-4 * expected.norm()


def test_reduced_size_evaluates(tmp_path: Path, text_file: Path, options: dict[str, Any]) -> None:
    source, out = save_family(tmp_path / "source", "qwen2"), tmp_path / "out"
    convert_checkpoint(str(source), str(out), kv_rank=12, rope_dim=8, engine="transformers", **options)
    assert json.loads((out / "config.json").read_text())["model_type"] == "deepseek_v3"  # auto prefers it, then
    found = evaluate(
        str(source), str(out), EvaluationConfig(text=(str(text_file),), seq_len=32, windows=1), progress=False
    )
    assert found.layers is not None and len(found.layers) == 2


def test_any_engine_takes_no_bias(tmp_path: Path, options: dict[str, Any]) -> None:
    source = save_family(tmp_path / "source", "qwen2")
    with pytest.raises(InputError, match="engine transformers"):
        convert_checkpoint(str(source), str(tmp_path / "out"), **FULL, target="deepseek", **options)


def test_without_biases_the_engine_changes_nothing(
    make_model: MakeModel, tmp_path: Path, options: dict[str, Any]
) -> None:
    source = str(make_model())
    for engine in ("any", "transformers"):
        recipe = convert_checkpoint(source, str(tmp_path / engine), **FULL, engine=engine, **options).recipe
        assert recipe.options.engine == "any"  # that is what loads it
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "any" / name).read_bytes() == (tmp_path / "transformers" / name).read_bytes()
