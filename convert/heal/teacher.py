"""What the original predicts: computed beside the student, or once, layer by layer, and kept on disk.

Shape legend
    B  windows    T  tokens of a window    N  B T    D'  hidden size of the original    V  vocabulary
    K  most likely tokens that are kept
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from latentfold.convert.files import replaced
from latentfold.convert.heal.distill import Comparison, Targets, chunk_size, divergence, top_divergence
from latentfold.convert.heal.models import Arithmetic, hidden_and_head
from latentfold.convert.heal.text import Window
from latentfold.convert.model.streamed import StreamedModel
from latentfold.convert.model.walk import Walk
from latentfold.convert.progress import Progress

KEPT = 64
"""Tokens whose probability is kept; all others are one event, of what probability is left."""
STATES = 1 << 30
"""Values of hidden states that are in memory while windows go through the original layer by layer."""


class Teacher(Protocol):
    """Whoever knows what the original predicts."""

    def predict(self, windows: Sequence[Window]) -> Targets:
        """For all tokens of B windows of one length, in order."""


class Beside:
    """The original in memory.

    Args:
        model: the whole model.
    """

    def __init__(self, model: Any, arithmetic: Arithmetic) -> None:
        self.arithmetic = arithmetic
        self.hidden, self.head = hidden_and_head(model)

    @torch.no_grad()
    def predict(self, windows: Sequence[Window]) -> Targets:
        tokens = torch.stack([window.tokens for window in windows]).to(self.arithmetic.device)
        with self.arithmetic():
            return _FromHidden(self.hidden(tokens).flatten(0, 1), self.head)


class _FromHidden:
    """(N, D') last hidden states and the head that makes logits of them."""

    def __init__(self, rows: Tensor, head: Any) -> None:
        self.rows, self.head = rows, head

    def split(self, size: int) -> Iterator[Comparison]:
        for part in self.rows.split(size):
            yield partial(self._compared, part)

    def _compared(self, part: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        return divergence(logits, self.head(part))


class Recorded:
    """The original's predictions as a file of them has it; see `record`."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.device = device
        self.places: dict[tuple[int, int], tuple[Path, int]] = {}
        for path in sorted(folder.glob("*.pt")):
            for row, place in enumerate(torch.load(path, mmap=True)["places"].tolist()):
                self.places[place[0], place[1]] = (path, row)
        self._open: dict[Path, dict[str, Tensor]] = {}

    def predict(self, windows: Sequence[Window]) -> Targets:
        found = [self._row(window) for window in windows]
        ids, log_p = (torch.cat(parts).to(self.device) for parts in zip(*found, strict=True))
        return _Top(ids, log_p)

    def _row(self, window: Window) -> tuple[Tensor, Tensor]:
        path, row = self.places[window.place]
        if path not in self._open:
            self._open[path] = torch.load(path, mmap=True)
        file = self._open[path]
        return file["ids"][row], file["log_p"][row]


class _Top:
    """(N, K) most likely tokens and their log probabilities."""

    def __init__(self, ids: Tensor, log_p: Tensor) -> None:
        self.ids, self.log_p = ids, log_p

    def split(self, size: int) -> Iterator[Comparison]:
        for ids, log_p in zip(self.ids.split(size), self.log_p.split(size), strict=True):
            yield partial(top_divergence, ids=ids.long(), log_p=log_p)


@torch.no_grad()
def record(model: StreamedModel, windows: Sequence[Window], folder: Path, progress: Progress) -> None:
    """Write what a model predicts for windows of one length, one layer's weights in memory at a time.

    A group of windows that fits in memory goes through all layers at once and makes a file; files that are there
    already are not computed again.
    """
    folder.mkdir(exist_ok=True)
    config = model.config.get_text_config()
    length = len(windows[0].tokens)
    group = max(1, STATES // (length * config.hidden_size))
    for start in range(0, len(windows), group):
        path, part = folder / f"{start:08}.pt", windows[start : start + group]
        if path.exists():
            continue
        stage = f"original {start + len(part)}/{len(windows)}"
        walk = Walk(model, [window.tokens for window in part], progress=progress, stage=stage)
        for visit in walk:
            visit.advance()
        with model.head() as head:
            found = [_top(stream[0], head, config.vocab_size) for stream in walk.streams]
        ids, log_p = (torch.stack(parts) for parts in zip(*found, strict=True))
        places = torch.tensor([window.place for window in part])
        with replaced(path) as temporary:
            torch.save({"places": places, "ids": ids, "log_p": log_p}, temporary)


def _top(hidden: Tensor, head: Any, vocab: int) -> tuple[Tensor, Tensor]:
    """(T, D') -> (T, K) tokens and their log probabilities."""
    found = []
    for part in hidden.split(chunk_size(vocab)):
        log_p = head(part).log_softmax(-1, dtype=torch.float32)
        found.append(log_p.topk(min(KEPT, log_p.shape[-1])))
    log_p, ids = (torch.cat(parts) for parts in zip(*found, strict=True))
    return ids.to("cpu", torch.int32), log_p.cpu()
