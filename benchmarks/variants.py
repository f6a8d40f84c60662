"""Ways to turn one calibrated layer into latent attention: this project's, it without one ingredient, and baselines.

Each is a function of a `CalibratedLayer`, the slots' frequencies and kv_rank, as `convert_layer` is. The
baselines are written from their papers, for comparison on the same text and cache size; they are not their authors'
code.

Shape legend: as in convert/rope.py and convert/factorize.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from latentfold.convert import convert_layer
from latentfold.convert.attention.latent import LatentAttention
from latentfold.convert.attention.pairs import complex_pair_moment, to_complex_pairs
from latentfold.convert.calibrate.layer import CalibratedLayer
from latentfold.convert.calibrate.statistics import LatentStatistics
from latentfold.convert.factorize.latent import factorize
from latentfold.convert.factorize.output import refit_output
from latentfold.convert.factorize.rope import SlotFit, fit_slots

Convert = Callable[[CalibratedLayer, Tensor, int], tuple[LatentAttention, Tensor]]
"""(layer, slots (S,), kv_rank) -> the layer and the frequencies (S',) of its own slots."""

POOLED = 1e12
"""A damping under which heads read by the pooled solution."""


@dataclass(frozen=True)
class Variant:
    """A row of the benchmark.

    Attributes:
        name: what it is called.
        convert: what it does.
        searches_ladder: uses the ladder that the search chose; otherwise the source's theta.
        portable: its result fits the stock class (one ladder for all layers).
    """

    name: str
    convert: Convert
    searches_ladder: bool = True
    portable: bool = True


def _with(
    change: Callable[[CalibratedLayer], CalibratedLayer] = lambda layer: layer,
    fitted: Callable[[SlotFit], SlotFit] = lambda fit: fit,
    *,
    per_head: bool = True,
    refit: bool = True,
) -> Convert:
    """The method with changed statistics, a changed slot fit, or without its last steps."""

    def convert(layer: CalibratedLayer, slots: Tensor, kv_rank: int) -> tuple[LatentAttention, Tensor]:
        changed = change(layer)
        fit = fitted(fit_slots(changed.rope, layer.pairs, slots))
        ridge = {} if per_head else {"ridge": POOLED}
        found = factorize(changed.latent, layer.weights, fit, kv_rank, **ridge)
        return (refit_output(found, slots, layer.samples) if refit else found), slots

    return convert


def _default(layer: CalibratedLayer, slots: Tensor, kv_rank: int) -> tuple[LatentAttention, Tensor]:
    return convert_layer(layer, kv_rank, frequencies=slots)


# ------------------------------------------------------------------------------------------------ one ingredient less


def _no_query_weights(layer: CalibratedLayer) -> CalibratedLayer:
    """Every pair and every direction of the queries counts alike within its head."""
    power, moment = layer.rope.query_power, layer.latent.query_moment
    eye = torch.eye(moment.shape[-1], dtype=moment.dtype, device=moment.device)
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)
    return replace(
        layer,
        rope=replace(layer.rope, query_power=power.mean(1, keepdim=True).expand_as(power).contiguous()),
        latent=replace(layer.latent, query_moment=mean[:, None, None] * eye),
    )


def _no_overlap(layer: CalibratedLayer) -> CalibratedLayer:
    """What heads lose counts head by head, as if it were unrelated."""
    return replace(
        layer, latent=replace(layer.latent, overlap=torch.eye(len(layer.weights.q)).to(layer.latent.overlap))
    )


def _plain_statistics(layer: CalibratedLayer) -> CalibratedLayer:
    """Plain token averages in place of what the attention output feels: keys, values and distances."""
    stats = layer.latent
    moment = stats.moment.expand_as(stats.key_moment)
    length = layer.rope.distance.shape[1]
    uniform = torch.arange(
        length, 0, -1, dtype=torch.float64, device=stats.moment.device
    )  # pairs of tokens at each distance
    return replace(
        layer,
        rope=replace(
            layer.rope,
            distance=uniform.expand_as(layer.rope.distance).contiguous(),
            key_moment=_pair_moment(stats),
        ),
        latent=replace(stats, key_moment=moment / stats.moment.trace(), value_moment=moment),
    )


def _pair_moment(stats: LatentStatistics) -> Tensor:
    """(I, I) plain E[k k^H] of the pairs of all KV heads."""
    keys = stats.keys.flatten(0, 1)
    return complex_pair_moment(keys @ stats.moment @ keys.T, len(stats.keys))


def _norm_balanced(layer: CalibratedLayer) -> CalibratedLayer:
    """Keys and values balanced by their norms instead of by what they do to the output."""
    stats, weights = _no_overlap(layer).latent, layer.weights
    size = weights.q.shape[1]
    eye = torch.eye(size, dtype=torch.float64, device=stats.moment.device)
    values = torch.einsum("gde,ef,gdf->", stats.values, stats.moment, stats.values)
    keys = torch.einsum("gde,ef,gdf->", stats.keys, stats.moment, stats.keys)
    gain = (values / keys.clamp_min(1e-300)).sqrt() / weights.scale
    identity = eye.expand(len(weights.q), size, size)
    return replace(
        layer,
        weights=replace(weights, o=identity.contiguous()),
        latent=replace(
            stats,
            query_moment=identity * gain**2,
            key_moment=stats.moment.expand_as(stats.key_moment),
            value_moment=stats.moment.expand_as(stats.value_moment),
        ),
    )


def _no_joint_metric(layer: CalibratedLayer, slots: Tensor, kv_rank: int) -> tuple[LatentAttention, Tensor]:
    balanced = _norm_balanced(layer)
    fit = fit_slots(layer.rope, layer.pairs, slots)
    found = replace(factorize(balanced.latent, balanced.weights, fit, kv_rank), o=layer.weights.o)
    return refit_output(found, slots, layer.samples), slots


def _real_mixing(layer: CalibratedLayer) -> CalibratedLayer:
    """Slots are real combinations of the pairs."""
    moment = layer.rope.key_moment
    return replace(
        layer, rope=replace(layer.rope, key_moment=torch.complex(moment.real, torch.zeros_like(moment.real)))
    )


def _no_constants(fit: SlotFit) -> SlotFit:
    """What no slot carries is dropped instead of keeping its mean."""
    return replace(fit, mean_pair=torch.zeros_like(fit.mean_pair), mean_slot=torch.zeros_like(fit.mean_slot))


def _no_folding(layer: CalibratedLayer, slots: Tensor, kv_rank: int) -> tuple[LatentAttention, Tensor]:
    """Only pairs whose own frequency is on the ladder rotate."""
    own = (layer.pairs[:, None] - slots).abs() <= 1e-9 * slots  # (n, S)

    def change(layer: CalibratedLayer) -> CalibratedLayer:
        power = layer.rope.query_power * own.any(1)
        return replace(layer, rope=replace(layer.rope, query_power=power))

    def fitted(fit: SlotFit) -> SlotFit:
        return replace(fit, coefficients=fit.coefficients * own)

    return _with(change, fitted)(layer, slots, kv_rank)


# ------------------------------------------------------------------------------------------------------- baselines


def _slot_fit(keys: Tensor, coefficients: Tensor, slots: Tensor, *, still: Tensor) -> SlotFit:
    """A slot choice that is not a least-squares fit; pairs keep 1 x themselves where `still` (H, n) is 1."""
    heads = coefficients.shape[0]
    still = still.to(torch.complex128)
    mean_slot = torch.ones(heads, len(slots), dtype=torch.complex128, device=slots.device)
    return SlotFit(keys, coefficients, slots, still, mean_slot, objective=0.0, rotating_error=0.0)


def _transmla(layer: CalibratedLayer, slots: Tensor, kv_rank: int) -> tuple[LatentAttention, Tensor]:
    """TransMLA (arXiv:2502.07864): real PCA over heads at each of a few folded frequencies (RoRoPE, FreqFold), the rest
    of the keys without rotation, and a joint PCA of it and the values, balanced by their norms."""
    w, stats = layer.weights, layer.latent
    heads, n = len(w.q), len(layer.pairs)
    kv_heads = len(w.k)
    moment = _pair_moment(stats).real
    fold = -(-n // len(slots))
    keys = torch.zeros(len(slots), kv_heads * n, dtype=torch.complex128, device=slots.device)
    coefficients = torch.zeros(heads, n, len(slots), dtype=torch.complex128, device=slots.device)
    for s in range(len(slots)):
        members = torch.arange(s * fold, min((s + 1) * fold, n), device=slots.device)
        index = (torch.arange(kv_heads, device=slots.device)[:, None] * n + members).flatten()
        _, vectors = torch.linalg.eigh(moment[index][:, index])
        u = vectors[:, -1].to(torch.complex128)
        keys[s, index] = u
        coefficients[:, members, s] = u.reshape(kv_heads, -1)[w.group]
    fit = _slot_fit(keys, coefficients, layer.pairs[::fold][: len(slots)], still=layer.pairs.new_ones(heads, n))
    balanced = _norm_balanced(layer)
    found = factorize(balanced.latent, balanced.weights, fit, kv_rank, ridge=POOLED)
    return replace(found, o=w.o), fit.frequencies


def _strongest_pairs(layer: CalibratedLayer, slots: Tensor) -> SlotFit:
    """MHA2MLA's S_2-norm: the pairs whose query and key projections have the largest product of 2-norms keep their
    rotation, every one in a slot of its own; the others lose it."""
    w = layer.weights
    n, kv_heads, heads = len(layer.pairs), len(w.k), len(w.q)
    key = to_complex_pairs(w.k).abs().square().sum(-1).sqrt()  # (G, n)
    query = to_complex_pairs(w.q).abs().square().sum(-1).sqrt()  # (H, n)
    strength = key * torch.zeros_like(key).index_add_(0, w.group, query)
    chosen = strength.flatten().topk(len(slots)).indices
    keys = torch.zeros(len(slots), kv_heads * n, dtype=torch.complex128, device=slots.device)
    coefficients = torch.zeros(heads, n, len(slots), dtype=torch.complex128, device=slots.device)
    for s, item in enumerate(chosen.tolist()):
        keys[s, item] = 1
        coefficients[w.group == item // n, item % n, s] = 1
    return _slot_fit(keys, coefficients, layer.pairs[chosen % n], still=layer.pairs.new_ones(heads, n))


def _svd_baseline(moment: Callable[[LatentStatistics], Tensor]) -> Convert:
    def convert(layer: CalibratedLayer, slots: Tensor, kv_rank: int) -> tuple[LatentAttention, Tensor]:
        fit = _strongest_pairs(layer, slots)
        chosen = replace(layer, latent=replace(layer.latent, moment=moment(layer.latent)))
        size = layer.weights.q.shape[1]
        identity = torch.eye(size, dtype=torch.float64, device=slots.device).expand(len(layer.weights.q), size, size)
        latent = replace(
            _no_overlap(chosen).latent,
            query_moment=identity / layer.weights.scale**2,
            key_moment=chosen.latent.moment.expand_as(layer.latent.key_moment),
            value_moment=chosen.latent.moment.expand_as(layer.latent.value_moment),
        )
        found = factorize(latent, replace(layer.weights, o=identity.contiguous()), fit, kv_rank, ridge=POOLED)
        return replace(found, o=layer.weights.o), fit.frequencies

    return convert


def _weight_moment(stats: LatentStatistics) -> Tensor:
    """The moment under which an SVD sees the weights alone: that of an input whose entries are independent."""
    return stats.projection @ stats.projection.T


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("latentfold", _default),
        Variant("no ladder search", _default, searches_ladder=False),
        Variant("no complex mixing", _with(_real_mixing)),
        Variant("no query weights", _with(_no_query_weights)),
        Variant("no sensitivity weights", _with(_plain_statistics)),
        Variant("no constants", _with(fitted=_no_constants)),
        Variant("no folding", _no_folding),
        Variant("no joint metric", _no_joint_metric),
        Variant("no head overlap", _with(_no_overlap)),
        Variant("no per-head readers", _with(per_head=False)),
        Variant("no output refit", _with(refit=False)),
    )
}
BASELINES = {
    variant.name: variant
    for variant in (
        Variant("TransMLA (own words)", _transmla, searches_ladder=False),
        Variant("MHA2MLA, weights only (own words)", _svd_baseline(_weight_moment), portable=False),
        Variant("CARE-U, covariance only (own words)", _svd_baseline(lambda stats: stats.moment), portable=False),
    )
}
