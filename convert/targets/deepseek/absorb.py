"""Absorbed decode for the stock class: attention on the latent cache itself, without expanding it for every token.

transformers' DeepseekV3 caches latents but expands all of them to keys and values at every step. That is a matter of
how it computes, not of what: here B^K goes into the query and B^V into the output instead (DeepSeek-V2,
arXiv:2405.04434, section 2.1.2), wherever that is less work. Weights, cache and checkpoint stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from latentfold.convert.errors import InputError
from latentfold.convert.targets.native.modeling_latentfold import (
    absorbable,
    absorbed_attention,
    absorbing_is_cheaper,
    eager_attention,
)

PREFIX = "absorbed_"


def enable_absorbed_decode(model: PreTrainedModel) -> None:
    """Let a loaded `DeepseekV3ForCausalLM` decode on its latents; it gives the same logits.

    Raises:
        InputError: another class, or an attention implementation other than sdpa and eager.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained("smollm2-mla")
        >>> enable_absorbed_decode(model)
    """
    layers = [module for module in model.modules() if isinstance(module, DeepseekV3Attention)]
    if not layers:
        raise InputError(f"{type(model).__name__}: expected a DeepseekV3ForCausalLM")
    implementation = str(model.config._attn_implementation).removeprefix(PREFIX)
    if implementation not in _ATTEND:
        raise InputError(f"attn_implementation {implementation!r}: expected {' or '.join(_ATTEND)}")
    for layer in layers:
        layer.expand_kv = MethodType(_expand_kv, layer)  # type: ignore[method-assign]
    model.set_attn_implementation(PREFIX + implementation)


def _expand_kv(layer: DeepseekV3Attention, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
    """Hand the cache on as one key and value head; the attention function below sees queries and cache together."""
    if not str(layer.config._attn_implementation).startswith(PREFIX):  # set to another one since
        return DeepseekV3Attention.expand_kv(layer, latent, k_rope)
    return torch.cat([latent, k_rope], dim=-1), latent


def _absorbing(attend: Callable[..., Any]) -> Callable[..., Any]:
    """An attention function for unexpanded caches, by one for heads."""

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        rank, nope, size = module.kv_lora_rank, module.qk_nope_head_dim, module.v_head_dim
        latent, k_rope = key.split([rank, module.qk_rope_head_dim], dim=-1)
        cheaper = absorbing_is_cheaper(query.shape[2], key.shape[2], attention_mask, rank, nope, size)
        if not (cheaper and absorbable(module.kv_b_proj)):
            keys, values = DeepseekV3Attention.expand_kv(module, latent, k_rope)
            return attend(module, query, keys, values, attention_mask, **kwargs)
        k_up, v_up = module.kv_b_proj.weight.view(-1, nope + size, rank).split([nope, size], dim=1)
        q_nope, q_rope = query.split([nope, module.qk_rope_head_dim], dim=-1)
        return absorbed_attention(attend, module, q_nope, q_rope, latent, k_rope, k_up, v_up, attention_mask, **kwargs)

    return attention


_ATTEND: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sdpa": (sdpa_attention_forward, sdpa_mask),
    "eager": (eager_attention, eager_mask),
}

for _name, (_attend, _mask) in _ATTEND.items():
    AttentionInterface.register(PREFIX + _name, _absorbing(_attend))
    AttentionMaskInterface.register(PREFIX + _name, _mask)
