"""Windows of tokens on their way through a model, layer by layer, one layer's weights in memory at a time.

Shape legend
    N  windows    T  tokens of a window    D  hidden size    V  vocabulary
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from latentfold.convert.attention.call import AttentionCall
from latentfold.convert.model.heads import attention_inputs
from latentfold.convert.model.streamed import StreamedModel
from latentfold.convert.progress import Progress, silent


class Visit:
    """One layer with its weights, and the windows that stand before it.

    Attributes:
        index: which layer.
        layer: its module.
        streams: N hidden states (1, T, D), before the layer or, as far as `advance` and `observe` have come, after it.
    """

    def __init__(self, walk: Walk, index: int, layer: nn.Module) -> None:
        self._walk, self.index, self.layer = walk, index, layer
        self.streams = walk.streams
        self._done = 0

    def kwargs(self, window: int) -> dict[str, Any]:
        """What the model calls the layer with for a window, besides the hidden states."""
        return self._walk.kwargs[window][self.index]

    @torch.no_grad()
    def observe(self, attention: str) -> Iterator[AttentionCall]:
        """Take the windows that are still before the layer through it, and show what its attention did.

        Args:
            attention: name of the attention module within the layer.
        """
        while self._done < len(self.streams):
            yield self._call(attention)

    def _call(self, attention: str) -> AttentionCall:
        k, before = self._done, self.streams[self._done]
        self.streams[k], x, output = attention_inputs(self.layer, before, self.kwargs(k), attention)
        self._step()
        return AttentionCall(k, x[0], before[0], output[0])

    @torch.no_grad()
    def advance(self) -> None:
        """Take the windows that are still before the layer through it."""
        while self._done < len(self.streams):
            self.streams[self._done] = self.layer(self.streams[self._done], **self.kwargs(self._done))
            self._step()

    def _step(self) -> None:
        self._done += 1
        self._walk.report(self.index, self._done)


class Walk:
    """All layers in turn; whatever windows a caller leaves before a layer are taken through it.

    Args:
        model: whose layers are run.
        windows: N windows of tokens (T,), or one tensor (N, T).
        cache: a transformers cache to fill, for one window.
        progress: hears of every window of every layer, as `stage`.

    Attributes:
        streams: N hidden states (1, T, D); after the last layer what the model's head reads.
        kwargs: for each window each layer's keyword arguments.
    """

    def __init__(
        self,
        model: StreamedModel,
        windows: Iterable[Tensor],
        *,
        cache: Any = None,
        progress: Progress = silent,
        stage: str = "",
    ) -> None:
        self.model, self.progress, self.stage = model, progress, stage
        self.streams, self.kwargs = model.begin(windows, cache)

    def __iter__(self) -> Iterator[Visit]:
        for index in range(self.model.num_layers):
            with self.model.layer(index) as layer:
                visit = Visit(self, index, layer)
                yield visit
                visit.advance()

    def report(self, index: int, windows: int) -> None:
        """Tell how many windows are through a layer."""
        lengths = [stream.shape[1] for stream in self.streams]
        layers = self.model.num_layers
        done = index * sum(lengths) + sum(lengths[:windows])
        self.progress(self.stage, done, layers * sum(lengths), f"layer {index + 1}/{layers}")


@torch.no_grad()
def logits(model: StreamedModel, tokens: Tensor) -> Tensor:
    """(N, T) tokens to (N, T, V) logits, layer by layer."""
    walk = Walk(model, tokens)
    for visit in walk:
        visit.advance()
    with model.head() as head:
        return head(torch.cat(walk.streams))
