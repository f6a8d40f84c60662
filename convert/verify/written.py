"""The converted model as it is being written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from latentfold.convert.attention.latent import LatentAttention, latent_attention
from latentfold.convert.families.registry import attention_name
from latentfold.convert.model.heads import attention_inputs
from latentfold.convert.model.streamed import StreamedModel
from latentfold.convert.targets.target import Conversion, Ladder
from latentfold.convert.write.writer import CheckpointWriter

PROBE_TOKENS = 48

LAYOUT_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest relative difference of a written layer's attention output from its own factorization, by stored dtype."""


class _Tensors:
    """A few tensors in memory, read as a checkpoint is."""

    def __init__(self) -> None:
        self.headers: dict[str, Any] = {}  # names are not looked up: the writer's are the model's own
        self.held: dict[str, Tensor] = {}

    def tensor(self, name: str) -> Tensor:
        return self.held[name]


class MemoryTarget:
    """The converted model as it is being written: a few tokens follow the conversion, layer by layer.

    Each new layer's attention in the target's class, from the rounded tensors, is compared with its own factorization
    (a wrong layout shows here, at once), and the tokens' logits are what the reloaded checkpoint has to give.
    """

    def __init__(
        self,
        target: Conversion,
        chosen: Mapping[str, Ladder],
        writer: CheckpointWriter,
        *,
        device: torch.device,
        seed: int,
    ) -> None:
        config = AutoConfig.for_model(**target.config(chosen))
        self.attention = attention_name(config)
        self.dtype, self.residual = target.dtype, target.residual
        self.tensors, self.writer = _Tensors(), writer
        self.model = StreamedModel(self.tensors, config, torch.float32, device)
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(target.shape.vocab_size, (1, PROBE_TOKENS), generator=generator)
        self.outer = list(target.outer())
        self.tensors.held = self._outer()
        (self.hidden,), (self.kwargs,) = self.model.begin(self.tokens)

    def _outer(self) -> dict[str, Tensor]:
        return {name: tensor for prefix in self.outer for name, tensor in self.writer.read(prefix).items()}

    def take(self, index: int, tensors: dict[str, Tensor], converted: LatentAttention, frequencies: Tensor) -> float:
        """Run the tokens through a freshly converted layer; the relative error of its layout.

        Raises:
            RuntimeError: the target's class does not compute what was factorized.
        """
        self.tensors.held = tensors
        with self.model.layer(index) as layer:
            self.hidden, x, output = attention_inputs(layer, self.hidden, self.kwargs[index], self.attention)
        expected = self.residual * latent_attention(converted, frequencies, x[0])
        error = float((output[0].to(expected) - expected).norm() / expected.norm().clamp_min(1e-30))
        if not error <= LAYOUT_TOLERANCE[self.dtype]:
            raise RuntimeError(
                f"layer {index}: the written attention differs from its factorization by {error:.1e} "
                f"(allowed {LAYOUT_TOLERANCE[self.dtype]:.0e} in {self.dtype}); please report this"
            )
        return error

    @torch.no_grad()
    def advance(self, index: int) -> None:
        """Run the tokens through a layer that is already written."""
        self.tensors.held = self.writer.read(f"{self.model.layers_name}.{index}.")
        with self.model.layer(index) as layer:
            self.hidden = layer(self.hidden, **self.kwargs[index])

    def logits(self) -> Tensor:
        """(1, PROBE_TOKENS, V) of the tensors as written."""
        self.tensors.held = self._outer()
        with torch.no_grad(), self.model.head() as head:
            return head(self.hidden)
