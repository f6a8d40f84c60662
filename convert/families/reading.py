"""From a family's tensors to `AttentionWeights`, in which families no longer differ.

Shape legend
    D  hidden size    H  query heads    G  KV heads    d  head size    n  rotating pairs    X  D, or D + 1 with biases
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from latentfold.convert.attention.weights import AttentionWeights, HeadNorm
from latentfold.convert.errors import InputError
from latentfold.convert.families.family import Family, Rows, half_layout
from latentfold.convert.model.shape import LayerKind, ModelShape, norm_eps
from latentfold.convert.model.streamed import StreamedModel


def rows_of(read: Callable[[str], Tensor], prefix: str, family: Family, names: Collection[str]) -> Rows:
    """Projections of the attention module `prefix`, each with its bias as a last column where there is one.

    Args:
        read: gives tensors by name.  names: those that exist.
    """

    def rows(name: str) -> Tensor:
        weight = read(f"{prefix}{name}.weight")
        weight = weight.T if family.transposed else weight
        bias = f"{prefix}{name}.bias"
        return torch.cat([weight, read(bias)[:, None]], dim=1) if bias in names else weight

    return rows


def read_attention(
    read: Callable[[str], Tensor],
    prefix: str,
    names: Collection[str],
    family: Family,
    shape: ModelShape,
    config: Any,
    layer: int,
    rotation: tuple[Tensor, float],
) -> tuple[AttentionWeights, Tensor]:
    """One layer's attention in `read`'s dtype, and the inverse frequencies (d/2,) of its pairs, 0 for still ones.

    Args:
        read, prefix, names: see `rows_of`.
        config: the model's transformers config.
        rotation: the model's inverse frequencies and its factor on cos and sin.

    Raises:
        InputError: q/k-norm over heads of which only a part rotates, or without an epsilon.
    """
    hidden, size = shape.hidden_size, shape.head_dim
    rows = rows_of(read, prefix, family, names)
    projections = family.split(rows, shape)
    width = max(part.shape[1] for part in projections)
    q, k, v = (torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in projections)
    output = rows(family.output)
    o = output[:, : shape.num_heads * size].unflatten(1, (shape.num_heads, size)).transpose(0, 1).contiguous()
    o_bias = output[:, -1] if output.shape[1] > shape.num_heads * size else None

    frequencies, factor = rotation
    if not family.rotates(config, layer):
        frequencies, factor = frequencies[:0], 1.0
    turning = 2 * len(frequencies)
    order = half_layout(size, turning, interleaved=family.interleaved).to(q.device)
    q, k, v = (part.unflatten(0, (-1, size)) for part in (q, k, v))
    scale = family.scale(config, shape)
    norms: dict[str, HeadNorm] = {}
    if family.q_norm is not None and family.k_norm is not None:
        if turning not in (0, size) or not torch.equal(order.cpu(), torch.arange(size)):
            raise InputError(f"family {family.model_type!r}: q/k-norm over heads of which a part rotates")
        if (eps := norm_eps(config)) is None:
            raise InputError(
                f"family {family.model_type!r}: expected an epsilon of its norms in config.json, found none"
            )
        for key, name in (("q_norm", family.q_norm), ("k_norm", family.k_norm)):
            gain = read(f"{prefix}{name}.weight") + family.norm_offset
            gain = gain if len(gain) == size else gain.view(-1, size)
            norms[key] = HeadNorm(gain, eps)
        scale *= factor**2
    else:
        q, k = q[:, order], k[:, order]
        if factor != 1.0:
            q = q * torch.where(order < turning, factor**2, 1.0)[:, None]
        if width > hidden:  # a constant value is a constant output
            group = torch.arange(shape.num_heads, device=v.device) // (shape.num_heads // shape.num_kv_heads)
            constant = torch.einsum("hde,he->d", o, v[group, :, hidden])
            o_bias = constant if o_bias is None else o_bias + constant
            v = torch.cat([v[..., :hidden], torch.zeros_like(v[..., hidden:])], dim=-1)
    output_gain = None
    if family.output_norm is not None:
        layer_prefix = prefix.removesuffix(f"{family.attention}.")
        output_gain = read(f"{layer_prefix}{family.output_norm}.weight") + family.norm_offset
    weights = AttentionWeights(
        q=q,
        k=k,
        v=v,
        o=o,
        scale=scale,
        has_bias=width > hidden,
        o_bias=o_bias,
        softcap=family.softcap(config),
        window=shape.windows[layer] if shape.layers[layer].kind is LayerKind.SLIDING else None,
        output_gain=output_gain,
        **norms,
    )
    still = frequencies.new_zeros(size // 2 - len(frequencies))
    return weights, torch.cat([frequencies, still]).to(q.device)


def layer_attention(
    model: StreamedModel, family: Family, shape: ModelShape, index: int
) -> tuple[AttentionWeights, Tensor]:
    """One layer's attention in float32, and the inverse frequencies (n,) of its rotary pairs in float64."""

    def read(name: str) -> Tensor:
        return model.tensor(name).to(model.device, torch.float32)

    return read_attention(
        read,
        f"{model.layers_name}.{index}.{family.attention}.",
        model.stored,
        family,
        shape,
        model.config,
        index,
        model.rotation(index),
    )
