"""Multi-head latent attention in any decoder of transformers; ships inside the checkpoint.

A model of this class *is* its source's family - embeddings, norms, MLPs or experts, masks, generation are that
family's transformers modules - with the attention modules replaced, in all layers or in some.

Shape legend
    B  sequences    T  new tokens    N  tokens in the cache and new    D  hidden size    H  query heads    d  head size
    r  kv_lora_rank    S  rotating keys    X  what the latent is a map of: the input (D), or normed keys and values

Per token the cache holds a latent c (r) and S complex keys z (2S real numbers: S real parts, S imaginary parts), shared
by all heads. With the rotation of slot s by v_s per token, at distance t

    score_h = scaling * (q_h . B^K_h c + sum_s Re(q^rope_h,s conj(z_s) e^{i v_s t})),    value_h = B^V_h c

Many new tokens expand the latents to keys and values; few absorb B^K into the query and B^V into the output, and the
attention runs on the cache as it is (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils.versions import require_version

from .configuration_latentfold import LatentfoldConfig  # noqa: TID251 - they lie side by side in a checkpoint

require_version("transformers>=5.24", "Earlier releases hand attention its cache under another name: no cache at all.")


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn complex numbers stored as (.., S real parts, S imaginary parts)."""
    re, im = x.chunk(2, dim=-1)
    return torch.cat([re * cos - im * sin, im * cos + re * sin], dim=-1)


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    is_causal: bool = True,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention by its definition: (B, H, T, k), (B, H, N, k), (B, H, N, e) -> (B, T, H, e), and its weights."""
    scores = scaling * query @ key.mT
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is None and is_causal:
        rows, columns = scores.shape[-2:]
        attention_mask = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).tril(columns - rows)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2), weights


def absorbing_is_cheaper(
    tokens: int, seen: int, attention_mask: Tensor | None, rank: int, key_size: int, value_size: int
) -> bool:
    """Whether attention on latents costs less than expanding all `seen` of them for `tokens` queries.

    Multiplications per head and cached token: `tokens` times 2 rank, against rank * (key_size + value_size) once and
    `tokens` times key_size + value_size. Where causality is left to the kernel (several tokens, no mask) there is no
    past, and the expanded form stays.
    """
    expanded = key_size + value_size
    masked = tokens == 1 or attention_mask is not None
    return masked and tokens < seen and tokens * (2 * rank - expanded) < rank * expanded


def absorbable(projection: nn.Module) -> bool:
    """Whether a projection is its weight alone: not one with an adapter on it, or quantized."""
    return type(projection) is nn.Linear


def absorbed_attention(
    attend: Any,
    module: nn.Module,
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    k_up: Tensor,
    v_up: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention on the cache itself: one key and value head, whose rows are the queries of all heads.

    Args:
        attend: an attention function of transformers.  module: what it is called for.
        q_nope: (B, H, T, d).  q_rope: (B, H, T, 2S).  latent: (B, 1, N, r).  k_rope: (B, 1, N, 2S).
        k_up: (H, d, r).  v_up: (H, e, r).  attention_mask: (B, 1, T, N), or None for one token that sees everything.

    Returns:
        (B, T, H, e), and the weights (B, H, T, N) where `attend` gives them.
    """
    batch, heads, tokens, _ = q_nope.shape
    query = torch.cat([q_nope @ k_up, q_rope], dim=-1).reshape(batch, 1, heads * tokens, -1)
    key = torch.cat([latent, k_rope], dim=-1)
    if attention_mask is not None:
        attention_mask = attention_mask.repeat(1, 1, heads, 1)
    read, weights = attend(module, query, key, latent, attention_mask, is_causal=False, **options)
    read = read.reshape(batch, heads, tokens, -1) @ v_up.mT
    if weights is not None:
        weights = weights.reshape(batch, heads, tokens, -1)
    return read.transpose(1, 2), weights


class LatentAttention(nn.Module):
    """Attention that caches one latent and a few rotating keys for all heads.

    Args:
        config: of the model.  layer_idx: which layer.
        source: the family's own attention module, of which a model with q/k-norm keeps projections and norms.
    """

    num_key_value_groups = 1  # attention functions get as many keys as queries

    def __init__(self, config: LatentfoldConfig, layer_idx: int, source: Any) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.scaling = (config.scaling or [])[layer_idx]
        lists = (config.frequencies, config.frequencies_beyond)
        frequencies = [found[layer_idx] or [] for found in lists if found is not None]
        self.kv_rank: int = config.kv_lora_ranks[layer_idx] or 0
        hidden, heads, size = config.text_config.hidden_size, config.num_heads, config.head_dim
        self.rope_dim = 2 * len(frequencies[0])
        if config.qk_norm:
            self.q_proj, self.k_proj, self.v_proj = source.q_proj, source.k_proj, source.v_proj
            self.q_norm, self.k_norm = source.q_norm, source.k_norm
            self.q_rope_proj = nn.Linear(size, heads * self.rope_dim, bias=False)
            width = 2 * config.num_kv_heads * size
        else:
            self.q_proj = nn.Linear(hidden, heads * (size + self.rope_dim), bias=config.qkv_bias)
            width = hidden
        self.kv_a_proj = nn.Linear(width, self.kv_rank + self.rope_dim, bias=config.qkv_bias)
        self.kv_b_proj = nn.Linear(self.kv_rank, heads * 2 * size, bias=False)
        self.o_proj = nn.Linear(heads * size, hidden, bias=config.o_bias)
        # neither weight nor buffer: never cast to half precision, never stored twice
        self.frequencies = frequencies
        self._frequencies: Tensor | None = None

    def rotation(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin (B, 1, T, S) of the positions (B, T)."""
        if self._frequencies is None or self._frequencies.device != position_ids.device:
            self._frequencies = torch.tensor(self.frequencies, dtype=torch.float32, device=position_ids.device)
        first = self.config.first_context
        beyond = first is not None and bool(position_ids.max() >= first)
        phase = position_ids[:, None, :, None].float() * self._frequencies[int(beyond)]
        return phase.cos().to(dtype), phase.sin().to(dtype)

    def _normed(self, norm: Any, states: Tensor) -> Tensor:
        """(B, T, heads * d) normalized head by head or as a whole, as wide as the norm is -> (B, T, heads, d)."""
        size = self.config.head_dim
        heads = states.unflatten(-1, (-1, size))
        return norm(heads) if norm.weight.shape[0] == size else norm(states).view_as(heads)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(B, T, D) -> still and rotating queries (B, H, T, d | 2S), latents (B, 1, T, r) and keys (B, 1, T, 2S)."""
        config = self.config
        if config.qk_norm:
            q_nope = self._normed(self.q_norm, self.q_proj(x)).transpose(1, 2)
            to_rope = self.q_rope_proj.weight.view(config.num_heads, self.rope_dim, config.head_dim)
            q_rope = q_nope @ to_rope.mT
            keys = self._normed(self.k_norm, self.k_proj(x)).flatten(2)
            x = torch.cat([keys, self.v_proj(x)], dim=-1)
        else:
            queries = self.q_proj(x).unflatten(-1, (config.num_heads, -1)).transpose(1, 2)
            q_nope, q_rope = queries.split([config.head_dim, self.rope_dim], dim=-1)
        latent, k_rope = self.kv_a_proj(x)[:, None].split([self.kv_rank, self.rope_dim], dim=-1)
        return q_nope, q_rope, latent, k_rope

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        layer_past: Cache | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, D) -> (B, T, D), and the attention weights where the attention function gives them."""
        config = self.config
        cache = cache if cache is not None else layer_past  # as GPT-NeoX calls it
        q_nope, q_rope, latent, k_rope = self.project(hidden_states)
        if self.rope_dim:
            assert position_ids is not None
            cos, sin = self.rotation(position_ids, hidden_states.dtype)
            q_rope, k_rope = rotate(q_rope, cos, sin), rotate(k_rope, cos, sin)
        if cache is not None:
            latent, k_rope = cache.update(latent, k_rope, self.layer_idx)
        attend: Any = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager_attention)
        options: dict[str, Any] = {"scaling": self.scaling}
        if config.softcap is not None:
            options["softcap"] = config.softcap
        if self.training:
            options["dropout"] = getattr(config.text_config, "attention_dropout", 0.0)
        tokens, seen = hidden_states.shape[1], latent.shape[2]
        size = config.head_dim
        if absorbable(self.kv_b_proj) and absorbing_is_cheaper(tokens, seen, attention_mask, self.kv_rank, size, size):
            both = self.kv_b_proj.weight.view(config.num_heads, 2 * size, self.kv_rank)
            k_up, v_up = both.chunk(2, dim=1)
            out, weights = absorbed_attention(
                attend, self, q_nope, q_rope, latent, k_rope, k_up, v_up, attention_mask, **options
            )
        else:
            both = self.kv_b_proj(latent[:, 0]).unflatten(-1, (config.num_heads, 2 * size)).transpose(1, 2)
            keys, values = both.chunk(2, dim=-1)
            key = torch.cat([keys, k_rope.expand(-1, config.num_heads, -1, -1)], dim=-1)
            query = torch.cat([q_nope, q_rope], dim=-1)
            if config._attn_implementation == "sdpa":  # whose fused CPU kernel wants heads of one size
                values = nn.functional.pad(values, (0, self.rope_dim))
            out, weights = attend(self, query, key, values, attention_mask, **options)
            out = out[..., :size]
        return self.o_proj(out.flatten(2)), weights


class LatentfoldForCausalLM(PreTrainedModel):
    """The source family's causal language model, each layer's attention replaced by `LatentAttention`."""

    config_class = LatentfoldConfig

    def __new__(cls, config: LatentfoldConfig, *args: Any, **kwargs: Any) -> Any:
        own: Any = cls
        return super().__new__(_of_family(own, MODEL_FOR_CAUSAL_LM_MAPPING[type(config.text_config)]))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are made from the configuration: the class itself has no name to be found by."""
        return LatentfoldForCausalLM.__new__, (LatentfoldForCausalLM, self.config), self.__dict__

    def __init__(self, config: LatentfoldConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config.text_config, *args, **kwargs)
        self.config = config
        config._attn_implementation_internal = config.text_config._attn_implementation
        config._experts_implementation_internal = config.text_config._experts_implementation
        layers = [module for module in self.modules() if hasattr(module, config.attention)]
        for index, (layer, rank) in enumerate(zip(layers, config.kv_lora_ranks, strict=True)):
            if rank is not None:
                setattr(layer, config.attention, LatentAttention(config, index, getattr(layer, config.attention)))


@cache
def _of_family(cls: Any, family: Any) -> Any:
    """A subclass of both; the same one for every model of a family."""
    traits = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "config_class": LatentfoldConfig,
        "_supports_flash_attn": False,  # takes no values shorter than keys
        "_supports_flex_attn": False,
    }
    return cls if issubclass(cls, family) else type(cls.__name__, (cls, family), traits)


# save_pretrained writes both files into the folder, for whoever loads it without this package
LatentfoldConfig.register_for_auto_class()
LatentfoldForCausalLM.register_for_auto_class("AutoModelForCausalLM")
