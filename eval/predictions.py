"""Next-token quality from the last hidden states of both models: NLL, KL, top-1 agreement.

Shape legend
    N  windows    T  tokens of a window    D, D'  hidden sizes    V  vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from latentfold.eval.records import Agreement, Nll

LOGIT_BUDGET = 1 << 24
"""Logits held at a time per model; 4096 tokens of a 256k vocabulary would be 2^30."""
RUN = 256
"""Neighbouring tokens are not independent: standard errors are over means of runs of this many."""
FIRST_BUCKET = 512


@dataclass(frozen=True)
class TokenScores:
    """Per prediction, (N, T-1): NLL of both models in nats, KL(original || converted), same token ranked first."""

    original: Tensor
    converted: Tensor
    kl: Tensor
    top1: Tensor


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


def agreement(scores: TokenScores) -> Agreement:
    """KL and top-1 agreement over all predictions."""
    return Agreement(float(scores.kl.mean()), standard_error(scores.kl), float(scores.top1.mean()))
