"""A model's sizes, and what its KV cache costs.

A cached token costs 2 G d values per layer with MHA/GQA (G KV heads of size d), and kv_lora_rank + qk_rope_head_dim
with MLA (DeepSeek-V2, arXiv:2405.04434). Layers with a sliding window or a chunk stop growing there; layers with a
recurrent state, and those that read another layer's cache, hold no token at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from latentfold.convert.errors import InputError


class LayerKind(StrEnum):
    """What a layer remembers of the tokens before."""

    FULL = "full attention"
    SLIDING = "sliding window"
    CHUNKED = "chunks"
    RECURRENT = "recurrent state"
    SHARED = "another layer's cache"
    NONE = "nothing"


KINDS = {
    "sliding_attention": LayerKind.SLIDING,
    "window_attention": LayerKind.SLIDING,
    "reference_sliding_attention": LayerKind.SLIDING,
    "hybrid_sliding": LayerKind.SLIDING,
    "chunked_attention": LayerKind.CHUNKED,
    "linear_attention": LayerKind.RECURRENT,
    "conv": LayerKind.RECURRENT,
    "mamba": LayerKind.RECURRENT,
    "recurrent": LayerKind.RECURRENT,
    "moe": LayerKind.NONE,
    "mlp": LayerKind.NONE,
}
"""transformers' `layer_types`; whatever else it calls attention (full, hybrid, indexed, ...) keeps every token."""


@dataclass(frozen=True)
class LayerShape:
    """What one layer caches.

    Attributes:
        kind: what it remembers.
        window: tokens it holds at most, or None for all.
        values: cached per token; 0 where no token is held.
    """

    kind: LayerKind
    window: int | None
    values: int


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder, whatever its family.

    Attributes:
        layers: what each of them caches.
        rotates: it has rotary position embeddings.
        kv_lora_rank, qk_rope_head_dim: for a model that already is MLA, else None; where layers differ, the largest.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerShape, ...]
    rotates: bool = True
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def is_mla(self) -> bool:
        return self.kv_lora_rank is not None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens that each layer holds at most, or None for all."""
        return tuple(layer.window for layer in self.layers)

    @property
    def layer_values(self) -> tuple[int, ...]:
        """Values cached per token by each layer."""
        return tuple(layer.values for layer in self.layers)

    @property
    def cache_values(self) -> int:
        """Values cached per token by a layer that caches tokens; where they differ, by the one that caches most."""
        return max(self.layer_values)

    @property
    def max_kv_rank(self) -> int:
        """The largest useful kv_lora_rank: K and V of a token together have no more dimensions."""
        return min(2 * self.num_kv_heads * self.head_dim, self.hidden_size)

    def cache_bytes(self, tokens: int, bytes_per_value: int = 2) -> int:
        """Bytes of the KV cache of one sequence of `tokens` tokens, all layers."""
        held = (tokens if layer.window is None else min(tokens, layer.window) for layer in self.layers)
        return bytes_per_value * sum(n * values for n, values in zip(held, self.layer_values, strict=True))


def model_shape(config: Any) -> ModelShape:
    """Sizes from a transformers config (of a text model, or holding one).

    Raises:
        InputError: the config has no attention heads to speak of.
    """
    text = config.get_text_config()
    if getattr(text, "is_heterogeneous", False):
        raise InputError(f"model type {config.model_type!r}: its layers differ in size (per_layer_config), unsupported")
    heads = getattr(text, "num_attention_heads", None)
    layers = getattr(text, "num_hidden_layers", None)
    if not heads or not layers or heads < 1 or layers < 1:
        raise InputError(
            f"model type {config.model_type!r}: expected a decoder with layers and attention heads, "
            f"found {layers} layers and {heads} heads"
        )
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if kv_heads < 1 or heads % kv_heads:
        raise InputError(f"{heads} attention heads over {kv_heads} KV heads: expected a whole number of heads each")
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    ranks, rope_dims = _latent_sizes(config, text, layers)
    own = 2 * kv_heads * head_dim
    values = [own if rank is None else rank + (rope or 0) for rank, rope in zip(ranks, rope_dims, strict=True)]
    return ModelShape(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layers=tuple(_layers(text, values)),
        rotates=bool(getattr(text, "rope_parameters", None)),
        kv_lora_rank=max((rank for rank in ranks if rank is not None), default=None),
        qk_rope_head_dim=max((rope for rope in rope_dims if rope is not None), default=None),
    )


def _latent_sizes(config: Any, text: Any, layers: int) -> tuple[list[int | None], list[int | None]]:
    """kv_lora_rank and qk_rope_head_dim of each layer; None for a layer that is not MLA.

    A model around a text model has them inside, our own class around its source's config has them outside.
    """
    holder = config if getattr(config, "kv_lora_rank", None) is not None else text
    rank = getattr(holder, "kv_lora_rank", None)
    if rank is None:
        return [None] * layers, [None] * layers
    ranks = list(rank) if isinstance(rank, Sequence) else [rank] * layers
    rope_dims = getattr(holder, "rope_dims", None)
    return ranks, list(rope_dims) if rope_dims else [holder.qk_rope_head_dim] * layers


def _layers(text: Any, values: Sequence[int]) -> list[LayerShape]:
    """What each layer caches, given how much it would per token."""
    names = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None)
    longest = longest_context(text) or window
    if not window or getattr(text, "use_sliding_window", True) is False or window >= longest:
        window = None
    if not names:
        kinds = [LayerKind.FULL if window is None else LayerKind.SLIDING] * len(values)
    else:
        kinds = [KINDS.get(name, LayerKind.FULL) for name in names]
    sizes = {LayerKind.SLIDING: window, LayerKind.CHUNKED: getattr(text, "attention_chunk_size", None)}
    shared = getattr(text, "num_kv_shared_layers", None) or 0  # the last ones
    found = []
    for index, (kind, own) in enumerate(zip(kinds, values, strict=True)):
        if index >= len(values) - shared:
            kind = LayerKind.SHARED
        if kind in sizes and sizes[kind] is None:
            kind = LayerKind.FULL
        holds = kind in (LayerKind.FULL, LayerKind.SLIDING, LayerKind.CHUNKED)
        found.append(LayerShape(kind, sizes.get(kind), own if holds else 0))
    return found


def longest_context(config: Any) -> int | None:
    """Tokens that a model takes at most, or None where its config does not say."""
    text = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
        if isinstance(length := getattr(text, name, None), int):
            return length
    return None


def first_context(config: Any) -> int | None:
    """Tokens from which on a model's keys rotate with other frequencies (longrope), or None where they never do."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return rope["original_max_position_embeddings"] if rope.get("rope_type") == "longrope" else None


def norm_eps(config: Any) -> float | None:
    """Epsilon of a model's norms, or None where its config does not say."""
    text = config.get_text_config()
    for name in (
        "rms_norm_eps",
        "norm_eps",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "layernorm_epsilon",
        "norm_epsilon",
    ):
        if (eps := getattr(text, name, None)) is not None:
            return eps
    return None
