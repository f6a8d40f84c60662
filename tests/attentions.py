"""A random attention layer, and what it computes by definition."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from latentfold.convert.attention.pairs import to_complex_pairs
from latentfold.convert.attention.weights import AttentionWeights

H, D_HEAD, HIDDEN, TOKENS = 4, 8, 24, 40
FREQUENCIES = 1.0 / 100.0 ** (torch.arange(0, D_HEAD, 2, dtype=torch.float64) / D_HEAD)


def random_weights(kv_heads: int, seed: int = 0) -> AttentionWeights:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / math.sqrt(HIDDEN)

    return AttentionWeights(
        q=2 * normal(H, D_HEAD, HIDDEN),
        k=2 * normal(kv_heads, D_HEAD, HIDDEN),
        v=normal(kv_heads, D_HEAD, HIDDEN),
        o=normal(H, HIDDEN, D_HEAD),
        scale=D_HEAD**-0.5,
    )


def random_inputs(seed: int = 1) -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention(w: AttentionWeights, frequencies: Tensor, x: Tensor) -> Tensor:
    """Plain causal attention with RoPE, straight from the definition: x (T, D) -> (T, D)."""
    position = torch.arange(x.shape[0], dtype=torch.float64)
    turn = torch.polar(torch.ones(()).double(), position[:, None] * frequencies)  # (T, n)
    q = to_complex_pairs(w.q @ x.T).mT * turn  # (H, T, n)
    k = to_complex_pairs(w.k @ x.T).mT * turn
    scores = w.scale * (q @ k[w.group].mH).real
    scores = scores.masked_fill(position > position[:, None], -torch.inf)
    values = (w.v @ x.T).mT[w.group]
    return torch.einsum("hed,htd->te", w.o, scores.softmax(-1) @ values)
