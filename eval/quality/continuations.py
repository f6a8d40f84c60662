"""The same prompts continued by both models."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
from transformers import GenerationConfig

from latentfold.convert.errors import InputError
from latentfold.convert.model.whole import loaded
from latentfold.convert.source.checkpoint import Checkpoint
from latentfold.convert.source.config import max_positions
from latentfold.convert.source.tokenizer import load_tokenizer
from latentfold.eval.records import Continuation

NEW_TOKENS = 48

PROMPTS = (
    "The old lighthouse keeper had not spoken to anyone for eleven days when, one morning, he saw",
    "The capital of France is Paris. The capital of Japan is Tokyo. The capital of Italy is",
    'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n',
    "Write three short rules for keeping a kitchen tidy.\n\n1.",
)
"""Prose, facts, code and an instruction; plain text, without a chat template, so that base models read them alike."""


def continuations(
    original: Checkpoint,
    converted: Checkpoint,
    prompts: Sequence[str] = PROMPTS,
    *,
    new_tokens: int = NEW_TOKENS,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Continuation, ...]:
    """Continue each prompt greedily with both models, one model in memory at a time.

    Each model reads the prompt as its own tokenizer gives it, special tokens included. Sampling options and penalties
    of generation_config.json are left out. Where a prompt leaves fewer than `new_tokens` positions, only those are
    asked for.

    Raises:
        InputError: a prompt is empty or leaves no position to continue in, or weights do not fit in memory.
    """
    if new_tokens < 1:
        raise InputError(f"{new_tokens} tokens of continuation: expected at least 1")
    counts = check_prompts(original, converted, prompts, new_tokens=new_tokens)
    written = []
    for checkpoint in (original, converted):
        tokenizer = load_tokenizer(checkpoint)
        with loaded(checkpoint, dtype, device) as model:
            written.append(
                [_continue(model, tokenizer, prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
            )
    return tuple(
        Continuation(prompt, first_text, second_text, _shared(first, second), count)
        for prompt, count, (first, first_text), (second, second_text) in zip(prompts, counts, *written, strict=True)
    )


def check_prompts(
    original: Checkpoint, converted: Checkpoint, prompts: Sequence[str], *, new_tokens: int = NEW_TOKENS
) -> list[int]:
    """How many of `new_tokens` each prompt leaves positions for in both models; needs their tokenizers alone.

    Raises:
        InputError: a prompt is empty, is no Unicode text, or leaves no position to continue in.
    """
    room = [_room(checkpoint, prompts, new_tokens) for checkpoint in (original, converted)]
    return [min(both) for both in zip(*room, strict=True)]


def _room(checkpoint: Checkpoint, prompts: Sequence[str], new_tokens: int) -> list[int]:
    limit = max_positions(checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    counts = []
    for prompt in prompts:
        if not prompt.strip() or any("\ud800" <= character <= "\udfff" for character in prompt):
            raise InputError(f"prompt {prompt[:32]!r}: expected some text to continue, in UTF-8")
        length = len(tokenizer(prompt)["input_ids"])
        if not length:
            raise InputError(f"prompt {prompt[:32]!r}: expected some text to continue")
        if limit is not None and length >= limit:
            raise InputError(
                f"prompt {prompt[:32]!r}...: {length} tokens, and {checkpoint.name} takes at most {limit} positions; "
                "expected a shorter prompt"
            )
        counts.append(new_tokens if limit is None else min(new_tokens, limit - length))
    return counts


def _continue(model: Any, tokenizer: Any, prompt: str, count: int) -> tuple[list[int], str]:
    """Up to `count` new tokens and their text; fewer where the model ends the text itself."""
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    end = model.generation_config.eos_token_id
    # generate() fills what its config leaves open from the model's, so penalties have to go there
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=end,
        pad_token_id=end[0] if isinstance(end, list) else end,
    )
    tokens = model.generate(**inputs)[0].tolist()
    length = inputs["input_ids"].shape[1]
    # decoded with the prompt before them: SentencePiece drops the space before a text's first word
    text, before = (
        tokenizer.decode(part, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for part in (tokens, tokens[:length])
    )
    return tokens[length:], text.removeprefix(before)


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
