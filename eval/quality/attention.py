"""Where a converted attention layer differs from its original, both fed the same input: scores, values, output.

Shape legend
    B  windows at a time    H  query heads    T  tokens    Q  sampled queries    d, e  head sizes    D  hidden size
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from latentfold.convert.model.heads import Heads, watched_heads
from latentfold.eval.records import LayerError

QUERIES = 128
"""Query positions a window at which scores and values are compared, evenly spaced and ending at the last."""


class AttentionErrors:
    """Sums of squared errors of one layer over windows.

    Args:
        scale: of the converted residual stream; its attention output is divided by it.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.errors = dict.fromkeys(("scores", "values", "output"), 0.0)
        self.powers = dict(self.errors)

    def _add(self, name: str, found: Tensor, expected: Tensor) -> None:
        self.errors[name] += float((found - expected).square().sum(dtype=torch.float64))
        self.powers[name] += float(expected.square().sum(dtype=torch.float64))

    @torch.no_grad()
    def add(self, converted: nn.Module, x: Tensor, kwargs: dict[str, Any], original: Heads, output: Tensor) -> None:
        """Compare on one window.

        Args:
            converted: the converted attention module.  x: attention's input, (1, T, D).  kwargs: of its layer.
            original: heads of the original attention on x.  output: its output, (1, T, D).
        """
        with watched_heads(converted) as seen:
            found = converted(hidden_states=x, **kwargs)[0] / self.scale
        self._add("output", found, output)
        heads = seen[0]
        length = x.shape[1]
        queries = torch.linspace(0, length - 1, min(QUERIES, length), device=x.device).round().long()
        visible = _visible(original, queries)
        scores = _centred(_scores(original, queries), visible)
        self._add("scores", _centred(_scores(heads, queries), visible), scores)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)  # (B, H, Q, T)
        values = (weights @ heads.value).transpose(1, 2).flatten(2)  # (B, Q, H e)
        projection: Any = converted.o_proj
        self._add("values", projection(values) / self.scale, output[:, queries])

    def result(self, layer: int, predicted: float | None) -> LayerError:
        """The relative errors of all windows together."""
        relative = {name: math.sqrt(error / max(self.powers[name], 1e-300)) for name, error in self.errors.items()}
        return LayerError(layer=layer, predicted=predicted, **relative)


def _scores(heads: Heads, queries: Tensor) -> Tensor:
    """(B, H, Q, T) before the softmax."""
    return heads.scale * heads.query[:, :, queries] @ heads.key.mT


def _visible(heads: Heads, queries: Tensor) -> Tensor:
    """(B or 1, 1, Q, T), True where a query sees a key."""
    if heads.mask is not None:
        mask = heads.mask[:, :, queries]
        return mask if mask.dtype == torch.bool else mask == 0
    keys = torch.arange(heads.key.shape[2], device=queries.device)
    return (keys <= queries[:, None])[None, None]


def _centred(scores: Tensor, visible: Tensor) -> Tensor:
    """Scores less each query's mean over its keys, which the softmax does not feel; 0 where no key is seen."""
    hidden = scores.masked_fill(~visible, 0.0)
    mean = hidden.sum(-1, keepdim=True) / visible.sum(-1, keepdim=True)
    return (hidden - mean).masked_fill(~visible, 0.0)
