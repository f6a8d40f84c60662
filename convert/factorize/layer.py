"""The method, on one layer: from what was learned of it to latent attention.

Shape legend
    S  rotating keys (2S = rope_dim)
"""

from __future__ import annotations

from torch import Tensor

from latentfold.convert.attention.latent import LatentAttention
from latentfold.convert.calibrate.layer import CalibratedLayer
from latentfold.convert.errors import InputError
from latentfold.convert.factorize.latent import factorize
from latentfold.convert.factorize.output import refit_output
from latentfold.convert.factorize.rope import choose_pairs, fit_slots


def convert_layer(
    layer: CalibratedLayer, kv_rank: int, *, rope_dim: int | None = None, frequencies: Tensor | None = None
) -> tuple[LatentAttention, Tensor]:
    """One layer as latent attention.

    Args:
        layer: as `calibrate_layer` gives it.
        kv_rank: size r of the latent.
        rope_dim: 2S, for the best S of the layer's own frequencies; at most 2 x KV heads x pairs of a head.
        frequencies: (S,) inverse frequencies of the rotating keys, instead of rope_dim.

    Returns:
        The factorization, and the frequencies (S,) of its rotating keys. `predicted_error["output"]` is its relative
        squared error on samples left out.

    Raises:
        InputError: both or neither of rope_dim and frequencies.
    """
    if (rope_dim is None) == (frequencies is None):
        raise InputError("expected either rope_dim or frequencies")
    if frequencies is None:
        assert rope_dim is not None
        frequencies = layer.pairs[choose_pairs(layer.rope, layer.pairs, rope_dim // 2)]
    fit = fit_slots(layer.rope, layer.pairs, frequencies)
    factorized = factorize(layer.latent, layer.weights, fit, kv_rank)
    return refit_output(factorized, frequencies, layer.samples), frequencies
