"""Calibration windows on their way through the source, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from tqdm import tqdm

from latentfold.convert.model.heads import attention_inputs
from latentfold.convert.model.streamed import StreamedModel


class Observer(Protocol):
    """Looks at one layer: fed every window's attention input x, residual stream and attention output, then finishes."""

    def add(self, window: int, x: Tensor, stream: Tensor, output: Tensor) -> None: ...

    def finish(self) -> None: ...


def observe(
    model: StreamedModel,
    tokens: Tensor,
    visit: Callable[[int], Observer | None],
    *,
    description: str,
    progress: bool,
) -> None:
    """Run windows through the source's layers; `visit(index)` gives each layer's observer, or None."""
    streams: list[Tensor] = []
    kwargs: list[dict[str, Any]] = []
    for row in tokens:
        hidden, kwargs = model.begin(row[None])
        streams.append(hidden)
    total = model.num_layers * tokens.numel()
    with tqdm(total=total, desc=description, unit="tok", unit_scale=True, disable=not progress) as bar:
        for index in range(model.num_layers):
            bar.set_postfix_str(f"layer {index + 1}/{model.num_layers}")
            with model.layer(index) as layer:
                observer: Observer | None = visit(index)
                for k, hidden in enumerate(streams):
                    streams[k], x, output = attention_inputs(layer, hidden, kwargs[index])
                    if observer is not None:
                        observer.add(k, x[0], hidden[0], output[0])
                    bar.update(tokens.shape[1])
                if observer is not None:
                    observer.finish()
