"""One layer's calibration: everything that is learned of it.

Shape legend
    T  tokens of a window    D  hidden size    n  rotary pairs of a head
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from latentfold.convert.attention.call import AttentionCall
from latentfold.convert.attention.weights import AttentionWeights
from latentfold.convert.calibrate.moments import LatentAccumulator, RopeAccumulator
from latentfold.convert.calibrate.probe import AttentionProbe, Sampling, query_positions
from latentfold.convert.calibrate.samples import AttentionSample, sample_count
from latentfold.convert.calibrate.statistics import LatentStatistics, RopeStatistics


@dataclass(frozen=True)
class CalibratedLayer:
    """One attention layer and what calibration text says of it.

    Attributes:
        weights: float64.  pairs: (n,) inverse frequencies of its rotary pairs.
        rope, latent: statistics.
        samples: its attention on each window, which a conversion has to reproduce.
    """

    weights: AttentionWeights
    pairs: Tensor
    rope: RopeStatistics
    latent: LatentStatistics
    samples: list[AttentionSample]


def calibrate(
    calls: Iterable[AttentionCall], weights: AttentionWeights, pairs: Tensor, shape: Sequence[int], sampling: Sampling
) -> CalibratedLayer:
    """Everything a conversion learns of one layer.

    Args:
        calls: the layer's attention in each window, as `Visit.observe` gives it.
        weights: float32.  pairs: (n,) inverse frequencies.
        shape: how many windows of how many tokens will come.
        sampling: which queries are looked at.

    Raises:
        RuntimeError: attention computes something else than `weights` say.
    """
    windows, length = shape
    probe, moments = AttentionProbe(weights, pairs), LatentAccumulator(weights, length)
    count = sample_count(weights.q.shape[0] * weights.q.shape[1], windows)

    def look(call: AttentionCall) -> AttentionSample:
        seen = probe.sample(call, sampling)
        moments.add(call.x, seen)
        positions = query_positions(len(call.x), count, sampling.seed + call.window).to(call.x.device)
        return AttentionSample.take(weights, call.x, call.stream, call.output, positions)

    samples = list(map(look, calls))  # nothing of one window is held while the next one is computed
    rope, latent = moments.result()
    return CalibratedLayer(weights.to(torch.float64), pairs, rope, latent, samples)


def calibrate_rotation(
    calls: Iterable[AttentionCall], weights: AttentionWeights, pairs: Tensor, length: int, sampling: Sampling
) -> tuple[RopeStatistics, float]:
    """What a layer's rotations are worth, and what relates a weighted error of scores to the attention output's power.

    Args:
        calls, weights, pairs, sampling: see `calibrate`.  length: tokens of a window.

    Returns:
        The statistics, and the factor by which an objective of `fit_slots` becomes a relative error of the output.
    """
    probe = AttentionProbe(weights, pairs)
    heads, head_dim, _ = weights.q.shape
    moments = RopeAccumulator(heads, len(weights.k), head_dim, length, weights.q.device)

    def look(call: AttentionCall) -> float:
        seen = probe.sample(call, sampling)
        moments.add(seen)
        return seen.output_power

    power = sum(map(look, calls))
    return moments.result(), 0.5 * weights.scale**2 * moments.samples / max(power, 1e-300)
