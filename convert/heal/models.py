"""Teacher and student, whole in memory: the original as it is, the conversion opened for training."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.core_model_loading import revert_weight_conversion

from latentfold.convert.families.registry import attention_name
from latentfold.convert.model.streamed import find_layers
from latentfold.convert.targets.registry import TargetEntry

WORTH = 1.3
"""How much faster bfloat16 has to be to be used: it costs precision."""


@dataclass(frozen=True)
class Arithmetic:
    """Where products are computed, and in what; sums, norms and weights stay in float32."""

    device: torch.device
    dtype: torch.dtype

    def __call__(self) -> AbstractContextManager[Any]:
        """A block computed so."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Multiplications and additions a second in products of matrices as wide as a layer's."""
    x, w = (torch.randn(rows, 1024, device=device, dtype=dtype) for rows in (512, 1024))
    best = float("inf")
    for _ in range(4):
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        start = time.perf_counter()
        for _ in range(4):
            x @ w
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 4 * 2 * x.numel() * len(w) / best


def fastest(device: torch.device) -> torch.dtype:
    """float32, or bfloat16 where products are computed clearly faster in it."""
    rates = {dtype: product_rate(device, dtype) for dtype in (torch.float32, torch.bfloat16)}
    return torch.bfloat16 if rates[torch.bfloat16] > WORTH * rates[torch.float32] else torch.float32


def hidden_and_head(model: Any) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """A model in two halves: tokens (B, T) to last hidden states (B, T, D), and those (N, D) to logits (N, V).

    The second is all that `forward` does after the decoder, whatever a family does to its logits.
    """

    def hidden(tokens: Tensor) -> Tensor:
        return model.base_model(input_ids=tokens, use_cache=False).last_hidden_state

    def head(rows: Tensor) -> Tensor:
        decoder = model.base_model
        name = next(key for key, module in model.named_children() if module is decoder)
        model._modules[name] = _Answer(rows[None])
        try:
            return model(inputs_embeds=rows[None, :1], use_cache=False).logits[0]
        finally:
            model._modules[name] = decoder

    return hidden, head


class _Answer(nn.Module):
    """Stands in for a decoder that has computed already."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *_: Any, **__: Any) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        return MoeModelOutputWithPast(last_hidden_state=self.hidden)


def _in_float32(_: nn.Module, __: Any, embedded: Tensor) -> Tensor:
    """The hidden states that all layers add to keep float32, whatever the embedding is kept in."""
    return embedded.float()


def is_trained(name: str, layers: str, attention: str, train: str) -> bool:
    """Whether a parameter is, of a model with its layers and their attention under these names."""
    if not name.startswith(layers + "."):
        return False
    inside = name.removeprefix(layers + ".").partition(".")[2]
    in_attention = inside.startswith(attention + ".")
    if in_attention and ".q_a_" in f".{inside}":  # the identity that carries biases
        return False
    return in_attention or train == "all" or (train == "norms" and "norm" in inside)


class Student:
    """A conversion that can be trained.

    Args:
        model: the whole model in float32.
        target: what it is written as.
        train: which tensors of the layers are trained: "attention", "norms", "all".
        frozen: dtype to keep all other matrices in.
        recompute: share of the layers whose inner results are computed again on the way back instead of being kept.

    Attributes:
        trained: parameters by name.
    """

    def __init__(
        self, model: Any, target: TargetEntry, train: str, frozen: torch.dtype = torch.float32, recompute: float = 0.0
    ) -> None:
        self.model, self.target = model, target
        target.training.open_for_training(model)
        self.layers_name, self.layers = find_layers(model)
        self.attention = attention_name(model.config)
        self.trained: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_trained(name, self.layers_name, self.attention, train))
            if parameter.requires_grad:
                self.trained[name] = parameter
            elif parameter.dim() > 1:
                parameter.data = parameter.data.to(frozen)
        model.get_input_embeddings().register_forward_hook(_in_float32)
        for index, layer in enumerate(self.layers):
            if int((index + 1) * recompute) > int(index * recompute):
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)

    @torch.no_grad()
    def stored(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Every tensor that training may have changed, by its name in the checkpoint and in its stored dtype."""
        found: dict[str, Tensor] = {}
        for index, layer in enumerate(self.layers):
            prefix = f"{self.layers_name}.{index}."
            module = layer.get_submodule(self.attention)
            closed = self.target.training.closed(layer, module, dtype)
            found |= {f"{prefix}{self.attention}.{name}": tensor for name, tensor in closed.items()}
        known = {name.rpartition(".")[0] for name in found}
        for name, parameter in self.trained.items():
            if not any(name.startswith(module + ".") for module in known):
                found |= revert_weight_conversion(self.model, {name: parameter.detach()})
        return {name: tensor.to("cpu", dtype).contiguous() for name, tensor in found.items()}
