"""The training loop: steps, a schedule that ends when the budget does, and held-out text that has the last word."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from latentfold.convert.errors import InputError
from latentfold.convert.heal.config import HealingConfig
from latentfold.convert.heal.distill import chunk_size, distillation_loss, divergence
from latentfold.convert.heal.models import Arithmetic, Student, hidden_and_head
from latentfold.convert.heal.text import HealingText
from latentfold.convert.progress import Progress
from latentfold.convert.write.recipe import HealingPoint

BETAS = (0.9, 0.98)
WARM_UP = 8
"""Steps until the rate is reached."""
LOOKS = 6
"""How often the held-out text is looked at on the way."""
RATES = {"attention": 2e-3, "norms": 2e-3, "all": 1e-3}
"""Steps relative to a tensor's size, for a conversion that is `FAR` from its original."""
FAR = 0.4
"""Divergence in nats on held-out text."""
FITTING = 0.8
"""The rate goes with this power of the divergence: what is nearly healed is ruined by large steps."""


def fitting_rate(train: str, apart: float) -> float:
    """The optimizer's step relative to a tensor's size, for a student so far from its teacher (nats)."""
    return RATES[train] * min(1.0, max(apart, 1e-4) / FAR) ** FITTING


@dataclass
class Training:
    """What an interrupted run needs to go on; the weights and the optimizer's state lie beside it.

    Attributes:
        step, seconds: done so far.
        rate: see `fitting_rate`.
        curve: the held-out text, from before the first step on.
        best: index of the best point.
    """

    step: int = 0
    seconds: float = 0.0
    rate: float = 0.0
    curve: list[HealingPoint] = field(default_factory=list)
    best: int = 0


class Healer:
    """Trains a student on its teacher's predictions.

    Args:
        state: folder for what an interrupted run needs.
    """

    def __init__(
        self,
        config: HealingConfig,
        teacher: Any,
        student: Student,
        text: HealingText,
        arithmetic: Arithmetic,
        state: Path,
    ) -> None:
        self.config, self.student, self.text, self.arithmetic, self.state = config, student, text, arithmetic, state
        self.teacher, self.teacher_head = hidden_and_head(teacher)
        self.hidden, self.head = hidden_and_head(student.model)
        self.vocab = student.model.config.get_text_config().vocab_size
        self.training = Training()
        self.optimizer: Any = None

    def _loss(self, tokens: Tensor) -> Tensor:
        """(B, T) -> mean divergence in nats."""
        tokens = tokens.to(self.arithmetic.device)
        with self.arithmetic():
            with torch.no_grad():
                target = self.teacher(tokens)
            found = self.hidden(tokens)
            return distillation_loss(found, target, self.head, self.teacher_head, self.vocab)

    @torch.no_grad()
    def _held_out(self) -> tuple[float, float]:
        """Divergence and NLL of the student on the text kept aside, nats per token."""
        found = [self._compared(row[None].to(self.arithmetic.device)) for row in self.text.held]
        apart, nll = torch.tensor(found, dtype=torch.float64).mean(0).tolist()
        return apart, nll

    def _compared(self, tokens: Tensor) -> tuple[float, float]:
        """Divergence and NLL of one window (1, T)."""
        with self.arithmetic():
            mine, target = self.hidden(tokens)[0, :-1], self.teacher(tokens)[0, :-1]
            totals = torch.zeros(2, dtype=torch.float64)
            size = chunk_size(self.vocab)
            for rows, wanted, following in zip(
                mine.split(size), target.split(size), tokens[0, 1:].split(size), strict=True
            ):
                logits = self.head(rows)
                totals[0] += float(divergence(logits, self.teacher_head(wanted))[0])
                totals[1] += float(nn.functional.cross_entropy(logits.float(), following, reduction="sum"))
        return float(totals[0]) / len(mine), float(totals[1]) / len(mine)

    def run(self, progress: Progress) -> Training:
        """Train until the budget is used up, and leave the student as it was at its best on the held-out text.

        Raises:
            InputError: the losses are not finite.
        """
        training, config = self.training, self.config
        if not self._resume():
            self._look(0.0)
            training.rate = config.rate or fitting_rate(config.train, training.curve[0].divergence)
            self._optimize()
            self._save()
        start, before = time.perf_counter(), training.seconds
        windows = self.text.windows(config.seq_len, config.seed, training.step * config.batch)
        while (share := self._share(training.seconds)) < 1:
            self._step(share, windows)
            training.step += 1
            training.seconds = before + time.perf_counter() - start
            done = self._share(training.seconds)
            progress("healing", round(1000 * min(done, 1)), 1000, f"step {training.step}")
            if int(done * LOOKS) > int(share * LOOKS) or done >= 1:
                self._look(training.seconds)
                training.seconds = before + time.perf_counter() - start  # looking takes time, too
                self._save()
        self._restore_best()
        return training

    def _share(self, seconds: float) -> float:
        """How much of the budget is used."""
        limit = self.config.seconds
        if limit is not None:
            return seconds / limit
        assert self.config.max_steps is not None
        return self.training.step / self.config.max_steps

    def _optimize(self) -> None:
        groups = [
            {"params": [parameter], "size": float(parameter.detach().square().mean().sqrt())}
            for parameter in self.student.trained.values()
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, weight_decay=0.0, fused=True)

    def _step(self, share: float, windows: Iterator[Tensor]) -> None:
        """One step at the rate that the schedule has after this share of the budget: warm-up, then a half cosine."""
        warm = min(1.0, (self.training.step + 1) / WARM_UP)
        rate = self.training.rate * warm * 0.5 * (1 + math.cos(math.pi * share))
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["size"]
        batch = torch.stack(list(islice(windows, self.config.batch)))
        loss = self._loss(batch)
        if not torch.isfinite(loss):
            raise InputError(f"healing: the loss of step {self.training.step} is not finite; try a smaller rate")
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _look(self, seconds: float) -> None:
        apart, nll = self._held_out()
        training = self.training
        tokens = training.step * self.config.batch * self.config.seq_len
        training.curve.append(HealingPoint(training.step, tokens, seconds, apart, nll))
        training.best = min(range(len(training.curve)), key=lambda i: training.curve[i].divergence)
        if training.best == len(training.curve) - 1:
            _save({name: p.detach() for name, p in self.student.trained.items()}, self.state / "best.pt")

    def _save(self) -> None:
        """Everything that going on from here needs, in one move."""
        training = self.training
        whole = {
            "training": asdict(training),
            "weights": {name: parameter.detach() for name, parameter in self.student.trained.items()},
            "optimizer": self.optimizer.state_dict(),
        }
        _save(whole, self.state / "state.pt")

    def _resume(self) -> bool:
        """Take up an interrupted run, if there is one."""
        path = self.state / "state.pt"
        if not path.exists():
            return False
        found = torch.load(path, map_location=self.arithmetic.device, weights_only=True)
        curve = [HealingPoint(**point) for point in found["training"].pop("curve")]
        self.training = Training(**found["training"], curve=curve)
        self._load(found["weights"])
        self._optimize()
        self.optimizer.load_state_dict(found["optimizer"])
        return True

    def _restore_best(self) -> None:
        self._load(torch.load(self.state / "best.pt", map_location=self.arithmetic.device, weights_only=True))

    @torch.no_grad()
    def _load(self, weights: dict[str, Tensor]) -> None:
        for name, tensor in weights.items():
            self.student.trained[name].copy_(tensor)


def _save(what: Any, path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    torch.save(what, temporary)
    temporary.replace(path)
