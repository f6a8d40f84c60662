"""Greedy continuations against an argmax loop without a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from latentfold.convert import convert_checkpoint
from latentfold.convert.errors import InputError
from latentfold.convert.source.checkpoint import Checkpoint
from latentfold.convert.source.opening import open_checkpoint
from latentfold.eval.quality.continuations import PROMPTS, continuations
from tests.conftest import MakeModel, load, tiny_tokenizer

COMPUTE: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}


@pytest.fixture
def pair(make_model: MakeModel, tmp_path: Path, options: dict[str, Any]) -> tuple[Checkpoint, Checkpoint]:
    """A tiny model and its conversion, near enough to agree for a while."""
    source, out = make_model(), tmp_path / "out"
    convert_checkpoint(str(source), str(out), kv_rank=24, rope_dim=8, **options)
    return open_checkpoint(source), open_checkpoint(out)


def greedy(folder: Path, prompt: str, count: int, end: int = 1) -> list[int]:
    """The model's likeliest token, `count` times, the whole text read anew each time."""
    model, tokens = load(folder), tiny_tokenizer()(prompt, return_tensors="pt")["input_ids"]
    length = tokens.shape[1]
    for _ in range(count):
        with torch.no_grad():
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
        if tokens[0, -1] == end:
            break
    return tokens[0, length:].tolist()


def test_continuations_are_the_likeliest_tokens(pair: tuple[Checkpoint, Checkpoint]) -> None:
    # options that ask for something else than greedy decoding must not matter
    GenerationConfig(do_sample=True, temperature=5.0, repetition_penalty=3.0, eos_token_id=1).save_pretrained(
        pair[0].folder
    )
    prompts = ("The keys of a model", "def read(rows):")
    found = continuations(*pair, prompts, new_tokens=12, **COMPUTE)
    assert [each.prompt for each in found] == list(prompts)
    for each in found:
        first, second = (greedy(checkpoint.folder, each.prompt, 12) for checkpoint in pair)
        tokenizer = tiny_tokenizer()
        assert each.original == tokenizer.decode(first, skip_special_tokens=True)
        assert each.converted == tokenizer.decode(second, skip_special_tokens=True)
        parts = [i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b]
        assert each.shared_tokens == (parts[0] if parts else min(len(first), len(second)))
        assert each.tokens == 12


def test_a_model_agrees_with_itself_to_the_end(make_model: MakeModel) -> None:
    checkpoint = open_checkpoint(make_model())
    for each in continuations(checkpoint, checkpoint, new_tokens=5, **COMPUTE):
        assert each.shared_tokens == len(greedy(checkpoint.folder, each.prompt, 5)) and each.original == each.converted


def test_a_text_that_ends_is_not_continued(make_model: MakeModel) -> None:
    folder = make_model()
    prompt = "The keys"
    first = greedy(folder, prompt, 4)
    GenerationConfig(eos_token_id=[first[1], 1]).save_pretrained(folder)
    checkpoint = open_checkpoint(folder)
    (found,) = continuations(checkpoint, checkpoint, (prompt,), new_tokens=4, **COMPUTE)
    assert found.shared_tokens == (1 if first[0] == first[1] else 2) and found.tokens == 4


def test_only_the_positions_a_model_has_are_written(make_model: MakeModel) -> None:
    long, short = open_checkpoint(make_model()), open_checkpoint(make_model(max_position_embeddings=24))
    (found,) = continuations(long, short, ("x" * 20,), new_tokens=48, **COMPUTE)
    assert found.tokens == 4
    with pytest.raises(InputError, match=r"24 tokens, and .* takes at most 24 positions"):
        continuations(long, short, ("x" * 24,), **COMPUTE)


@pytest.mark.parametrize("prompt", ["", " \n"])
def test_empty_prompts_are_refused(make_model: MakeModel, prompt: str) -> None:
    checkpoint = open_checkpoint(make_model())
    with pytest.raises(InputError, match="expected some text"):
        continuations(checkpoint, checkpoint, (PROMPTS[0], prompt), **COMPUTE)
