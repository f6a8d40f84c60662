"""What each model family is, as data; docs/families.md shows how to add one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from latentfold.convert.families import gemma, llama, mistral, others, qwen
from latentfold.convert.families.family import Family
from latentfold.convert.shapes import ModelShape

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

PORTABLE_ROPE = ("default", "llama3", "linear")
STORED_ROPE = (*PORTABLE_ROPE, "yarn", "longrope")
"""Rope types whose frequencies are one list, or one up to some length of the text and another beyond."""


@dataclass(frozen=True)
class Verdict:
    """Whether a model can be converted: its family, or the reasons why not.

    Attributes:
        family: None where `reasons` stand against it.
        not_portable: why the portable target cannot hold it; empty where it can.
    """

    family: Family | None
    reasons: tuple[str, ...]
    not_portable: tuple[str, ...] = ()


def judge(config: Any, shape: ModelShape, engine: str = "any") -> Verdict:
    """Look for everything in a transformers config that the converted model would get wrong.

    Args:
        engine: what has to load a portable result; "transformers" takes biases too.
    """
    if shape.is_mla:
        return Verdict(None, (f"already MLA (kv_lora_rank {shape.kv_lora_rank})",))
    model_type = config.model_type
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        reason = OUT_OF_REACH.get(model_type)
        detail = f"{reason} not supported yet" if reason else "unknown to this version"
        return Verdict(None, (f"family {model_type!r}: {detail}; supported: {known}",))
    family = FAMILIES[model_type]
    reasons: list[str] = []
    if getattr(config, "is_causal", True) is False:
        reasons.append("bidirectional attention (is_causal: false)")
    if getattr(config, "quantization_config", None):
        reasons.append("quantized weights (quantization_config): convert the full-precision checkpoint instead")
    for kind, rope in _ropes(config).items():
        where = f" ({kind})" if kind else ""
        rope_type = rope.get("rope_type")
        if rope_type not in STORED_ROPE or (kind and rope_type == "longrope"):
            reasons.append(f"rope type {rope_type!r}{where}; supported: {', '.join(STORED_ROPE)}")
        theta, factor = rope.get("rope_theta"), rope.get("factor", 1.0)
        if rope_type in STORED_ROPE and not (_above(theta, 1) and _above(factor, 0)):
            reasons.append(f"rope_theta {theta!r}, factor {factor!r}: expected numbers above 1 and 0")
    for setting in family.unsupported:
        if value := getattr(config, setting, None):
            reasons.append(f"{setting}: {value}")
    if shape.head_dim % 2:
        reasons.append(f"odd head_dim {shape.head_dim}")
    if hasattr(config, "rms_norm_eps") and not _above(config.rms_norm_eps, 0):
        reasons.append(f"rms_norm_eps {config.rms_norm_eps!r}: expected a positive number")
    found = tuple(reasons)
    return Verdict(
        None if reasons else family, found, () if reasons else tuple(_not_portable(family, config, shape, engine))
    )


def _ropes(config: Any) -> dict[str, dict[str, Any]]:
    """Rope parameters by layer type; under "" where all layers share them."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if not parameters:
        return {}
    return {"": parameters} if "rope_type" in parameters else {k: v for k, v in parameters.items() if v}


def _not_portable(family: Family, config: Any, shape: ModelShape, engine: str) -> list[str]:
    if not family.portable:
        return [f"family {family.model_type!r}: {family.why_not_portable}"]
    reasons: list[str] = []
    if any(w is not None for w in shape.windows):
        reasons.append(f"sliding window attention ({max(w for w in shape.windows if w is not None)} tokens)")
    if family.biased(config) and engine != "transformers":
        reasons.append("attention bias, which the stock class has in transformers only (--engine transformers)")
    if getattr(config, "mlp_bias", False):
        reasons.append("MLP bias (mlp_bias: true): the stock class has none")
    if config.hidden_act not in ("silu", "swish"):
        reasons.append(f"activation {config.hidden_act!r}: the stock class's MLP is SiLU")
    rope = config.rope_parameters
    if rope["rope_type"] not in PORTABLE_ROPE:
        reasons.append(f"rope type {rope['rope_type']!r}; supported: {', '.join(PORTABLE_ROPE)}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        reasons.append(f"partial rotary embedding (factor {rope['partial_rotary_factor']})")
    return reasons


def _above(value: Any, bound: float) -> bool:
    return isinstance(value, (int, float)) and value > bound
