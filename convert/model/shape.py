"""A model's sizes, and what its KV cache costs.

A cached token costs 2 G d values per layer with MHA/GQA (G KV heads of size d), and kv_lora_rank + qk_rope_head_dim
with MLA (DeepSeek-V2, arXiv:2405.04434). Layers with a sliding window stop growing at the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from latentfold.convert.errors import InputError


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder, whatever its family.

    Attributes:
        windows: per layer, the number of tokens attention sees, or None for all.
        rotates: it has rotary position embeddings.
        kv_lora_rank, qk_rope_head_dim: for a model that already is MLA, else None.
        rope_dims: the latter by layer, where layers differ.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    rotates: bool = True
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    rope_dims: tuple[int, ...] = ()

    @property
    def is_mla(self) -> bool:
        return self.kv_lora_rank is not None

    @property
    def cache_values(self) -> int:
        """Values cached per token and layer."""
        if self.kv_lora_rank is not None:
            return self.kv_lora_rank + (self.qk_rope_head_dim or 0)
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def layer_values(self) -> tuple[int, ...]:
        """Values cached per token by each layer."""
        if self.kv_lora_rank is not None and self.rope_dims:
            return tuple(self.kv_lora_rank + rope_dim for rope_dim in self.rope_dims)
        return (self.cache_values,) * self.num_layers

    @property
    def max_kv_rank(self) -> int:
        """The largest useful kv_lora_rank: K and V of a token together have no more dimensions."""
        return min(2 * self.num_kv_heads * self.head_dim, self.hidden_size)

    def cache_bytes(self, tokens: int, bytes_per_value: int = 2) -> int:
        """Bytes of the KV cache of one sequence of `tokens` tokens, all layers."""
        held = (tokens if window is None else min(tokens, window) for window in self.windows)
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
    rank = getattr(config, "kv_lora_rank", None)
    return ModelShape(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        windows=_windows(text, layers),
        rotates=bool(getattr(text, "rope_parameters", None)),
        kv_lora_rank=rank,
        qk_rope_head_dim=config.qk_rope_head_dim if rank is not None else None,
        rope_dims=tuple(getattr(config, "rope_dims", ())),
    )


def first_context(config: Any) -> int | None:
    """Tokens from which on a model's keys rotate with other frequencies (longrope), or None where they never do."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return rope["original_max_position_embeddings"] if rope.get("rope_type") == "longrope" else None


def _windows(text: Any, layers: int) -> tuple[int | None, ...]:
    window = getattr(text, "sliding_window", None)
    whole = getattr(text, "max_position_embeddings", None) or window
    if not window or getattr(text, "use_sliding_window", True) is False or window >= whole:
        return (None,) * layers
    kinds = getattr(text, "layer_types", None)
    if not kinds:
        return (window,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
