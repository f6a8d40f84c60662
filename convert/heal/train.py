"""The training loop: steps, a schedule that ends when the budget does, and held-out text that has the last word."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from latentfold.convert.errors import InputError
from latentfold.convert.files import replaced
from latentfold.convert.heal.config import HealingConfig
from latentfold.convert.heal.distill import Targets, chunk_size, distillation_loss
from latentfold.convert.heal.models import Arithmetic, Student, hidden_and_head
from latentfold.convert.heal.optimizer import RelativeAdamW
from latentfold.convert.heal.processes import Processes
from latentfold.convert.heal.teacher import Teacher
from latentfold.convert.heal.text import HealingText, Window
from latentfold.convert.progress import Progress
from latentfold.convert.write.recipe import HealingPoint

WARM_UP = 8
"""Steps until the rate is reached."""
LOOKS = 6
"""How often the held-out text is looked at on the way."""
PATIENCE = 3
"""Looks in a row without a gain that end the training."""
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
        over: whether it has ended before its budget, as nothing was gained any more.
    """

    step: int = 0
    seconds: float = 0.0
    rate: float = 0.0
    curve: list[HealingPoint] = field(default_factory=list)
    best: int = 0
    over: bool = False


class Healer:
    """Trains a student on its teacher's predictions.

    Args:
        state: folder for what an interrupted run needs; used by the first of the processes.
    """

    def __init__(
        self,
        config: HealingConfig,
        teacher: Teacher,
        student: Student,
        text: HealingText,
        arithmetic: Arithmetic,
        state: Path,
        processes: Processes,
    ) -> None:
        self.config, self.teacher, self.student, self.text = config, teacher, student, text
        self.arithmetic, self.state, self.processes = arithmetic, state, processes
        self.hidden, self.head = hidden_and_head(student.model)
        self.vocab = student.model.config.get_text_config().vocab_size
        self.training = Training()
        self.optimizer = RelativeAdamW(student.trained, processes)
        held = processes.share(text.held_windows())
        self.held = [(window.tokens.to(arithmetic.device), teacher.predict([window])) for window in held]

    def run(self, progress: Progress) -> Training:
        """Train until the budget is used up or nothing is gained any more, and leave the student as it was at its best
        on the held-out text.

        Raises:
            InputError: the losses are not finite.
            KeyboardInterrupt: asked to stop; the step was finished, and the next run goes on from it.
        """
        training, config = self.training, self.config
        if not self._resume():
            self._look(0.0)
            training.rate = config.rate or fitting_rate(config.train, training.curve[0].divergence)
            self._save()
        training = self.training
        start, before = time.perf_counter(), training.seconds

        def clock() -> float:
            return self.processes.agreed(before + time.perf_counter() - start)

        windows = self.text.windows(
            config.seq_len, config.seed, training.step * config.batch, same=config.cache_teacher
        )
        with _held_back() as interrupted:
            while (share := self._share(training.seconds)) < 1 and not training.over:
                self._step(share, windows)
                training.step += 1
                training.seconds = clock()
                done = self._share(training.seconds)
                progress("healing", round(1000 * min(done, 1)), 1000, f"step {training.step}")
                if int(done * LOOKS) > int(share * LOOKS) or done >= 1:
                    self._look(training.seconds)
                    training.over = len(training.curve) - 1 - training.best >= PATIENCE
                    training.seconds = clock()  # looking takes time, too
                    self._save()
                if interrupted():
                    self._save()
                    raise KeyboardInterrupt
        self._restore_best()
        return training

    def _share(self, seconds: float) -> float:
        """How much of the budget is used."""
        limit = self.config.seconds
        if limit is not None:
            return seconds / limit
        assert self.config.max_steps is not None
        return self.training.step / self.config.max_steps

    def _step(self, share: float, windows: Iterator[Window]) -> None:
        """One step at the rate that the schedule has after this share of the budget: warm-up, then a half cosine."""
        warm = min(1.0, (self.training.step + 1) / WARM_UP)
        self.optimizer.set_rate(self.training.rate * warm * 0.5 * (1 + math.cos(math.pi * share)))
        batch = self.processes.share(list(islice(windows, self.config.batch)))
        loss = self._loss(batch)
        if not torch.isfinite(loss):
            raise InputError(f"healing: the loss of step {self.training.step} is not finite; try a smaller rate")
        loss.backward()

    def _loss(self, windows: Sequence[Window]) -> Tensor:
        """Mean divergence in nats over all tokens of the windows."""
        targets = self.teacher.predict(windows)
        tokens = torch.stack([window.tokens for window in windows]).to(self.arithmetic.device)
        with self.arithmetic():
            return distillation_loss(self.hidden(tokens), targets, self.head, self.vocab)

    def _look(self, seconds: float) -> None:
        """Measure the student on the text kept aside, and keep it if it was never better."""
        apart, nll = self._held_out()
        training = self.training
        tokens = training.step * self.config.batch * self.config.seq_len
        training.curve.append(HealingPoint(training.step, tokens, seconds, apart, nll))
        training.best = min(range(len(training.curve)), key=lambda i: training.curve[i].divergence)
        if training.best == len(training.curve) - 1 and self.processes.first:
            _write({name: p.detach() for name, p in self.student.trained.items()}, self.state / "best.pt")

    @torch.no_grad()
    def _held_out(self) -> tuple[float, float]:
        """Divergence and NLL of the student on the text kept aside, nats per token."""
        totals = torch.zeros(3, dtype=torch.float64)
        for tokens, targets in self.held:
            totals += self._compared(tokens, targets)
        apart, nll, count = self.processes.sum_(totals).tolist()
        return apart / count, nll / count

    def _compared(self, tokens: Tensor, targets: Targets) -> Tensor:
        """Sums of divergence and NLL over a window's tokens (T,), and their number; float64."""
        size = chunk_size(self.vocab)
        following = torch.cat([tokens[1:], tokens.new_full((1,), -100)])  # after the last one nothing is known
        totals = torch.zeros(3, dtype=torch.float64)
        with self.arithmetic():
            mine = self.hidden(tokens[None])[0]
            for rows, compare, next_ in zip(mine.split(size), targets.split(size), following.split(size), strict=True):
                logits = self.head(rows)
                totals[0] += float(compare(logits)[0])
                totals[1] += float(nn.functional.cross_entropy(logits.float(), next_, reduction="sum"))
        totals[2] = len(tokens)
        totals[1] *= len(tokens) / (len(tokens) - 1)
        return totals

    def _save(self) -> None:
        """Everything that going on from here needs, in one move."""
        if self.processes.first:
            whole = {
                "training": asdict(self.training),
                "weights": {name: parameter.detach() for name, parameter in self.student.trained.items()},
                "optimizer": self.optimizer.state_dict(),
            }
            _write(whole, self.state / "state.pt")

    def _resume(self) -> bool:
        """Take up an interrupted run, if there is one."""
        path = self.state / "state.pt"
        found: dict[str, Any] | None = None
        if self.processes.first and path.exists():
            found = torch.load(path, map_location="cpu", weights_only=True)
        known = self.processes.shared(found["training"] if found else None)
        if known is None:
            return False
        curve = [HealingPoint(**point) for point in known.pop("curve")]
        self.training = Training(**known, curve=curve)
        for name in self.student.trained:
            one = self.processes.shared((found["weights"][name], found["optimizer"][name]) if found else None)
            assert one is not None
            self._load({name: one[0]})
            self.optimizer.load_state_dict({name: one[1]})
        return True

    def _restore_best(self) -> None:
        if self.processes.first:
            self._load(torch.load(self.state / "best.pt", map_location="cpu", weights_only=True))

    @torch.no_grad()
    def _load(self, weights: dict[str, Tensor]) -> None:
        for name, tensor in weights.items():
            self.student.trained[name].copy_(tensor)


def _write(what: Any, path: Path) -> None:
    with replaced(path) as temporary:
        torch.save(what, temporary)


@contextmanager
def _held_back() -> Iterator[Callable[[], bool]]:
    """Ctrl-C waits until it is asked for in the block; a second one does not."""
    if threading.current_thread() is not threading.main_thread():  # where Python allows no handlers
        yield lambda: False
        return
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            signal.default_int_handler(number, frame)
        asked = True

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
