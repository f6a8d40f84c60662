"""Statistics, accumulated window by window.

Shape legend
    T  tokens of a window    M  sampled query positions    D  hidden size    H  query heads    G  KV heads
    d  head size    n  d/2, rotary pairs    E  moment space: [k_1..k_G; v_1..v_G] (2 G d) or x (D)    P  pools of heads
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from latentfold.convert.attention.pairs import complex_pair_moment
from latentfold.convert.attention.weights import AttentionWeights
from latentfold.convert.calibrate.probe import Sensitivity
from latentfold.convert.calibrate.statistics import LatentStatistics, RopeStatistics

MOMENT_BUDGET = 1 << 30
"""Bytes that one layer's moments may take before heads share them."""


def choose_pools(heads: int, kv_heads: int, width: int, budget: int = MOMENT_BUDGET) -> list[int]:
    """The pool of each head: one pool a head, a KV head or a layer, the finest whose moments fit `budget` bytes."""
    per_pool = 2 * width * width * 8
    if heads * per_pool <= budget:
        return list(range(heads))
    if kv_heads * per_pool <= budget:
        return [h // (heads // kv_heads) for h in range(heads)]
    return [0] * heads


class RopeAccumulator:
    """Streams what `fit_slots` (factorize/rope.py) needs: distances, query power and pooled pair moments."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, length: int, device: torch.device) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        self.kv_heads = kv_heads
        self.distance = zeros(heads, length)
        self.query_power = zeros(heads, head_dim // 2)
        self.key_moment = zeros(kv_heads * head_dim, kv_heads * head_dim)
        self.weight = 0.0
        self.samples = 0

    def add(self, s: Sensitivity) -> None:
        """Accumulate one sequence."""
        for row, m in enumerate(s.positions.tolist()):
            self.distance[:, : m + 1] += s.omega[:, row, : m + 1].flip(-1)
        self.query_power += query_power(s)
        weight = s.omega.sum((0, 1))  # (T,)
        flat = s.keys.flatten(1)
        self.key_moment += (flat.T @ (weight[:, None] * flat)).to(torch.float64)
        self.weight += float(weight.sum(dtype=torch.float64))
        self.samples += len(s.positions)

    def result(self) -> RopeStatistics:
        """The statistics so far."""
        moment = self.key_moment / max(self.weight, 1e-300)
        return RopeStatistics(
            distance=self.distance / self.samples,
            query_power=self.query_power / self.samples,
            key_moment=complex_pair_moment(moment, self.kv_heads),
        )


def query_power(s: Sensitivity) -> Tensor:
    """(H, n) sum over sampled queries of (sum_n omega_mn) |q_mj|^2."""
    squared = s.queries.square()
    n = squared.shape[-1] // 2
    total = s.omega.sum(-1)  # (H, M)
    return torch.einsum("hm,hmj->hj", total, squared[..., :n] + squared[..., n:]).to(torch.float64)


class LatentAccumulator:
    """Streams everything one layer's factorization needs, rope statistics included.

    Moments live in y-space (stacked keys and values) or in x-space, whichever is smaller; keys that went through a
    norm are no map of x. Biases stay outside: softmax does not feel a constant in the keys that do not rotate.
    """

    def __init__(self, weights: AttentionWeights, length: int, budget: int = MOMENT_BUDGET) -> None:
        heads, head_dim, width = weights.q.shape
        hidden = width - weights.has_bias
        kv_heads = weights.k.shape[0]
        device = weights.q.device
        size = kv_heads * head_dim
        self.weights = weights
        self.in_y = weights.has_norm or 2 * size <= hidden
        width = 2 * size if self.in_y else hidden
        pools = choose_pools(heads, kv_heads, width, budget)
        self.pool = torch.tensor(pools, device=device)
        count = max(pools) + 1

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        self.rope = RopeAccumulator(heads, kv_heads, head_dim, length, device)
        self.key_moment, self.value_moment = zeros(count, width, width), zeros(count, width, width)
        self.moment, self.tokens = zeros(width, width), 0
        self.query_moment = zeros(heads, head_dim, head_dim)
        self.overlap = zeros(heads, heads)
        self.output_power = 0.0

    def add(self, x: Tensor, s: Sensitivity) -> None:
        """Accumulate one sequence: its input x (T, D) and the layer's sensitivity to it."""
        self.rope.add(s)
        y = x
        if self.in_y:
            keys = s.keys if self.weights.has_norm or not self.weights.has_bias else s.keys - self.weights.k[..., -1]
            y = torch.cat([keys.flatten(1), s.values.flatten(1)], dim=1)
        self.moment += (y.T @ y).to(torch.float64)
        self.tokens += y.shape[0]
        u = s.influence @ y  # (H, M, E)
        attention = s.probabilities * s.weight.sqrt()[:, None]
        averaged = attention @ y
        for p in range(self.key_moment.shape[0]):
            members = self.pool == p
            for total, rows in ((self.key_moment, u[members]), (self.value_moment, averaged[members])):
                rows = rows.flatten(0, 1)
                total[p] += (rows.T @ rows).to(torch.float64)
        self.overlap += (attention.flatten(1) @ attention.flatten(1).T).to(torch.float64)
        self.query_moment += (s.queries.mT @ (u.square().sum(-1, keepdim=True) * s.queries)).to(torch.float64)
        self.output_power += s.output_power

    def result(self) -> tuple[RopeStatistics, LatentStatistics]:
        """What `fit_slots` and `factorize` need (factorize/)."""
        w, samples = self.weights, self.rope.samples
        kv_heads, head_dim, _ = w.k.shape
        size, hidden = kv_heads * head_dim, w.k.shape[-1] - w.has_bias
        maps = torch.cat([w.k, w.v]).flatten(0, 1)[:, :hidden].to(torch.float64)  # (2Gd, D), without biases
        if self.in_y:
            projection = maps
            maps = torch.eye(2 * size, dtype=torch.float64, device=maps.device)
        else:
            projection = torch.eye(hidden, dtype=torch.float64, device=maps.device)
        if w.has_norm:
            projection = maps
        elif w.has_bias:
            projection = nn.functional.pad(projection, (0, 1))
        key_map, value_map = maps.split(size)
        members = torch.bincount(self.pool).to(torch.float64)  # heads in each pool
        shared = self.overlap.diagonal().sqrt().clamp_min(1e-300)
        size_of_u = self.key_moment.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(1e-300)
        stats = LatentStatistics(
            keys=key_map.reshape(kv_heads, head_dim, -1),
            values=value_map.reshape(kv_heads, head_dim, -1),
            projection=projection,
            pool=self.pool,
            key_moment=self.key_moment / size_of_u[:, None, None],
            value_moment=self.value_moment / (samples * members)[:, None, None],
            moment=self.moment / self.tokens,
            query_moment=self.query_moment / samples,
            overlap=self.overlap / shared[:, None] / shared,
            output_power=self.output_power / samples,
        )
        return self.rope.result(), stats
