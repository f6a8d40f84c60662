"""Linear algebra on second moments, which are often singular: few tokens, dependent heads, empty slots.

Shape legend
    E  space of the moments    e  its rank    P  pools of heads    H  query heads    m, n  rows and columns of any map

Everything goes through `eigh` in float64 (or complex128). Cholesky fails on singular moments, and the batched LU of
some CPU builds of torch 2.13 (MKL) returns invalid pivots for matrices of a few hundred rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def square_roots(moment: Tensor, floor: float = 1e-8) -> tuple[Tensor, Tensor]:
    """R (E, E) with R R^T = moment, and its inverse.

    No direction counts less than `floor` times the average one: data that never went there does not make it free.
    """
    values, vectors = torch.linalg.eigh(moment)
    root = values.clamp_min(floor * values.mean().clamp_min(1e-300)).sqrt()
    return vectors * root, (vectors / root).mH


def metric_root(metric: Tensor) -> Tensor:
    """(.., d, d) positive semi-definite -> L (.., d, d) with L^T L = metric."""
    values, vectors = torch.linalg.eigh(metric)
    return values.clamp_min(0).sqrt()[..., :, None] * vectors.mT


def solve_right(gram: Tensor, rhs: Tensor, ridge: float) -> Tensor:
    """X (.., m, r) with X (gram + ridge mean(diag) 1) = rhs; null directions of gram (.., r, r) get nothing."""
    values, vectors = torch.linalg.eigh(gram)
    top = values[..., -1:].clamp_min(1e-300)
    size = values.clamp_min(0).mean(-1, keepdim=True)
    inverse = torch.where(values > 1e-13 * top, 1 / (values.clamp_min(1e-13 * top) + ridge * size), 0.0)
    return ((rhs @ vectors) * inverse[..., None, :].to(vectors.dtype)) @ vectors.mH


def by_pool(rows: Tensor, moments: Tensor, pool: Tensor) -> Tensor:
    """rows_h @ moments_pool(h): (H, m, E), (P, E, f), (H,) -> (H, m, f), without a copy of the moments per head."""
    return torch.stack([row @ moments[p] for row, p in zip(rows, pool.tolist(), strict=True)])
