"""The method, on one layer: what is learned of it from calibration text, and what is made of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from latentfold.convert.calibrate import AttentionProbe, LatentAccumulator, query_positions
from latentfold.convert.factorize import AttentionWeights, LatentAttention, LatentStatistics, factorize
from latentfold.convert.refit import AttentionSample, refit_output, sample_count
from latentfold.convert.rope import RopeStatistics, fit_slots


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


def convert_layer(layer: CalibratedLayer, slots: Tensor, kv_rank: int) -> LatentAttention:
    """Latent attention of `kv_rank` with slots of the given inverse frequencies (S,)."""
    fit = fit_slots(layer.rope, layer.pairs, slots)
    return refit_output(factorize(layer.latent, layer.weights, fit, kv_rank), slots, layer.samples)
