"""Absorbed decode in the stock class gives what the stock class gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from latentfold.convert import InputError, convert_checkpoint, enable_absorbed_decode
from tests.conftest import MakeModel, load, random_tokens


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_same_logits_without_expanding(
    attention: str,
    make_model: MakeModel,
    tmp_path: Path,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    convert_checkpoint(str(make_model()), str(tmp_path / "out"), kv_rank=12, rope_dim=4, **options)
    stock, model = (load(tmp_path / "out", attn_implementation=attention) for _ in range(2))
    enable_absorbed_decode(model)
    tokens = random_tokens(2, 24)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    with torch.no_grad():
        whole = stock(tokens, attention_mask=mask).logits
        first = model(tokens[:, :16], attention_mask=mask[:, :16], use_cache=True)
        cache = first.cache
        logits = [first.logits]

        def refuse(*_: Any) -> None:
            raise AssertionError("expanded")

        monkeypatch.setattr(DeepseekV3Attention, "expand_kv", refuse)
        for start, end in ((16, 17), (17, 20), (20, 21), (21, 24)):
            step = model(tokens[:, start:end], attention_mask=mask[:, :end], cache=cache, use_cache=True)
            logits.append(step.logits)
    found = torch.cat(logits, dim=1)
    seen = mask.bool()
    assert torch.allclose(found[seen], whole[seen], atol=2e-5)
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert held == 2 * 2 * 24 * 16  # layers, sequences, tokens, values


def test_generates_the_same_and_may_be_enabled_twice(
    make_model: MakeModel, tmp_path: Path, options: dict[str, Any]
) -> None:
    convert_checkpoint(str(make_model()), str(tmp_path / "out"), kv_rank=12, rope_dim=4, **options)
    model = load(tmp_path / "out")
    before = model.generate(random_tokens(2), max_new_tokens=8, do_sample=False)
    enable_absorbed_decode(model)
    enable_absorbed_decode(model)
    assert torch.equal(model.generate(random_tokens(2), max_new_tokens=8, do_sample=False), before)


def test_another_class_is_refused(make_model: MakeModel) -> None:
    with pytest.raises(InputError, match="LlamaForCausalLM: expected a DeepseekV3ForCausalLM"):
        enable_absorbed_decode(load(make_model()))
