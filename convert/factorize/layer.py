"""The method, on one layer: what is learned of it from calibration text, and what is made of that."""

from __future__ import annotations

from torch import Tensor

from latentfold.convert.attention.latent import LatentAttention
from latentfold.convert.calibrate.layer import CalibratedLayer
from latentfold.convert.factorize.latent import factorize
from latentfold.convert.factorize.output import refit_output
from latentfold.convert.factorize.rope import fit_slots


def convert_layer(layer: CalibratedLayer, slots: Tensor, kv_rank: int) -> LatentAttention:
    """Latent attention of `kv_rank` with slots of the given inverse frequencies (S,)."""
    fit = fit_slots(layer.rope, layer.pairs, slots)
    return refit_output(factorize(layer.latent, layer.weights, fit, kv_rank), slots, layer.samples)
