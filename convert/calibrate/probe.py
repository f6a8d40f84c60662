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
from torch import Tensor

from latentfold.convert.attention.call import AttentionCall
from latentfold.convert.attention.weights import AttentionWeights

RECOMPUTED_TOLERANCE = 1e-3
"""Largest relative difference of attention recomputed here from the model's own, both in float32."""


@dataclass(frozen=True)
class Sampling:
    """Which queries of each window are looked at.

    Attributes:
        queries: positions in each window.
        seed: of them, and of the random directions of equation (2).
    """

    queries: int = 128
    seed: int = 0


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

    def sample(self, call: AttentionCall, sampling: Sampling) -> Sensitivity:
        """Look at one window at random positions.

        Raises:
            RuntimeError: the model's own module gave something else than the weights say: a family may be misdescribed.
        """
        seed = sampling.seed + call.window
        positions = query_positions(len(call.x), sampling.queries, seed).to(call.x.device)
        seen = self(call.x, call.stream, positions, seed)
        self._check(seen, call.output)
        return seen

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

    def _check(self, seen: Sensitivity, output: Tensor) -> None:
        w = self.weights
        given = output[seen.positions] if w.o_bias is None else output[seen.positions] - w.o_bias
        given = given if w.output_gain is None else w.output_gain * given
        error = float((seen.outputs - given).norm() / given.norm().clamp_min(1e-30))
        if not error <= RECOMPUTED_TOLERANCE:
            raise RuntimeError(
                f"attention recomputed from the weights differs from the model's own by {error:.1e} (allowed "
                f"{RECOMPUTED_TOLERANCE:.0e}): a setting of this model is not understood; please report its config.json"
            )


def query_positions(length: int, count: int, seed: int) -> Tensor:
    """`count` random query positions of a sequence, ascending (all of them where there are fewer)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(length, generator=generator)[:count].sort().values
