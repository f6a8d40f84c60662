"""What a layer's attention is sensitive to, measured on calibration text, streamed.

Shape legend
    B  sequences in a batch    T  tokens of a sequence    M  sampled query positions of a sequence
    D  hidden size    H  query heads    G  KV heads    d  head size    n = d/2    E  moment space    P  pools

To first order, errors e_mn in the scores of query m move one head's output, as the residual stream sees it, by

    W_O sum_n p_mn (v_n - o_m) e_mn                                                                                 (1)

Two readings of it are needed. For errors that rotate, and so are unrelated from key to key, its squared length is
sum_n omega_mn e_mn^2 with omega_mn = p_mn^2 |W_O (v_n - o_m)|^2. Errors e_mn = q_m . (D y_n) of a linear map D of the
keys are the same map for every key and add up: projecting (1) on a random direction g gives q_m . (D u_m) with

    u_m = sum_n p_mn (g . W_O (v_n - o_m)) y_n                                                                      (2)

so that E[(q q^T) (x) (u u^T)] is the exact quadratic form of the output error in D (Hutchinson's estimator); it is kept
as a product of the two factors. It ignores by itself what softmax ignores, a constant added to all keys.
Every query counts in proportion to 1/|h_m|^2, h the residual stream it is added to: an error is as large as what
the next norm makes of it, and the attention-sink token, whose stream is thousands of times longer, feels none. Where
the output goes through a norm of its own first (Gemma 2, 3; OLMo 2), an error counts relative to the output's length,
and W_O stands for itself times that norm's gain.
Activations are never stored: one sequence at a time is turned into moments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from latentfold.convert.factorize import AttentionWeights, LatentStatistics
from latentfold.convert.rope import RopeStatistics, complex_pair_moment

RECOMPUTED_TOLERANCE = 1e-3
"""Largest relative difference of attention recomputed here from the model's own, both in float32."""
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


@dataclass(frozen=True)
class Sensitivity:
    """One sequence seen by one layer, at M sampled queries; `omega` and `influence` carry the queries' weights.

    Attributes:
        positions: (M,) the sampled query positions, ascending.
        weight: (M,) 1/|h|^2 of each, h in units of the outputs.
        queries: (H, M, d) before RoPE.  keys, values: (T, G, d) before RoPE.
        probabilities: (H, M, T).
        omega: (H, M, T), weight of an unrelated squared score error.
        influence: (H, M, T), coefficients of y_n in equation (2) for one random g a query.
        outputs: (M, D) attention outputs, as far as they are felt (`AttentionWeights.felt_o`).
    """

    positions: Tensor
    weight: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    probabilities: Tensor
    omega: Tensor
    influence: Tensor
    outputs: Tensor

    @property
    def output_power(self) -> float:
        """Weighted squared length of the attention outputs, summed over the sampled queries."""
        return float((self.weight * self.outputs.square().sum(-1)).sum(dtype=torch.float64))


class AttentionProbe:
    """Recomputes a layer's attention from its normed input at a few query positions.

    Args:
        weights: the layer, any float dtype (float32 is enough; sums are kept in float64).
        frequencies: (n,) the source's inverse frequencies.
    """

    def __init__(self, weights: AttentionWeights, frequencies: Tensor) -> None:
        self.weights = weights
        self.frequencies = frequencies.to(torch.float64)
        self.felt_o = weights.felt_o
        self.value_gram = self.felt_o.mT @ self.felt_o  # (H, d, d)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Apply RoPE to (.., N, d) at the given N positions (rotate-half layout)."""
        n = x.shape[-1] // 2
        phase = positions.to(torch.float64)[:, None] * self.frequencies
        cos, sin = phase.cos().to(x.dtype), phase.sin().to(x.dtype)
        re, im = x[..., :n], x[..., n:]
        return torch.cat([re * cos - im * sin, im * cos + re * sin], dim=-1)

    def sample(self, x: Tensor, stream: Tensor, count: int, seed: int) -> Sensitivity:
        """Look at one sequence at `count` random positions; see `__call__`."""
        return self(x, stream, query_positions(len(x), count, seed).to(x.device), seed)

    def __call__(self, x: Tensor, stream: Tensor, positions: Tensor, seed: int) -> Sensitivity:
        """Look at one sequence.

        Args:
            x: (T, D) attention's normed input.
            stream: (T, D) the residual stream that attention's output is added to.
            positions: (M,) the queries to look at.
            seed: of the random directions g.
        """
        w, tokens = self.weights, torch.arange(x.shape[0], device=x.device)
        queries, keys, values = w.queries(x[positions]), w.keys(x), w.values(x)
        rotated_keys = self._rotate(keys.transpose(0, 1), tokens)[w.group]  # (H, T, d)
        scores = w.capped(w.scale * self._rotate(queries, positions) @ rotated_keys.mT)
        scores.masked_fill_(~w.visible(positions, tokens), -torch.inf)
        p = scores.softmax(-1)
        v = values.transpose(0, 1)[w.group]  # (H, T, d)
        o = p @ v  # (H, M, d)
        outputs = torch.einsum("hed,hmd->me", w.o, o)
        added, factor = w.added(outputs)
        weight = factor.square() / stream[positions].square().sum(-1).clamp_min(1e-20)
        gv, go = v @ self.value_gram, o @ self.value_gram
        distance = (gv * v).sum(-1)[:, None, :] - 2 * o @ gv.mT + (go * o).sum(-1)[..., None]
        omega = p.square() * distance.clamp_min(0) * weight[:, None]
        generator = torch.Generator().manual_seed(seed)
        g = torch.randn(len(positions), w.o.shape[1], generator=generator).to(x) * weight.sqrt()[:, None]
        direction = torch.einsum("me,hed->hmd", g, self.felt_o)
        influence = p * (direction @ v.mT - (direction * o).sum(-1, keepdim=True))
        return Sensitivity(positions, weight, queries, keys, values, p, omega, influence, added / factor[:, None])

    def check(self, seen: Sensitivity, output: Tensor) -> None:
        """Compare what was recomputed with what the model's own module gave, (T, D): a family may be misdescribed.

        Raises:
            RuntimeError: they differ.
        """
        w = self.weights
        given = output[seen.positions] if w.o_bias is None else output[seen.positions] - w.o_bias
        given = given if w.output_gain is None else w.output_gain * given
        error = float((seen.outputs - given).norm() / given.norm().clamp_min(1e-30))
        if not error <= RECOMPUTED_TOLERANCE:
            raise RuntimeError(
                f"attention recomputed from the weights differs from the model's own by {error:.1e} (allowed "
                f"{RECOMPUTED_TOLERANCE:.0e}): a setting of this model is not understood; please report its config.json"
            )


class RopeAccumulator:
    """Streams what `rope.fit_slots` needs: distances, query power and pooled pair moments."""

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
        """What `rope.fit_slots` and `factorize.factorize` need."""
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


def query_positions(length: int, count: int, seed: int) -> Tensor:
    """`count` random query positions of a sequence, ascending (all of them where there are fewer)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(length, generator=generator)[:count].sort().values
