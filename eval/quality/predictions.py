"""Next-token quality from the last hidden states of both models: NLL, KL, top-1 agreement.

Shape legend
    N  windows    T  tokens of a window    D, D'  hidden sizes    V  vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from latentfold.eval.records import Agreement, Curve, Nll

LOGIT_BUDGET = 1 << 24
"""Logits held at a time per model; 4096 tokens of a 256k vocabulary would be 2^30."""

RUN = 256
"""Neighbouring tokens are not independent: standard errors are over means of runs of this many."""

FIRST_BUCKET = 512

CURVE_RUN = 16

KL_QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class TokenScores:
    """Per prediction, (N, T-1): NLL of both models in nats, KL(original || converted), same token ranked first."""

    original: Tensor
    converted: Tensor
    kl: Tensor
    top1: Tensor

    def split(self, windows: list[int]) -> list[TokenScores]:
        """The scores of the first windows[0] rows, of the next windows[1], ..."""
        parts = (part.split(windows) for part in (self.original, self.converted, self.kl, self.top1))
        return [TokenScores(*rows) for rows in zip(*parts, strict=True)]


Head = Callable[[Tensor], Tensor]


@torch.no_grad()
def score_tokens(
    tokens: Tensor, original: list[Tensor], converted: list[Tensor], original_head: Head, converted_head: Head
) -> TokenScores:
    """Score every prediction of every window, a few logits at a time.

    Args:
        tokens: (N, T).  original, converted: N last hidden states (1, T, D) and (1, T, D').
        original_head, converted_head: hidden states to logits (.., V).
    """
    count, length = tokens.shape
    scores = [torch.zeros(count, length - 1, dtype=torch.float64) for _ in range(4)]
    step = None
    for i in range(count):
        start = 0
        while start < length - 1:
            stop = min(length - 1, start + (step or 8))
            a = original_head(original[i][0, start:stop]).float().log_softmax(-1)
            b = converted_head(converted[i][0, start:stop]).float().log_softmax(-1)
            target = tokens[i, start + 1 : stop + 1, None].to(a.device)
            found = (
                -a.gather(1, target)[:, 0],
                -b.gather(1, target)[:, 0],
                (a.exp() * (a - b)).sum(-1),
                a.argmax(-1) == b.argmax(-1),
            )
            for total, part in zip(scores, found, strict=True):
                total[i, start:stop] = part.to("cpu", torch.float64)
            step = step or max(1, LOGIT_BUDGET // a.shape[-1])
            start = stop
    return TokenScores(*scores)


def standard_error(values: Tensor) -> float | None:
    """Of the mean of (N, T) values, over means of runs of `RUN` tokens; None where there are fewer than two runs."""
    runs = [chunk.mean() for row in values for chunk in row.split(RUN) if len(chunk) * 2 > min(RUN, len(row))]
    if len(runs) < 2:
        return None
    return float(torch.stack(runs).std() / math.sqrt(len(runs)))


def nll(scores: TokenScores, start: int, end: int) -> Nll:
    """Both models over predictions made with `start` to `end` tokens of context."""
    a, b = scores.original[:, start:end], scores.converted[:, start:end]
    return Nll(
        start=start,
        end=end,
        predictions=a.numel(),
        original=float(a.mean()),
        converted=float(b.mean()),
        gap=float((b - a).mean()),
        gap_standard_error=standard_error(b - a),
    )


def position_buckets(length: int) -> list[tuple[int, int]]:
    """Context ranges that double: 0-512, 512-1024, 1024-2048, ... up to `length`."""
    edges = [0, FIRST_BUCKET]
    while edges[-1] < length:
        edges.append(2 * edges[-1])
    return [(a, min(b, length)) for a, b in pairwise(edges) if a < length]


def curve(scores: TokenScores) -> Curve:
    """NLL of both models against context, in runs of positions that widen with the context."""
    length = scores.original.shape[1]
    edges = [0]
    while edges[-1] < length:
        edges.append(min(length, edges[-1] + max(CURVE_RUN, edges[-1] // 4)))
    runs = list(pairwise(edges))
    means = [[float(part[:, a:b].mean()) for a, b in runs] for part in (scores.original, scores.converted)]
    return Curve(tuple((a + b - 1) / 2 for a, b in runs), tuple(means[0]), tuple(means[1]))


def agreement(scores: TokenScores) -> Agreement:
    """KL and top-1 agreement over all predictions."""
    quantiles = torch.quantile(scores.kl.flatten(), torch.tensor(KL_QUANTILES, dtype=scores.kl.dtype))
    return Agreement(
        kl=float(scores.kl.mean()),
        kl_standard_error=standard_error(scores.kl),
        kl_quantiles={f"{q:g}": float(value) for q, value in zip(KL_QUANTILES, quantiles, strict=True)},
        top1=float(scores.top1.mean()),
    )


def _mean_standard_error(errors: Sequence[float | None]) -> float | None:
    """Of the mean of independent figures; None unless each has one."""
    known = [error for error in errors if error is not None]
    return math.sqrt(sum(error**2 for error in known)) / len(errors) if len(known) == len(errors) else None


def macro_nll(rows: Sequence[Nll]) -> Nll:
    """Every text counts alike."""
    count = len(rows)
    return Nll(
        start=min(row.start for row in rows),
        end=max(row.end for row in rows),
        predictions=sum(row.predictions for row in rows),
        original=sum(row.original for row in rows) / count,
        converted=sum(row.converted for row in rows) / count,
        gap=sum(row.gap for row in rows) / count,
        gap_standard_error=_mean_standard_error([row.gap_standard_error for row in rows]),
    )


def macro_agreement(rows: Sequence[Agreement]) -> Agreement:
    """Every text counts alike, in the quantiles too."""
    count = len(rows)
    return Agreement(
        kl=sum(row.kl for row in rows) / count,
        kl_standard_error=_mean_standard_error([row.kl_standard_error for row in rows]),
        kl_quantiles={q: sum(row.kl_quantiles[q] for row in rows) / count for q in rows[0].kl_quantiles},
        top1=sum(row.top1 for row in rows) / count,
    )
