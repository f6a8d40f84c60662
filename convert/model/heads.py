"""What attention computes on: its heads, watched as transformers calls it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "latentfold"


@dataclass(frozen=True)
class Heads:
    """What one call of attention works on, rotated and with KV heads repeated to query heads.

    Attributes:
        query, key: (B, H, T, d).  value: (B, H, T, e).
        mask: (B, 1, T, T), True where a query sees a key; None: causal.
        scale: of the scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float


_watched: WeakKeyDictionary[nn.Module, list[Heads]] = WeakKeyDictionary()


@contextmanager
def watched_heads(attention: nn.Module) -> Iterator[list[Heads]]:
    """Collects the heads of every call of an attention module of a `StreamedModel`, for the length of the block."""
    _watched[attention] = []
    try:
        yield _watched[attention]
    finally:
        del _watched[attention]


def _equal_heads_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """transformers' sdpa with values zero-padded to the keys' size.

    torch's fused CPU kernel wants heads of one size; without it MLA's attention is four times slower.
    """
    if module in _watched:
        groups = query.shape[1] // key.shape[1]
        keys, values = (part.repeat_interleave(groups, dim=1) for part in (key, value))
        _watched[module].append(Heads(query, keys, values, attention_mask, kwargs["scaling"]))
    if kwargs.get("softcap") is not None:
        return _capped_attention(query, key, value, attention_mask, **kwargs)
    size = value.shape[-1]
    padded = nn.functional.pad(value, (0, query.shape[-1] - size)) if size < query.shape[-1] else value
    output, weights = sdpa_attention_forward(module, query, key, padded, attention_mask, **kwargs)
    return output[..., :size], weights


def _capped_attention(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Scores that saturate, which no fused kernel of torch knows: head by head, to hold one head's scores at a time."""
    groups = query.shape[1] // key.shape[1]
    tokens = torch.arange(query.shape[2], device=query.device)
    seen = tokens <= tokens[:, None] if attention_mask is None else attention_mask[:, 0]
    cap, outputs = kwargs["softcap"], []
    for h in range(query.shape[1]):
        scores = cap * torch.tanh(kwargs["scaling"] * query[:, h] @ key[:, h // groups].mT / cap)
        outputs.append(scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) @ value[:, h // groups])
    return torch.stack(outputs, dim=2), None


AttentionInterface.register(ATTENTION, _equal_heads_sdpa)

AttentionMaskInterface.register(ATTENTION, sdpa_mask)


@torch.no_grad()
def attention_inputs(
    layer: nn.Module, hidden: Tensor, kwargs: dict[str, Any], attention: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one layer: its output, attention's normed input x, and attention's output, all (B, T, D).

    Args:
        attention: name of the attention module within the layer.
    """
    seen: list[Tensor] = []

    def note(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen.append(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])
        seen.append(output[0])

    handle = layer.get_submodule(attention).register_forward_hook(note, with_kwargs=True)
    try:
        output = layer(hidden, **kwargs)
    finally:
        handle.remove()
    return output, seen[0], seen[1]
