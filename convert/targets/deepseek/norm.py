"""The class's mandatory norms, made neutral.

Shape legend
    D  hidden size    r  kv_lora_rank
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LATENT_EPS = 1e-6
"""Epsilon of the latent norms; the model's own norms must have the same one (docs/portable.md)."""

LATENT_ENERGY = 1e-8
"""Largest mean square of the scaled latent relative to the epsilon: the norm is the identity to half of this."""


def residual_scale(eps: float, dtype: torch.dtype) -> float:
    """The factor a on the residual stream after which `rms_norm_eps` can be 1e-6.

    RMSNorm(a x) with eps a^2 equals RMSNorm(x) with eps, so a = sqrt(1e-6 / eps) is exact in float32. In bfloat16
    that would round every weight again; the power of two nearest to it changes no mantissa, and the epsilon by at most
    a factor of two, which is far below what a residual stream feels.
    """
    exact = math.sqrt(LATENT_EPS / eps)
    if math.isclose(exact, 1.0, rel_tol=1e-4):
        return 1.0
    return exact if dtype in (torch.float32, torch.float64) else 2.0 ** round(math.log2(exact))


def largest_energy(rows: Tensor, gain: Tensor) -> float:
    """Largest mean square of c = rows x, over *all* tokens, not sampled ones.

    x is an RMS-normed vector times `gain`, so |c| is at most sqrt(D) |rows diag(gain)|_2.

    Args:
        rows: (r, D).  gain: (D,) weight of the layer's input norm.
    """
    rank, hidden = rows.shape
    return float(torch.linalg.matrix_norm(rows * gain, 2)) ** 2 * hidden / rank


def neutral_norm(energy: float, dtype: torch.dtype) -> tuple[float, float, float]:
    """Make a mandatory norm do nothing to vectors c of a mean square of at most `energy`.

    RMSNorm(s c) w = c (s w / sqrt(eps)) (1 - mean((s c)^2) / (2 eps) + ..), so a tiny s and w = sqrt(eps)/s give c.

    Returns:
        s (a power of two), w as stored in `dtype`, and the factor on what reads c that takes up the rounding of w.
    """
    s = 2.0 ** math.floor(0.5 * math.log2(LATENT_ENERGY * LATENT_EPS / max(energy, 1e-12)))
    exact = math.sqrt(LATENT_EPS) / s
    stored = float(torch.tensor(exact).to(dtype))
    return s, stored, exact / stored
