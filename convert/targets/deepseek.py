"""The portable target: a dense `DeepseekV3ForCausalLM`, which stock engines load as MLA without remote code.

Shape legend
    D  hidden size    H  query heads    d  head size = qk_nope_head_dim = v_head_dim
    r  kv_lora_rank   S  rope slots, 2S = qk_rope_head_dim

Its conditions, each of which some engine breaks on in silence: no biases, interleaved rope, an explicit lm_head, all
layers dense, rope parameters in the old and the new spelling, rms_norm_eps equal to the 1e-6 that transformers and MLX
hard-code for the latent norm, yarn only with mscale == mscale_all_dim.

Biases are possible where transformers alone has to load it. Its class puts `attention_bias` on q_a_proj,
kv_a_proj_with_mqa and o_proj: what rotates gets its bias from the second, the values' is a constant output, and for the
queries q_a_proj is the identity with a constant beside it (q_lora_rank = D + 1), from which q_b_proj reads their bias.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

from latentfold.convert.factorize import LatentAttention
from latentfold.convert.layers import StreamedModel
from latentfold.convert.rope import RopeStatistics
from latentfold.convert.source import Checkpoint
from latentfold.convert.targets.target import Copied, OneConversion, Unwritten

LATENT_EPS = 1e-6
"""Epsilon of the latent norms; the model's own norms must have the same one (docs/portable.md)."""

LATENT_ENERGY = 1e-8
"""Largest mean square of the scaled latent relative to the epsilon: the norm is the identity to half of this."""

KIND = "all"
"""The class has one ladder: its layers are all of a kind."""

MODEL_TYPE = "deepseek_v3"
ARCHITECTURE = "DeepseekV3ForCausalLM"


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


def residual_scale(eps: float, dtype: torch.dtype) -> float:
    """The factor a on the residual stream after which `rms_norm_eps` can be 1e-6.

    RMSNorm(a x) with eps a^2 equals RMSNorm(x) with eps, so a = sqrt(1e-6 / eps) is exact in float32. In bfloat16
    that would round every weight again; the power of two nearest to it changes no mantissa, and the epsilon by at most
    a factor of two, which is far below what a residual stream feels.
    """
    exact = math.sqrt(LATENT_EPS / eps)
    if math.isclose(exact, 1.0, rel_tol=1e-4):
        return 1.0
    return exact if dtype in (torch.float32, torch.float64) else 2.0 ** round(math.log2(exact))


def largest_energy(rows: Tensor, gain: Tensor) -> float:
    """Largest mean square of c = rows x, over *all* tokens, not sampled ones.

    x is an RMS-normed vector times `gain`, so |c| is at most sqrt(D) |rows diag(gain)|_2.

    Args:
        rows: (r, D).  gain: (D,) weight of the layer's input norm.
    """
    rank, hidden = rows.shape
    return float(torch.linalg.matrix_norm(rows * gain, 2)) ** 2 * hidden / rank


def neutral_norm(energy: float, dtype: torch.dtype) -> tuple[float, float, float]:
    """Make a mandatory norm do nothing to vectors c of a mean square of at most `energy`.

    RMSNorm(s c) w = c (s w / sqrt(eps)) (1 - mean((s c)^2) / (2 eps) + ..), so a tiny s and w = sqrt(eps)/s give c.

    Returns:
        s (a power of two), w as stored in `dtype`, and the factor on what reads c that takes up the rounding of w.
    """
    s = 2.0 ** math.floor(0.5 * math.log2(LATENT_ENERGY * LATENT_EPS / max(energy, 1e-12)))
    exact = math.sqrt(LATENT_EPS) / s
    stored = float(torch.tensor(exact).to(dtype))
    return s, stored, exact / stored


def attention_tensors(
    layer: LatentAttention, ladder: Ladder, gain: Tensor, residual: float, dtype: torch.dtype
) -> dict[str, Tensor]:
    """A factorized layer in the stock class's layout, names relative to `self_attn.`; with biases where it has some.

    Args:
        layer: the factorization.  ladder: for its softmax factor.  gain: (D,) weight of the layer's input norm.
        residual: factor on the residual stream.  dtype: what it will be stored in.
    """
    heads, head_dim, _ = layer.q_nope.shape
    hidden, slots, rank = len(gain), len(layer.rope_key), len(layer.latent)
    s, weight, correction = neutral_norm(largest_energy(layer.latent[:, :hidden], gain), dtype)
    # the stock softmax scale is (nope + rope)^-1/2 times the yarn factor: fold the layer's own into q
    fold = layer.scale * math.sqrt(head_dim + 2 * slots) / ladder.softmax_factor
    queries = torch.cat([layer.q_nope, _interleaved(layer.q_rope)], dim=1) * fold
    keys = torch.cat([layer.latent * s, _interleaved(layer.rope_key)])
    readers = torch.cat([layer.k_up, layer.v_up], dim=1) * correction
    queries = queries.flatten(0, 1)  # (H (d + 2S), X)
    tensors = {
        "kv_a_proj_with_mqa.weight": keys[:, :hidden],
        "kv_a_layernorm.weight": torch.full((rank,), weight, dtype=torch.float64),
        "kv_b_proj.weight": readers.reshape(heads * 2 * head_dim, rank),
        "o_proj.weight": residual * layer.o.transpose(0, 1).reshape(hidden, heads * head_dim),
    }
    if not layer.source.has_bias:
        return tensors | {"q_proj.weight": queries}
    constant = layer.source.o_bias if layer.source.o_bias is not None else keys.new_zeros(hidden)
    energy = (float(gain.abs().max()) ** 2 * hidden + 1) / (hidden + 1)
    s, weight, correction = neutral_norm(energy, dtype)
    identity = s * torch.eye(hidden + 1, dtype=torch.float64, device=keys.device)
    return tensors | {
        "q_a_proj.weight": identity[:, :hidden],
        "q_a_proj.bias": identity[:, hidden],
        "q_a_layernorm.weight": torch.full((hidden + 1,), weight, dtype=torch.float64),
        "q_b_proj.weight": queries * correction,
        "kv_a_proj_with_mqa.bias": keys[:, hidden],
        "o_proj.bias": residual * constant,
    }


def _interleaved(rows: Tensor) -> Tensor:
    """Complex rows (.., S, D) -> real rows (.., 2S, D) in the order re_0, im_0, re_1, im_1, .."""
    return torch.stack([rows.real, rows.imag], dim=-2).flatten(-3, -2)


def target_config(
    source: Any, ladder: Ladder, head_dim: int, rank: int, dtype: torch.dtype, biased: bool
) -> dict[str, Any]:
    """config.json of the converted model; `source` is the source's transformers config."""
    rope = {k: v for k, v in ladder.parameters.items() if k not in ("rope_type", "rope_theta")}
    scaling = {"type": "yarn", "rope_type": "yarn", **rope} if rope else None
    heads = source.num_attention_heads
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "dtype": str(dtype).removeprefix("torch."),
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": source.vocab_size,
        "hidden_size": source.hidden_size,
        "intermediate_size": source.intermediate_size,
        "num_hidden_layers": source.num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "hidden_act": "silu",
        "max_position_embeddings": source.max_position_embeddings,
        "initializer_range": source.initializer_range,
        "rms_norm_eps": LATENT_EPS,
        "use_cache": True,
        "tie_word_embeddings": False,
        "attention_bias": biased,
        "attention_dropout": 0.0,
        "bos_token_id": source.bos_token_id,
        "eos_token_id": source.eos_token_id,
        "pad_token_id": source.pad_token_id,
        "q_lora_rank": source.hidden_size + 1 if biased else None,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": head_dim,
        "qk_rope_head_dim": ladder.rope_dim,
        "v_head_dim": head_dim,
        # both spellings: transformers >= 5 reads the first, vLLM, SGLang, llama.cpp and MLX the others
        "rope_parameters": dict(ladder.parameters),
        "rope_theta": ladder.parameters["rope_theta"],
        "rope_scaling": scaling,
        "rope_interleave": True,
        # every layer is dense; the expert sizes are required by some loaders and used by none
        "first_k_dense_replace": source.num_hidden_layers,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "routed_scaling_factor": 1.0,
        "moe_intermediate_size": source.intermediate_size,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


@dataclass(frozen=True)
class PortableTarget(OneConversion):
    """A `latentfold.convert.targets.target.Target`: models that outside attention are what Llama is."""

    name: ClassVar[str] = "deepseek"
    code: ClassVar[tuple[Path, ...]] = ()

    @property
    def _biased(self) -> bool:
        return self.family.biased(self.source)

    @property
    def engine(self) -> str:
        return "transformers" if self._biased else "any"

    @cached_property
    def residual(self) -> float:
        return residual_scale(self.source.rms_norm_eps, self.dtype)

    @property
    def kinds(self) -> tuple[str, ...]:
        return (KIND,) * self.shape.num_layers

    @property
    def rope_dims(self) -> tuple[int, ...]:
        return (self.rope_dim,) * self.shape.num_layers

    @cached_property
    def ladders(self) -> list[Ladder]:
        """All that `candidates` ever gives."""
        source = self.source
        return ladders(source.rope_parameters, self.shape.head_dim, self.rope_dim, source.max_position_embeddings)

    def candidates(self, layer: int, stats: RopeStatistics, pairs: Tensor) -> list[Ladder]:
        return self.ladders

    def ladder(self, kind: str, data: dict[str, Any]) -> Ladder:
        return Ladder(data, self.rope_dim)

    @cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        config = DeepseekV3Config(**self.config({KIND: self.ladders[0]}))
        return StreamedModel(Unwritten(), config, torch.float32, torch.device("cpu")).shapes

    def outer(self) -> dict[str, Copied]:
        names = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
        embedding = names[0]
        return {name: Copied(self.model.tied.get(name, name), to_residual=name == embedding) for name in names}

    def copied(self, layer: int) -> dict[str, Copied]:
        prefix = f"model.layers.{layer}."
        gate_up = self.family.gate_up
        return {
            prefix + "input_layernorm.weight": Copied(prefix + "input_layernorm.weight"),
            prefix + "post_attention_layernorm.weight": Copied(prefix + "post_attention_layernorm.weight"),
            prefix + "mlp.down_proj.weight": Copied(prefix + "mlp.down_proj.weight", to_residual=True),
        } | {
            f"{prefix}mlp.{name}.weight": Copied(f"{prefix}{gate_up}.weight", part=(k, 2))
            if gate_up
            else Copied(f"{prefix}mlp.{name}.weight")
            for k, name in enumerate(("gate_proj", "up_proj"))
        }

    def attention(
        self, layer: int, converted: LatentAttention, ladder: Ladder, checkpoint: Checkpoint
    ) -> dict[str, Tensor]:
        gain = checkpoint.tensor(f"model.layers.{layer}.input_layernorm.weight").to(converted.latent)
        tensors = attention_tensors(converted, ladder, gain, self.residual, self.dtype)
        return {f"model.layers.{layer}.self_attn.{name}": tensor for name, tensor in tensors.items()}

    def config(self, chosen: Mapping[str, Ladder]) -> dict[str, Any]:
        return target_config(self.source, chosen[KIND], self.shape.head_dim, self.kv_rank, self.dtype, self._biased)

    def rope_parameters(self, chosen: Mapping[str, Ladder]) -> dict[str, Any]:
        return chosen[KIND].parameters
