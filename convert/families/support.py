"""What no family's description covers."""

from __future__ import annotations

from typing import Any

from latentfold.convert.families.family import Family
from latentfold.convert.model.shape import ModelShape, norm_eps

STORED_ROPE = ("default", "llama3", "linear", "yarn", "longrope")
"""Rope types whose frequencies are one list, or one up to some length of the text and another beyond."""


def _ropes(config: Any) -> dict[str, dict[str, Any]]:
    """Rope parameters by layer type; under "" where all layers share them."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if not parameters:
        return {}
    return {"": parameters} if "rope_type" in parameters else {k: v for k, v in parameters.items() if v}


def _above(value: Any, bound: float) -> bool:
    return isinstance(value, (int, float)) and value > bound


def reasons_against(family: Family, config: Any, shape: ModelShape) -> list[str]:
    """Every setting of a model that its family's description does not cover."""
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
    if (eps := norm_eps(config)) is not None and not _above(eps, 0):
        reasons.append(f"rms_norm_eps {eps!r}: expected a positive number")
    return reasons
