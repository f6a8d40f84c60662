"""Both models layer by layer over the same windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from latentfold.convert.errors import InputError
from latentfold.convert.families.registry import attention_name
from latentfold.convert.model.heads import watched_heads
from latentfold.convert.model.streamed import StreamedModel
from latentfold.convert.model.walk import Visit, Walk
from latentfold.convert.progress import Progress, silent
from latentfold.convert.write.recipe import Recipe
from latentfold.eval.quality.attention import AttentionErrors
from latentfold.eval.quality.predictions import TokenScores, score_tokens
from latentfold.eval.records import LayerError


@torch.no_grad()
def sweep(
    original: StreamedModel,
    converted: StreamedModel,
    texts: Sequence[Tensor],
    recipe: Recipe | None,
    progress: Progress = silent,
) -> tuple[list[TokenScores], tuple[LayerError, ...] | None]:
    """Both models over all windows, then all predictions, a few logits at a time.

    Args:
        texts: (N, T) windows of each text.
        recipe: of the converted model; without it, or where it has other layers, no layers are compared.

    Returns:
        The scores of each text, and the errors of each converted layer.

    Raises:
        InputError: a model gives infinite or undefined values.
    """
    windows = [window for text in texts for window in text]
    a = Walk(original, windows, progress=progress, stage="evaluating")
    b = Walk(converted, windows)
    comparable = recipe if recipe and original.num_layers == converted.num_layers else None
    layers: list[LayerError] = []
    for one, other in zip_longest(a, b):
        if comparable is not None and (expected := comparable.layers[one.index]) is not None:
            errors = _compare(one, other, original, converted, comparable.residual_scale)
            predicted = None if comparable.healing else math.sqrt(expected.output)  # of what was not trained since
            layers.append(errors.result(one.index, predicted))
        for name, visit in (("original", one), ("converted model", other)):
            if visit is not None:
                visit.advance()
                _check_finite(name, visit, original.dtype)
    parts = []
    with original.head() as original_head, converted.head() as converted_head:
        start = 0
        for text in texts:
            stop = start + len(text)
            parts.append(
                score_tokens(text, a.streams[start:stop], b.streams[start:stop], original_head, converted_head)
            )
            start = stop
    return parts, tuple(layers) or None


def _compare(
    one: Visit, other: Visit, original: StreamedModel, converted: StreamedModel, scale: float
) -> AttentionErrors:
    """Attention of one layer, both models fed the original's input."""
    errors = AttentionErrors(scale)
    name = attention_name(original.config)
    attention = other.layer.get_submodule(attention_name(converted.config))
    with watched_heads(one.layer.get_submodule(name)) as heads:
        for call in one.observe(name):
            errors.add(attention, call.x[None], other.kwargs(call.window), heads.pop(), call.output[None])
    return errors


def _check_finite(name: str, visit: Visit, dtype: torch.dtype) -> None:
    if not all(stream.isfinite().all() for stream in visit.streams):
        raise InputError(
            f"layer {visit.index} of the {name} gives infinite or undefined values in {dtype}; "
            "expected finite ones: try the dtype float32"
        )
