"""All families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from latentfold.convert.families import gemma, llama, mistral, others, qwen
from latentfold.convert.families.family import Family

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (llama.FAMILY, mistral.FAMILY, *qwen.FAMILIES, *gemma.FAMILIES, *others.FAMILIES)
}

OUT_OF_REACH: Mapping[str, str] = {
    "cohere2": "layers without RoPE and a parallel residual",
    "falcon": "fused projections of several layouts",
    "gemma3": "an image encoder beside the text model",
}
"""Families people ask for that this version does not convert, and what stands in the way."""


def attention_name(config: Any) -> str:
    """Name of the attention module within a layer: the family's, or what a converted model's config says."""
    family = FAMILIES.get(config.model_type)
    return family.attention if family else getattr(config, "attention", "self_attn")
