"""A factorized layer as the stock class's tensors.

Shape legend
    D  hidden size    H  query heads    d  head size    S  rotating keys    r  kv_lora_rank
    X  what queries and keys are maps of: D, or D + 1 with biases
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from latentfold.convert.attention.latent import LatentAttention
from latentfold.convert.targets.deepseek.ladders import Ladder
from latentfold.convert.targets.deepseek.norm import largest_energy, neutral_norm


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
