"""What each model family is, as data: the names and shapes of its tensors and what it may carry.

Adding a family whose attention the target can hold takes one file like `llama.py` and its entry in `FAMILIES`.

Shape symbols, used by the tensor tables
    V  vocab_size     D  hidden_size    F  intermediate_size
    Q  num_attention_heads * head_dim   K  num_key_value_heads * head_dim
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from latentfold.convert.errors import InputError
from latentfold.convert.families import llama, mistral
from latentfold.convert.families.family import Family
from latentfold.convert.shapes import ModelShape

FAMILIES: Mapping[str, Family] = {f.model_type: f for f in (llama.FAMILY, mistral.FAMILY)}

OUT_OF_REACH: Mapping[str, str] = {
    "cohere": "LayerNorm and a parallel residual",
    "cohere2": "LayerNorm, a parallel residual and sliding windows",
    "falcon": "LayerNorm and a parallel residual",
    "gemma": "(1 + weight) norms, GELU and embedding scale",
    "gemma2": "attention soft-cap, sliding windows and post norms",
    "gemma3": "q/k-norm and sliding windows",
    "gemma3_text": "q/k-norm and sliding windows",
    "glm4": "partial rotary embedding and post norms",
    "gpt2": "learned positions, biases and LayerNorm",
    "gpt_neox": "parallel residual, partial rotary embedding and biases",
    "granite": "embedding, residual and attention multipliers",
    "mixtral": "mixture of experts with softmax routing",
    "olmo": "non-parametric LayerNorm",
    "olmo2": "q/k-norm",
    "opt": "learned positions, biases and LayerNorm",
    "phi": "biases, LayerNorm and a parallel residual",
    "phi3": "fused qkv_proj",
    "qwen2": "q/k/v bias",
    "qwen2_moe": "q/k/v bias and mixture of experts",
    "qwen3": "q/k-norm",
    "qwen3_moe": "q/k-norm and mixture of experts",
    "smollm3": "layers without RoPE",
    "stablelm": "partial rotary embedding and LayerNorm",
    "starcoder2": "biases and LayerNorm",
}
"""Families people ask for that this version does not convert, and what stands in the way."""

CONVERTIBLE_ROPE = ("default", "llama3", "linear")


@dataclass(frozen=True)
class Verdict:
    """Whether a model can be converted: its family, or the reasons why not."""

    family: Family | None
    reasons: tuple[str, ...]


def judge(config: Any, shape: ModelShape) -> Verdict:
    """Look for everything in a transformers config that the converted model would get wrong."""
    if shape.is_mla:
        return Verdict(None, (f"already MLA (kv_lora_rank {shape.kv_lora_rank})",))
    model_type = config.model_type
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        reason = OUT_OF_REACH.get(model_type)
        detail = f"{reason} not supported yet" if reason else "unknown to this version"
        return Verdict(None, (f"family {model_type!r}: {detail}; supported: {known}",))
    reasons: list[str] = []
    if getattr(config, "quantization_config", None):
        reasons.append("quantized weights (quantization_config): convert the full-precision checkpoint instead")
    if any(w is not None for w in shape.windows):
        reasons.append(f"sliding window attention ({max(w for w in shape.windows if w is not None)} tokens)")
    if getattr(config, "attention_bias", False):
        reasons.append("attention bias (attention_bias: true): the portable target has none")
    if getattr(config, "mlp_bias", False):
        reasons.append("MLP bias (mlp_bias: true): the portable target has none")
    if config.hidden_act not in ("silu", "swish"):
        reasons.append(f"activation {config.hidden_act!r}: the portable target's MLP is SiLU")
    rope = config.rope_parameters or {}
    kind = rope.get("rope_type")
    if kind not in CONVERTIBLE_ROPE:
        reasons.append(f"rope type {kind!r}; supported: {', '.join(CONVERTIBLE_ROPE)}")
    theta, factor = rope.get("rope_theta"), rope.get("factor", 1.0)
    if kind in CONVERTIBLE_ROPE and not (_above(theta, 1) and _above(factor, 0)):
        reasons.append(f"rope_theta {theta!r}, factor {factor!r}: expected numbers above 1 and 0")
    if not _above(config.rms_norm_eps, 0):
        reasons.append(f"rms_norm_eps {config.rms_norm_eps!r}: expected a positive number")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        reasons.append(f"partial rotary embedding (factor {rope['partial_rotary_factor']})")
    if shape.head_dim % 2:
        reasons.append(f"odd head_dim {shape.head_dim}")
    return Verdict(None if reasons else FAMILIES[model_type], tuple(reasons))


def _above(value: Any, bound: float) -> bool:
    return isinstance(value, (int, float)) and value > bound


def require_family(name: str, config: Any, shape: ModelShape) -> Family:
    """The family of a convertible model.

    Raises:
        InputError: naming every feature that stands in the way.
    """
    verdict = judge(config, shape)
    if verdict.family is None:
        raise InputError(f"{name} cannot be converted: {'; '.join(verdict.reasons)}")
    return verdict.family
