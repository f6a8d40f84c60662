"""A layer factorized to MLA, and what it computes.

Shape legend
    T  tokens    M  query positions    D  hidden size    H  query heads    d  head size    S  rotating keys
    r  kv_lora_rank    X  what the projections read: x (D), or [x; 1] where they have biases (D + 1)
    Z  what the latent's map reads: X, or keys and values where a norm stands between x and the keys (2 G d)

With the latent c = A z, rotating keys u_s and frequencies v_s, at distance t

    score_h = scale * (q_h . B^K_h c + sum_s Re(q^rope_h,s conj(u_s) e^{i v_s t})),    value_h = B^V_h c
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from latentfold.convert.attention.weights import AttentionWeights


@dataclass(frozen=True)
class LatentAttention:
    """A layer factorized to MLA, in float64, in no target's particular layout.

    Attributes:
        latent: (r, Z) rows of the down projection.
        rope_key: (S, Z) complex rows of the shared rotating key.
        q_nope: (H, d, X).  q_rope: (H, S, X) complex. With q/k-norm maps of each head's normed query: X = d.
        k_up: (H, d, r).  v_up: (H, d, r).
        o: (H, D, d).
        scale: softmax scale that the target has to apply.
        source: the layer it was made from, for what stays as it was.
        predicted_error: relative squared error of the attention output expected from the statistics, split into
            `rope`, `key` and `value`; `factorize.output.refit_output` adds `output`, found on samples left out.
    """

    latent: Tensor
    rope_key: Tensor
    q_nope: Tensor
    q_rope: Tensor
    k_up: Tensor
    v_up: Tensor
    o: Tensor
    scale: float
    source: AttentionWeights
    predicted_error: dict[str, float]


@torch.no_grad()
def head_outputs(layer: LatentAttention, frequencies: Tensor, x: Tensor, positions: Tensor | None = None) -> Tensor:
    """What each head of the factorized layer delivers to W_O, computed in the dtype of x.

    Args:
        frequencies: (S,) of the slots.  x: (T, D).  positions: (M,) queries to compute; None: all.

    Returns:
        (M, H, d).
    """
    dtype, rotating = x.dtype, torch.promote_types(x.dtype, torch.complex64)
    source = layer.source.to(dtype) if layer.source.has_norm else layer.source  # else its weights are not read
    inputs = source.latent_inputs(x)  # (T, Z)
    latent = inputs @ layer.latent.to(dtype).T  # (T, r)
    tokens = torch.arange(len(x), device=x.device)
    phase = tokens.to(torch.float64)[:, None] * frequencies.to(x.device, torch.float64)
    turns = torch.polar(torch.ones_like(phase), phase).to(rotating)  # (T, S)
    z = (inputs.to(rotating) @ layer.rope_key.to(rotating).T) * turns
    where = slice(None) if positions is None else positions
    queries = source.queries(x[where]) if source.has_norm else source.inputs(x[where])[None]  # (H or 1, M, X)
    q_rope = queries.to(rotating) @ layer.q_rope.to(rotating).mT * turns[where]
    q_nope = queries @ layer.q_nope.to(dtype).mT
    k_nope = torch.einsum("her,tr->hte", layer.k_up.to(dtype), latent)
    k_rope = torch.cat([z.real, z.imag], dim=-1).expand(len(k_nope), -1, -1)
    values = torch.einsum("her,tr->hte", layer.v_up.to(dtype), latent)
    query = torch.cat([q_nope, q_rope.real, q_rope.imag], dim=-1)
    key = torch.cat([k_nope, k_rope], dim=-1)
    size = values.shape[-1]
    causal = positions is None and source.window is None and source.softcap is None
    visible = None if causal else source.visible(tokens[where], tokens)
    if source.softcap is not None:
        assert visible is not None
        heads = [
            source.capped(layer.scale * q @ k.T).masked_fill(~visible, -torch.inf).softmax(-1) @ v
            for q, k, v in zip(query, key, values, strict=True)
        ]
        return torch.stack(heads, dim=1)
    # torch's fused CPU kernel wants heads of one size and four dimensions
    padded = nn.functional.pad(values, (0, key.shape[-1] - size))
    out = nn.functional.scaled_dot_product_attention(
        query[None],
        key[None],
        padded[None],
        attn_mask=visible,
        is_causal=causal,
        scale=layer.scale,
    )
    return out[0, :, :, :size].transpose(0, 1)


def latent_attention(layer: LatentAttention, frequencies: Tensor, x: Tensor) -> Tensor:
    """The factorized layer's attention output in float64: x (T, D) -> (T, D)."""
    heads = head_outputs(layer, frequencies, x.to(torch.float64))
    out = torch.einsum("hde,the->td", layer.o, heads)
    return out if layer.source.o_bias is None else out + layer.source.o_bias
