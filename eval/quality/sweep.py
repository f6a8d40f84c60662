"""Both models layer by layer over the same windows."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from latentfold.convert.errors import InputError
from latentfold.convert.model.heads import attention_inputs, attention_of, watched_heads
from latentfold.convert.model.streamed import StreamedModel
from latentfold.eval.quality.attention import AttentionErrors
from latentfold.eval.quality.predictions import TokenScores, score_tokens
from latentfold.eval.records import LayerError


def _layer(model: StreamedModel, index: int) -> AbstractContextManager[Any]:
    """A layer with its weights, or None past the last."""
    return model.layer(index) if index < model.num_layers else nullcontext()


@torch.no_grad()
def _sweep(
    a: StreamedModel, b: StreamedModel, tokens: Tensor, recipe: dict[str, Any] | None, progress: bool
) -> tuple[TokenScores, tuple[LayerError, ...] | None]:
    """Both models, layer by layer over all windows; then all predictions, a few logits at a time.

    Raises:
        InputError: a model gives infinite or undefined values.
    """
    streams = []
    kwargs = []
    for model in (a, b):
        began = [model.begin(row[None]) for row in tokens]
        streams.append([hidden for hidden, _ in began])
        kwargs.append(began[0][1])
    # attention outputs are comparable where both have the same layers and the residual scale is known
    scale = recipe["residual_scale"] if recipe and a.num_layers == b.num_layers else None
    layers: list[LayerError] = []
    with tqdm(
        total=(a.num_layers + b.num_layers) * tokens.numel(),
        desc="evaluating",
        unit="tok",
        unit_scale=True,
        disable=not progress,
    ) as bar:
        for index in range(max(a.num_layers, b.num_layers)):
            errors = AttentionErrors(scale) if scale is not None else None
            with _layer(a, index) as one, _layer(b, index) as other:
                for k in range(len(tokens)):
                    if one is not None and errors is None:
                        streams[0][k] = one(streams[0][k], **kwargs[0][index])
                    elif one is not None and errors is not None:
                        with watched_heads(attention_of(one)) as heads:
                            streams[0][k], x, output = attention_inputs(one, streams[0][k], kwargs[0][index])
                        errors.add(attention_of(other), x, kwargs[1][index], heads[0], output)
                    if other is not None:
                        streams[1][k] = other(streams[1][k], **kwargs[1][index])
                    for name, stream in (("original", streams[0]), ("converted model", streams[1])):
                        if not stream[k].isfinite().all():
                            raise InputError(
                                f"layer {index} of the {name} gives infinite or undefined values in {a.dtype}; "
                                "expected finite ones: try --dtype float32"
                            )
                    bar.update(tokens.shape[1] * ((one is not None) + (other is not None)))
            if errors is not None and recipe is not None:
                layers.append(errors.result(index, math.sqrt(recipe["layers"][index]["output"])))
    with a.head() as original_head, b.head() as converted_head:
        scores = score_tokens(tokens, streams[0], streams[1], original_head, converted_head)
    return scores, tuple(layers) if layers else None
