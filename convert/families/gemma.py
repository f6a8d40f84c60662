"""Gemma 1, 2 and 3 (text): soft-cap or q/k-norm, own query scale, windows, a theta for each layer type."""

from __future__ import annotations

from typing import Any

from latentfold.convert.families.family import Family
from latentfold.convert.model.shape import ModelShape


def _query_scale(config: Any, shape: ModelShape) -> float:
    return config.query_pre_attn_scalar**-0.5


GEMMA = Family(
    "gemma",
    unsupported=("use_bidirectional_attention",),
    why_not_portable="(1 + weight) norms, GELU and embedding scale",
)
GEMMA2 = Family(
    "gemma2",
    scale=_query_scale,
    softcap=lambda config: config.attn_logit_softcapping,
    output_norm="post_attention_layernorm",
    norm_offset=1.0,
    unsupported=("use_bidirectional_attention",),
    why_not_portable="attention soft-cap, sliding windows and post norms",
)
GEMMA3 = Family(
    "gemma3_text",
    q_norm="q_norm",
    k_norm="k_norm",
    output_norm="post_attention_layernorm",
    norm_offset=1.0,
    scale=_query_scale,
    unsupported=("use_bidirectional_attention",),
    why_not_portable="q/k-norm, sliding windows and post norms",
)
FAMILIES = (GEMMA, GEMMA2, GEMMA3)
