"""What the stock class cannot hold."""

from __future__ import annotations

from typing import Any

from latentfold.convert.attention.sizes import Sizes, uniform
from latentfold.convert.families.family import Family
from latentfold.convert.model.shape import ModelShape

PORTABLE_ROPE = ("default", "llama3", "linear")


def why_not(family: Family, config: Any, shape: ModelShape, engine: str) -> list[str]:
    """Why the stock class cannot hold a model; empty where it can."""
    if not family.portable:
        return [f"family {family.model_type!r}: {family.why_not_portable}"]
    reasons: list[str] = []
    if any(w is not None for w in shape.windows):
        reasons.append(f"sliding window attention ({max(w for w in shape.windows if w is not None)} tokens)")
    if family.biased(config) and engine != "transformers":
        reasons.append("attention bias, which the stock class has in transformers only (`engine transformers`)")
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


def why_not_sizes(sizes: Sizes) -> list[str]:
    """Why the stock class cannot have layers of such sizes; empty where it can."""
    if uniform(sizes) is not None:
        return []
    return ["layers of different sizes or left as they are: the stock class has one size for all"]
