"""Documents to token windows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from latentfold.convert.errors import InputError
from latentfold.convert.text.documents import Document

DEFAULT_WINDOW = 4096
"""Tokens of a window, where a model takes as many."""


@dataclass(frozen=True)
class Windows:
    """Equally long token windows and where they come from.

    Attributes:
        tokens: (N, T) int64.
        sources: names of the texts used.
        sha256: of all tokens used, so that a run can be told from another.
    """

    tokens: Tensor
    sources: tuple[str, ...]
    sha256: str


def leading_tokens(tokenizer: Any) -> list[int]:
    """Tokens the tokenizer puts before every text (BOS, for most Llama tokenizers)."""
    ids = tokenizer("x", add_special_tokens=True)["input_ids"]
    plain = tokenizer("x", add_special_tokens=False)["input_ids"]
    for start in range(len(ids) - len(plain) + 1):
        if ids[start : start + len(plain)] == plain:
            return list(ids[:start])
    return []


def tokenize(tokenizer: Any, text: str) -> Tensor:
    """Token ids of a text without special tokens, (N,)."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.long)


def make_windows(
    documents: Sequence[Document],
    tokenizer: Any,
    *,
    length: int,
    count: int,
    purpose: str,
    vocab_size: int,
    skip: int = 0,
) -> Windows:
    """Up to `count` windows of `length` tokens, taken from the documents in turn so that each is represented.

    Each window starts with the tokenizer's own leading tokens, as text does in use; `skip` tokens of each text are
    passed over first.

    Raises:
        InputError: the documents together do not fill one window, or a token is none of the model's.
    """
    lead = leading_tokens(tokenizer)
    body = length - len(lead)
    streams = [tokenize(tokenizer, d.text)[skip:] for d in documents]
    available = [len(s) // body for s in streams]
    if sum(available) == 0:
        found = max((len(s) for s in streams), default=0)
        skipped = f" after the {skip} skipped" if skip else ""
        raise InputError(
            f"{purpose} text is too short: expected at least {body} tokens in one file, found {found}{skipped}; "
            "give more text or a smaller seq_len"
        )
    rows: list[Tensor] = []
    position = 0
    while len(rows) < min(count, sum(available)):
        for stream, whole in zip(streams, available, strict=True):
            if position < whole and len(rows) < count:
                chunk = stream[position * body : (position + 1) * body]
                rows.append(torch.cat([torch.tensor(lead, dtype=torch.long), chunk]))
        position += 1
    tokens = torch.stack(rows)
    largest = int(tokens.max())
    if largest >= vocab_size:
        raise InputError(
            f"{purpose} text: the tokenizer gives token {largest}, the model has {vocab_size}; "
            "expected the model's own tokenizer"
        )
    used = tuple(d.name for d, n in zip(documents, available, strict=True) if n)
    return Windows(tokens, used, hashlib.sha256(tokens.numpy().tobytes()).hexdigest())
