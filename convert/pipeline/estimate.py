"""What sizes would cost: a few layers converted at each of several sizes, on a little text, nothing written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from latentfold.convert.attention.sizes import LayerSize
from latentfold.convert.calibrate.layer import calibrate
from latentfold.convert.factorize.layer import convert_layer
from latentfold.convert.families.reading import layer_attention
from latentfold.convert.model.shape import ModelShape
from latentfold.convert.model.walk import Walk
from latentfold.convert.pipeline.prepare import Job
from latentfold.convert.plan.sizes import usual_rope_dim
from latentfold.convert.progress import Progress

LAYERS = 5

WINDOWS = 3
"""Enough to rank sizes; a conversion itself uses every layer and all its windows."""

CACHE_SHARES = (1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3)
"""Shares of the source's cache that `inspect --calibrate` tries."""

HOPELESS = 0.3
"""Expected error beyond which a conversion is not worth its time. SmolLM2-135M lost 0.18 nats at 0.08, 0.37 at 0.12."""


@dataclass(frozen=True)
class SizeEstimate:
    """What one size would cost.

    Attributes:
        kv_rank, rope_dim: the size.
        cached_share: cached values relative to the source's.
        expected_error: relative squared error of the attention output on text left out, mean over surveyed layers.
        hopeless: it is beyond `HOPELESS`.
    """

    kv_rank: int
    rope_dim: int
    cached_share: float
    expected_error: float
    hopeless: bool


def survey(job: Job, sizes: Sequence[LayerSize], progress: Progress) -> list[SizeEstimate]:
    """Convert a few evenly spaced layers at each size and look at samples left out.

    Every size uses its most promising ladder (of the stock class: the source's theta); a conversion's search can only
    find a better one.
    """
    plan, model = job.plan, job.model
    tokens = job.windows.tokens[:WINDOWS]
    layers = plan.target.converted
    steps = min(LAYERS, len(layers))
    chosen = {layers[round((i + 0.5) * len(layers) / steps - 0.5)] for i in range(steps)}
    targets = [plan.at(size).target for size in sizes]
    totals = [0.0] * len(sizes)
    for visit in Walk(model, tokens, progress=progress, stage="sizes"):
        if visit.index not in chosen:
            continue
        weights, pairs = layer_attention(model, plan.family, plan.shape, visit.index)
        calls = visit.observe(plan.family.attention)
        layer = calibrate(calls, weights, pairs, tokens.shape, plan.request.sampling)
        for i, (size, target) in enumerate(zip(sizes, targets, strict=True)):
            slots = target.candidates(visit.index, layer.rope, layer.pairs)[0].frequencies.to(model.device)
            converted, _ = convert_layer(layer, size.kv_rank, frequencies=slots)
            totals[i] += converted.predicted_error["output"] / len(chosen)
    return [
        SizeEstimate(size.kv_rank, size.rope_dim, size.values / plan.shape.cache_values, error, error > HOPELESS)
        for size, error in zip(sizes, totals, strict=True)
    ]


def usual_sizes(shape: ModelShape) -> list[LayerSize]:
    """Sizes for a range of caches, smallest first."""
    found = []
    for share in CACHE_SHARES:
        values = round(share * shape.cache_values)
        rope_dim = usual_rope_dim(shape, values)
        found.append(LayerSize(values - rope_dim, rope_dim))
    return [size for size in found if max(1, size.rope_dim // 2) <= size.kv_rank <= shape.max_kv_rank]
