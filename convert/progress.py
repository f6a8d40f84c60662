"""How far a long computation is, told to whoever wants to know."""

from __future__ import annotations

from typing import Protocol

from tqdm.auto import tqdm


class Progress(Protocol):
    """A function that hears of every step of a computation."""

    def __call__(self, stage: str, done: int, total: int, detail: str = "") -> None:
        """`done` of `total` tokens (or runs) of a stage are through; `detail` says where in it, for people."""


def silent(stage: str, done: int, total: int, detail: str = "") -> None:
    """Says nothing."""


class Bars:
    """A bar on stderr, or in a notebook, for each stage in turn."""

    def __init__(self) -> None:
        self._stage: str | None = None
        self._bar: tqdm | None = None

    def __call__(self, stage: str, done: int, total: int, detail: str = "") -> None:
        if self._bar is None or stage != self._stage:
            self._close()
            self._stage, self._bar = stage, tqdm(total=total, desc=stage, unit="", unit_scale=total >= 1000)
        self._bar.set_postfix_str(detail, refresh=False)
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._stage = self._bar = None


def shown(progress: bool | Progress) -> Progress:
    """Bars for True, silence for False; anything else is what it is."""
    if isinstance(progress, bool):
        return Bars() if progress else silent
    return progress
