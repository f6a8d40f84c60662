"""What sizes would cost: a few layers converted at each of several sizes, on a little text, nothing written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from latentfold.convert.calibrate.layer import LayerCalibration
from latentfold.convert.config import ConversionConfig
from latentfold.convert.factorize.layer import convert_layer
from latentfold.convert.families.reading import layer_attention
from latentfold.convert.model.shape import ModelShape
from latentfold.convert.model.streamed import StreamedModel
from latentfold.convert.model.walk import observe
from latentfold.convert.pipeline.prepare import prepare
from latentfold.convert.plan.plan import ConversionPlan
from latentfold.convert.plan.sizes import usual_rope_dim

if TYPE_CHECKING:
    from latentfold.convert.text.windows import Windows


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


def survey(
    model: StreamedModel,
    plan: ConversionPlan,
    windows: Windows,
    config: ConversionConfig,
    sizes: Sequence[tuple[int, int]],
) -> list[SizeEstimate]:
    """Convert a few evenly spaced layers at each (kv_rank, rope_dim) and look at samples left out.

    Every size uses its most promising ladder (of the stock class: the source's theta); a conversion's search can only
    find a better one.
    """
    tokens = windows.tokens[:WINDOWS]
    steps = min(LAYERS, model.num_layers)
    chosen = {round((i + 0.5) * model.num_layers / steps - 0.5) for i in range(steps)}
    targets = [plan.target_of(kv_rank, rope_dim) for kv_rank, rope_dim in sizes]
    totals = [0.0] * len(sizes)

    class LayerObserver(LayerCalibration):
        index: int

        def finish(self) -> None:
            layer = self.result()
            for i, ((kv_rank, _), target) in enumerate(zip(sizes, targets, strict=True)):
                slots = target.candidates(self.index, layer.rope, layer.pairs)[0].frequencies.to(model.device)
                totals[i] += convert_layer(layer, slots, kv_rank).predicted_error["output"] / len(chosen)

    def visit(index: int) -> LayerObserver | None:
        if index not in chosen:
            return None
        observer = LayerObserver(
            *layer_attention(model, plan.family, plan.shape, index),
            tokens.shape,
            queries=config.queries,
            seed=config.seed,
        )
        observer.index = index
        return observer

    observe(model, tokens, visit, description="sizes", progress=config.progress)
    return [
        SizeEstimate(kv_rank, rope_dim, (kv_rank + rope_dim) / plan.shape.cache_values, error, error > HOPELESS)
        for (kv_rank, rope_dim), error in zip(sizes, totals, strict=True)
    ]


def usual_sizes(shape: ModelShape) -> list[tuple[int, int]]:
    """(kv_rank, rope_dim) for a range of caches, smallest first."""
    found = []
    for share in CACHE_SHARES:
        values = round(share * shape.cache_values)
        rope_dim = usual_rope_dim(shape, values)
        found.append((values - rope_dim, rope_dim))
    return [(rank, rope_dim) for rank, rope_dim in found if max(1, rope_dim // 2) <= rank <= shape.max_kv_rank]


def estimate_sizes(config: ConversionConfig) -> list[SizeEstimate]:
    """What a range of sizes would cost, smallest cache first: a short pass over text, nothing written.

    Raises:
        InputError: see `prepare`.
    """
    plan, _, windows = prepare(config)
    model = StreamedModel(plan.checkpoint, plan.config, torch.float32, config.torch_device)
    return survey(model, plan, windows, config, usual_sizes(plan.shape))
