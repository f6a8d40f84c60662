"""Frequencies that the stock class can have: geometric ladders, bent by yarn where the source is bent.

Shape legend
    S  slots (2S = qk_rope_head_dim)    n  rotary pairs of a head of the source
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding


@dataclass(frozen=True)
class Ladder:
    """The geometric frequencies that one `rope_parameters` of the target gives its S slots.

    Attributes:
        parameters: `rope_parameters` as the target's config holds them.
        rope_dim: 2S.
    """

    parameters: dict[str, Any]
    rope_dim: int

    @property
    def frequencies(self) -> Tensor:
        """(S,) inverse frequencies in float64, computed by the stock class itself."""
        reach = self.parameters.get("original_max_position_embeddings", 1) * self.parameters.get("factor", 1.0)
        config = DeepseekV3Config(
            qk_rope_head_dim=self.rope_dim,
            rope_parameters=dict(self.parameters),
            max_position_embeddings=max(1, round(reach)),
        )
        return DeepseekV3RotaryEmbedding(config).inv_freq.to(torch.float64)

    @property
    def softmax_factor(self) -> float:
        """What the stock class multiplies the softmax scale by (DeepSeek's mscale^2 for yarn)."""
        mscale = self.parameters.get("mscale_all_dim", 0)
        factor = self.parameters.get("factor", 1.0)
        if self.parameters["rope_type"] != "yarn" or not mscale or factor <= 1:
            return 1.0
        return float((0.1 * mscale * math.log(factor) + 1.0) ** 2)

    @property
    def data(self) -> dict[str, Any]:
        """Its parameters."""
        return self.parameters

    def __str__(self) -> str:
        p = self.parameters
        text = f"{p['rope_type']}, theta {p['rope_theta']:.6g}"
        if p["rope_type"] == "yarn":
            text += f", factor {p['factor']:g}, beta {p['beta_fast']:g}/{p['beta_slow']:g}"
        return text


def ladders(source: dict[str, Any], head_dim: int, rope_dim: int, max_positions: int) -> list[Ladder]:
    """Candidate ladders for a source's rope parameters, most literal first.

    theta' = theta keeps every (n/S)-th frequency of the source, theta' = theta^(S/n) its S fastest. For `llama3` and
    `linear` sources there are also yarn ladders with the same factor, which bend where the source bends.
    """
    theta = float(source["rope_theta"])
    span = rope_dim / head_dim
    exponents = sorted({1.0, span, *(span + (1 - span) * k / 6 for k in range(1, 6)), 1.15, 1.3})
    exponents.sort(key=lambda e: abs(e - 1.0))
    found: list[Ladder] = []
    for exponent in exponents:
        base = theta**exponent
        bend = _bend(source, base, rope_dim, max_positions)
        if bend:
            both = {"mscale": 1.0, "mscale_all_dim": 1.0}  # equal, so that cos and sin carry no factor
            found.append(Ladder({"rope_type": "yarn", "rope_theta": base, **bend, **both}, rope_dim))
        found.append(Ladder({"rope_type": "default", "rope_theta": base}, rope_dim))
    return found


def _bend(source: dict[str, Any], base: float, rope_dim: int, max_positions: int) -> dict[str, Any] | None:
    """Yarn parameters under which a ladder divides by the source's factor where the source does."""
    if source["rope_type"] == "llama3":
        return {
            "factor": float(source["factor"]),
            "original_max_position_embeddings": int(source["original_max_position_embeddings"]),
            "beta_fast": float(source["high_freq_factor"]),
            "beta_slow": float(source["low_freq_factor"]),
        }
    if source["rope_type"] == "linear":
        # yarn's ramp runs from slot floor(c) to ceil(c), c = rope_dim log(original / (2 pi beta)) / (2 log base), both
        # clipped at 0: with c = -1/4 it is a step, and every slot but the first is divided
        original = max(1, round(max_positions / float(source["factor"])))
        beta = original / (2 * math.pi) * base ** (0.5 / rope_dim)
        return {
            "factor": float(source["factor"]),
            "original_max_position_embeddings": original,
            "beta_fast": beta,
            "beta_slow": beta,
        }
    return None
