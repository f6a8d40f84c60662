"""The output projection, refitted to what the converted attention really delivers.

Shape legend
    T  tokens of a sequence    M  sampled query positions of a sequence    N  all samples    D  hidden size
    H  query heads    e  head size of the values    F  H*e, the features: the heads' outputs side by side

The factorization loses part of every head's scores and values, measured head by head. What heads lose is correlated:
they read one latent and attend to the same tokens. So W_O is fitted once more, all heads together, by least squares
from the converted heads' outputs f to the original's attention output o, both on the original's input:

    min over W of  E[ |o - W f|^2 / |stream + o|^2 ]  +  lambda |W - W_O|^2

The damping pulls towards W_O, so that an exact conversion stays exact; lambda is the one that does best on samples left
out, and where none does better than W_O, W_O stays. The left-out error is also the prediction for the layer: unlike
the statistics' own it contains everything (softmax, all heads, other text).
Refitting a linear map to a compressed layer's outputs is the reconstruction step of pruning methods (e.g. SliceGPT,
arXiv:2401.15024, section 3.3; SVD-LLM, arXiv:2403.07378).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from latentfold.convert.attention.latent import LatentAttention, head_outputs
from latentfold.convert.calibrate.samples import AttentionSample

FOLDS = 4

RIDGES = (1e-2, 1e-1, 1.0)
"""Candidates for lambda, relative to the mean diagonal of the features' moment."""


def refit_output(layer: LatentAttention, frequencies: Tensor, samples: list[AttentionSample]) -> LatentAttention:
    """The layer with its output projection refitted; `predicted_error["output"]` is its error on samples left out.

    Args:
        layer: a factorized layer.  frequencies: (S,) of its slots.
        samples: the original's attention on calibration windows.
    """
    heads, hidden, size = layer.o.shape
    features, residuals = [], []
    flat = layer.o.transpose(0, 1).reshape(hidden, heads * size)  # (D, F)
    bias = layer.source.o_bias
    power = 0.0
    for sample in samples:
        root = sample.weight.sqrt()[:, None]
        output = sample.output if bias is None else sample.output - bias.to(sample.output)
        found = head_outputs(layer, frequencies, sample.x, sample.positions).flatten(1) * root
        target = output * root
        power += float(target.square().sum(dtype=torch.float64))
        features.append(found)
        residuals.append(target - found @ flat.T.to(found.dtype))
    f, residual = torch.cat(features), torch.cat(residuals)  # (N, F), (N, D)
    step, left_out = _ridge_step(f, residual)
    o = layer.o + step.reshape(heads, size, hidden).mT
    return replace(layer, o=o, predicted_error=layer.predicted_error | {"output": left_out / max(power, 1e-300)})


def _ridge_step(features: Tensor, residual: Tensor) -> tuple[Tensor, float]:
    """X (F, D) with features X ~ residual, damped towards 0, and the squared error on samples left out."""
    parts = list(zip(features.tensor_split(FOLDS), residual.tensor_split(FOLDS), strict=True))
    gram, cross = _moment(features, features), _moment(features, residual)
    size = gram.diagonal().mean().clamp_min(1e-300)
    before = float(residual.square().sum(dtype=torch.float64))
    after = dict.fromkeys(RIDGES, before)
    for f, r in parts:
        own, own_cross = _moment(f, f), _moment(f, r)
        for ridge in RIDGES:
            x = _damped(gram - own, cross - own_cross, ridge * size)
            after[ridge] += float((x * (own @ x - 2 * own_cross)).sum())
    best = min(after, key=lambda ridge: after[ridge])
    if not after[best] < before:
        return torch.zeros_like(cross), before
    return _damped(gram, cross, best * size), after[best]


def _moment(a: Tensor, b: Tensor) -> Tensor:
    return (a.T @ b).to(torch.float64)


def _damped(gram: Tensor, cross: Tensor, ridge: Tensor) -> Tensor:
    shifted = gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return torch.cholesky_solve(cross, torch.linalg.cholesky(shifted))
