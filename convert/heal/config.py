"""What healing is asked to do, validated once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from latentfold.convert.choices import PRODUCTS, RECOMPUTED, TRAINED
from latentfold.convert.errors import InputError
from latentfold.convert.model.devices import resolve_device

DEFAULT_MINUTES = 10.0


@dataclass(frozen=True)
class HealingConfig:
    """Options of `heal_checkpoint`; every default is what the command line uses.

    Attributes:
        converted: folder of a conversion.
        output: folder to write.
        teacher: folder or Hub id of the original; None: the one that the record names.
        revision, token: for a Hub id; revision None: the commit that the record names.
        minutes, steps, tokens: how long to train, in one of these; by default ten minutes.
        text: text or jsonl files; empty: the bundled calibration text.
        seq_len: tokens of a window.
        batch_tokens: tokens a step, whole windows.
        train: "attention" alone, attention and "norms", or "all" tensors of the layers.
        rate: step of the optimizer relative to each tensor's size; None: chosen by how much there is to heal.
        seed: of the order of the text.
        recompute: of which layers the inner results are computed again on the way back instead of being kept: "none",
            "half", "all"; the more, the slower and the less memory.
        cache_teacher: compute the original's predictions once, layer by layer, and keep the likeliest tokens' on disk,
            so that the original needs no memory and every epoch but the first no time; all epochs are then alike.
        device: torch device, or "auto".
        dtype: of products: "float32", "bfloat16", or "auto", the faster one here; what is trained is kept in float32.
        overwrite: replace what `output` holds, once the new checkpoint is complete.
    """

    converted: str
    output: str
    teacher: str | None = None
    revision: str | None = None
    token: str | None = field(default=None, repr=False)  # a secret
    minutes: float | None = None
    steps: int | None = None
    tokens: int | None = None
    text: tuple[str, ...] = ()
    seq_len: int = 1024
    batch_tokens: int = 1024
    train: str = "all"
    rate: float | None = None
    seed: int = 0
    recompute: str = "half"
    cache_teacher: bool = False
    device: str = "auto"
    dtype: str = "auto"
    overwrite: bool = False

    def __post_init__(self) -> None:
        budgets = {"minutes": self.minutes, "steps": self.steps, "tokens": self.tokens}
        given = {name: value for name, value in budgets.items() if value is not None}
        if len(given) > 1:
            raise InputError(f"expected one of minutes, steps and tokens, found {' and '.join(given)}")
        for name, amount in given.items():
            if not amount > 0:
                raise InputError(f"{name} {amount}: expected a positive number")
        if self.seq_len < 16:
            raise InputError(f"seq_len {self.seq_len}: expected at least 16")
        if self.batch_tokens < self.seq_len:
            raise InputError(f"batch_tokens {self.batch_tokens}: expected at least one window, seq_len {self.seq_len}")
        for name, value, choices in (
            ("train", self.train, TRAINED),
            ("dtype", self.dtype, ("auto", *PRODUCTS)),
            ("recompute", self.recompute, tuple(RECOMPUTED)),
        ):
            if value not in choices:
                raise InputError(f"{name} {value}: expected {', '.join(choices[:-1])} or {choices[-1]}")
        if self.rate is not None and not 0 < self.rate < 1:
            raise InputError(f"rate {self.rate}: expected a number between 0 and 1, such as 0.001")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed {self.seed}: expected 0 to 2^63 - 1")
        resolve_device(self.device)

    @property
    def seconds(self) -> float | None:
        """The budget in seconds, where it is one of time."""
        if self.steps is None and self.tokens is None:
            return 60 * (self.minutes if self.minutes is not None else DEFAULT_MINUTES)
        return None

    @property
    def max_steps(self) -> int | None:
        """The budget in steps, where it is none of time."""
        if self.steps is not None:
            return self.steps
        return None if self.tokens is None else max(1, self.tokens // (self.batch * self.seq_len))

    @property
    def batch(self) -> int:
        """Windows a step."""
        return self.batch_tokens // self.seq_len

    @property
    def torch_device(self) -> torch.device:
        """The device to compute on."""
        return resolve_device(self.device)

    @property
    def output_path(self) -> Path:
        """Where the checkpoint goes."""
        return Path(self.output)
