"""What is trained on, and what is kept aside to see whether it helps.

Shape legend
    T  tokens of a window
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from latentfold.convert.errors import InputError
from latentfold.convert.text.documents import Document
from latentfold.convert.text.windows import leading_tokens, tokenize

HELD_SHARE = 0.05
HELD_WINDOWS = 8
"""Windows kept aside: a share of each text, at its end, and so many of all of them at most."""


@dataclass(frozen=True)
class Window:
    """Tokens that are trained on together.

    Attributes:
        place: which text, and at which of its tokens; texts count from 0, what is held out is text -1.
        tokens: (T,).
    """

    place: tuple[int, int]
    tokens: Tensor


@dataclass(frozen=True)
class HealingText:
    """Tokens to train on and tokens that are never trained on.

    Attributes:
        lead: tokens that every window begins with.
        streams: tokens of each text but for its end.
        held: (N, T) windows from the texts' ends.
        sources: names of the texts.
        sha256: of all tokens.
    """

    lead: Tensor
    streams: tuple[Tensor, ...]
    held: Tensor
    sources: tuple[str, ...]
    sha256: str

    def held_windows(self) -> list[Window]:
        """What is never trained on."""
        return [Window((-1, k), tokens) for k, tokens in enumerate(self.held)]

    def epoch(self, length: int, seed: int) -> list[Window]:
        """Every text once, in windows from a random start, shuffled."""
        generator = torch.Generator().manual_seed(seed)
        body = length - len(self.lead)
        found = []
        for k, stream in enumerate(self.streams):
            first = int(torch.randint(max(1, min(body, len(stream) - body + 1)), (1,), generator=generator))
            for start in range(first, len(stream) - body + 1, body):
                found.append(Window((k, start), torch.cat([self.lead, stream[start : start + body]])))
        return [found[i] for i in torch.randperm(len(found), generator=generator).tolist()]

    def windows(self, length: int, seed: int, begin: int = 0, *, same: bool = False) -> Iterator[Window]:
        """Epochs without end.

        Args:
            begin: windows to pass over, as an interrupted run has seen them.
            same: whether every epoch has the same windows, in the same order.
        """
        epoch = 0
        while True:
            windows = self.epoch(length, seed if same else seed + epoch)
            yield from windows[begin:]
            begin = max(0, begin - len(windows))
            epoch += 1


def healing_text(documents: Sequence[Document], tokenizer: Any, length: int, vocab_size: int) -> HealingText:
    """Divide texts into what is trained on and what is kept aside.

    Raises:
        InputError: they do not fill two windows, or hold a token that is none of the model's.
    """
    lead = torch.tensor(leading_tokens(tokenizer), dtype=torch.long)
    body = length - len(lead)
    tokens = [tokenize(tokenizer, document.text) for document in documents]
    whole = [len(stream) // body for stream in tokens]
    if sum(whole) < 2 or max(whole) < 2:
        raise InputError(
            f"healing text is too short: expected at least two windows of {length} tokens in one file, found "
            f"{max(map(len, tokens), default=0)} tokens; give more text or a smaller seq_len"
        )
    largest = max(int(stream.max()) for stream in tokens if len(stream))
    if largest >= vocab_size:
        raise InputError(f"healing text: the tokenizer gives token {largest}, the model has {vocab_size}")
    aside = [min(n - 1, max(1, round(HELD_SHARE * n))) if n > 1 else 0 for n in whole]
    while sum(aside) > HELD_WINDOWS and max(aside) > 1:
        aside[aside.index(max(aside))] -= 1
    held, streams = [], []
    for stream, count in zip(tokens, aside, strict=True):
        end = len(stream) - count * body
        streams.append(stream[:end])
        held += [torch.cat([lead, row]) for row in stream[end:].view(count, body)] if count else []
    digest = hashlib.sha256(torch.cat(tokens).numpy().tobytes()).hexdigest()
    return HealingText(lead, tuple(streams), torch.stack(held), tuple(d.name for d in documents), digest)
