"""Configuration of a model whose attention was folded into MLA; ships inside the checkpoint."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import AutoConfig, PretrainedConfig
from transformers.configuration_utils import SubConfigSpec


class LatentfoldConfig(PretrainedConfig):
    """The source's own configuration, and what its attention became.

    Whatever is asked of it that it does not hold (`vocab_size`, `num_hidden_layers`, ..) it asks the source's.

    Attributes:
        text_config: the source model's configuration; its `model_type` names the family.
        attention: name of the attention module within a decoder layer.
        num_heads, num_kv_heads, head_dim: of the source's attention.
        kv_lora_rank: size of the cached latent, r; where layers differ, a list with each layer's, None for a layer
            whose attention is the source's own.
        frequencies: for each layer the inverse frequencies of its S rotating keys, any at all; 2S values are cached.
            None for a layer whose attention is the source's own.
        first_context, frequencies_beyond: from that many tokens on they are the latter (longrope); None: they stay.
        scaling: of the scores, for each layer.
        softcap: scores become softcap * tanh(score / softcap); None: they stay.
        qk_norm: keys and queries are normalized: the latent is a map of normed keys and values, not of the input.
        qkv_bias, o_bias: whether the projections made here have biases.
    """

    model_type = "latentfold"
    sub_configs_defaults: ClassVar[dict[str, SubConfigSpec]] = {
        "text_config": SubConfigSpec(AutoConfig, model_type="llama")
    }

    text_config: Any = None
    attention: str = "self_attn"
    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 1
    kv_lora_rank: int | list[int | None] = 1
    frequencies: list[list[float] | None] | None = None
    frequencies_beyond: list[list[float] | None] | None = None
    first_context: int | None = None
    scaling: list[float] | None = None
    softcap: float | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not vars(self).get("_post_init_done"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.text_config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What is the source's is set there too (`use_cache`, ..): its modules read their own configuration."""
        super().__setattr__(name, value)
        text = vars(self).get("text_config")
        own = name.startswith("_") or name in type(self).__annotations__ or name in ("architectures", "auto_map")
        if text is not None and vars(self).get("_post_init_done") and not own and hasattr(text, name):
            setattr(text, name, value)

    @property
    def kv_lora_ranks(self) -> list[int | None]:
        """Size of each layer's latent; None for a layer whose attention is the source's own."""
        rank = self.kv_lora_rank
        return rank if isinstance(rank, list) else [rank] * len(self.frequencies or [])

    @property
    def rope_dims(self) -> list[int | None]:
        """Rotated values cached per token by each layer; None for a layer whose attention is the source's own."""
        return [None if found is None else 2 * len(found) for found in self.frequencies or []]

    @property
    def qk_rope_head_dim(self) -> int:
        """Rotated values cached per token, in the layers that cache most."""
        return max((size for size in self.rope_dims if size is not None), default=0)
