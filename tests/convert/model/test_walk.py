"""A walk through the layers against the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from latentfold.convert.model.streamed import StreamedModel
from latentfold.convert.model.walk import Walk
from tests.conftest import load, random_tokens, streamed
from tests.families import save_family

LENGTHS = (24, 9, 24, 1)


@pytest.fixture
def windows() -> list[Tensor]:
    """Windows of several lengths, longer and shorter than a sliding one."""
    return [random_tokens(1, length, seed=length + k)[0] for k, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "mistral, window", "qwen3_moe"])
def test_windows_of_different_lengths(name: str, tmp_path: Path, windows: list[Tensor]) -> None:
    """Whether a caller watches attention, takes a layer's windows through itself, or leaves them to the walk."""
    source = save_family(tmp_path / "source", name)
    walk = Walk(model := streamed(source), windows)
    for visit in walk:
        if visit.index == 0:
            seen = list(visit.observe("attn" if name == "gpt2" else "self_attn"))
            assert [(call.window, len(call.x)) for call in seen] == list(enumerate(LENGTHS))
    whole = load(source)
    with torch.no_grad(), model.head() as head:
        for window, stream in zip(windows, walk.streams, strict=True):
            expected = whole(window[None], output_hidden_states=True)
            norm = whole.base_model.ln_f if name == "gpt2" else whole.base_model.norm
            assert (norm(stream) - expected.hidden_states[-1]).abs().max() <= 1e-4
            assert (head(stream) - expected.logits).abs().max() <= 1e-4 * expected.logits.abs().max()


def in_memory(model: StreamedModel) -> list[str]:
    """Parameters that have their weights."""
    return [name for name, parameter in model.model.named_parameters() if not parameter.is_meta]


def test_one_layer_is_in_memory_and_none_after_a_caller_leaves(tmp_path: Path, windows: list[Tensor]) -> None:
    model = streamed(save_family(tmp_path / "source", "llama", num_hidden_layers=3))
    for visit in Walk(model, windows):
        held = in_memory(model)
        assert held and all(name.startswith(f"model.layers.{visit.index}.") for name in held)
        if visit.index == 1:
            break
    assert not in_memory(model)
    with pytest.raises(ZeroDivisionError):
        for _visit in Walk(model, windows):
            _ = 1 / 0
    assert not in_memory(model)


def test_progress_counts_tokens(tmp_path: Path, windows: list[Tensor]) -> None:
    told: list[tuple[str, int, int, str]] = []
    model = streamed(save_family(tmp_path / "source", "llama"))
    for visit in Walk(model, windows, progress=lambda *what: told.append(what), stage="a stage"):
        visit.advance()
    total = 2 * sum(LENGTHS)
    steps = [sum((LENGTHS * 2)[: k + 1]) for k in range(2 * len(LENGTHS))]
    assert [done for _, done, _, _ in told] == steps and steps[-1] == total
    assert {(stage, all_) for stage, _, all_, _ in told} == {("a stage", total)}
    assert [note for *_, note in told] == ["layer 1/2"] * 4 + ["layer 2/2"] * 4
