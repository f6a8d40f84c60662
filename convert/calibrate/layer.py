"""One layer's calibration: everything that is learned of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from latentfold.convert.attention.weights import AttentionWeights
from latentfold.convert.calibrate.moments import LatentAccumulator
from latentfold.convert.calibrate.probe import AttentionProbe, query_positions
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


class LayerCalibration:
    """Collects a `CalibratedLayer` from windows.

    Args:
        weights: float32.  pairs: (n,) inverse frequencies.
        shape: how many windows of how many tokens will come.
        queries: sampled for the statistics in each window.
        seed: of the sampled positions.
    """

    def __init__(
        self, weights: AttentionWeights, pairs: Tensor, shape: Sequence[int], *, queries: int, seed: int
    ) -> None:
        windows, length = shape
        self.weights, self.pairs, self.queries, self.seed = weights, pairs, queries, seed
        self.probe = AttentionProbe(weights, pairs)
        self.moments = LatentAccumulator(weights, length)
        self.count = sample_count(weights.q.shape[0] * weights.q.shape[1], windows)
        self.samples: list[AttentionSample] = []

    def add(self, window: int, x: Tensor, stream: Tensor, output: Tensor) -> None:
        """One window: attention's normed input, the residual stream and attention's output, all (T, D)."""
        seed = self.seed + window
        seen = self.probe.sample(x, stream, self.queries, seed)
        self.probe.check(seen, output)
        self.moments.add(x, seen)
        positions = query_positions(len(x), self.count, seed).to(x.device)
        self.samples.append(AttentionSample.take(self.weights, x, stream, output, positions))

    def result(self) -> CalibratedLayer:
        """What was collected."""
        rope, latent = self.moments.result()
        return CalibratedLayer(self.weights.to(torch.float64), self.pairs, rope, latent, self.samples)
