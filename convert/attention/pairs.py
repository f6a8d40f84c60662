"""Rotary pairs as complex numbers: pair j of a head is k[j] + i k[j+n], turned by e^{i w_j} a token.

Shape legend
    G  KV heads    d  head size    n  d/2, pairs of a head    I  G n    E  any space    F  frequencies    T  distances
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_complex_pairs(x: Tensor) -> Tensor:
    """Rotate-half layout (..., d, E) -> complex pairs (..., d/2, E)."""
    n = x.shape[-2] // 2
    return torch.complex(x[..., :n, :], x[..., n:, :])


def to_real_pairs(x: Tensor) -> Tensor:
    """Complex pairs (..., n, E) -> rotate-half layout (..., 2n, E). Inverse of `to_complex_pairs`."""
    return torch.cat([x.real, x.imag], dim=-2)


def complex_pair_moment(moment: Tensor, num_kv_heads: int) -> Tensor:
    """E[k k^T] of stacked real keys (..., G d, G d) -> E[k k^H] of complex pairs (..., I, I)."""
    lead = moment.shape[:-2]
    n = moment.shape[-1] // (2 * num_kv_heads)
    m = moment.reshape(*lead, num_kv_heads, 2, n, num_kv_heads, 2, n)
    re = m[..., :, 0, :, :, 0, :] + m[..., :, 1, :, :, 1, :]
    im = m[..., :, 1, :, :, 0, :] - m[..., :, 0, :, :, 1, :]
    items = num_kv_heads * n
    return torch.complex(re, im).reshape(*lead, items, items)


def rotations(length: int, frequencies: Tensor) -> Tensor:
    """e^{i f t} at the distances 0 .. T-1: (F,) float64 -> (T, F) complex."""
    t = torch.arange(length, dtype=torch.float64, device=frequencies.device)
    return torch.polar(torch.ones((), dtype=torch.float64, device=t.device), t[:, None] * frequencies)
