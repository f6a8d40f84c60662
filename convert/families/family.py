"""The record every family is written as."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from latentfold.convert.model.shape import ModelShape

Rows = Callable[[str], Tensor]
"""Gives a projection of the attention module by name, as (out, D) or with its bias (out, D + 1)."""

Split = Callable[[Rows, ModelShape], tuple[Tensor, Tensor, Tensor]]
"""Reads queries (H * d, X), keys and values (G * d, X) from wherever a family keeps them."""


def separate(rows: Rows, shape: ModelShape) -> tuple[Tensor, Tensor, Tensor]:
    """One projection each."""
    return rows("q_proj"), rows("k_proj"), rows("v_proj")


def stacked(name: str) -> Split:
    """One projection: all queries, then all keys, then all values."""

    def split(rows: Rows, shape: ModelShape) -> tuple[Tensor, Tensor, Tensor]:
        keys = shape.num_kv_heads * shape.head_dim
        q, k, v = rows(name).split([shape.num_heads * shape.head_dim, keys, keys])
        return q, k, v

    return split


def by_head(name: str) -> Split:
    """One projection: each head's query, key and value together."""

    def split(rows: Rows, shape: ModelShape) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = rows(name).unflatten(0, (shape.num_heads, 3, shape.head_dim)).unbind(1)
        return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)

    return split


@dataclass(frozen=True)
class Family:
    """What a family's attention is, in terms that calibration, factorization and targets share.

    Everything else of the model stays what transformers makes of it. Callables take the model's transformers config.

    Attributes:
        model_type: as in config.json.
        attention: name of the attention module within a decoder layer.
        split: where queries, keys and values are.
        output: the output projection.
        transposed: projections are stored (in, out).
        q_norm, k_norm: RMSNorms of queries and keys before rotation: over a head where the weight is as long as a
            head, over all of them together where it is as long as all.
        output_norm: RMSNorm in the decoder layer that attention's output goes through before it is added.
        norm_offset: what is added to a stored norm weight.
        scale: of the scores.  softcap: of the scores, or None.
        rotates: whether a layer has RoPE.
        interleaved: rotary pairs are neighbours, not half a head apart.
        unsupported: settings under which a model of the family computes something that is not described here.
        biased: whether the attention's projections have biases.
        portable: outside attention it computes what Llama does from tensors named as Llama's, so that the portable
            target holds some models of the family.
        why_not_portable: a few words where it does not.
        gate_up: the MLP's gate and up projections in one, gate first, where they are.
        ignored: endings of names that old checkpoints carry and nothing reads.
    """

    model_type: str
    attention: str = "self_attn"
    split: Split = separate
    output: str = "o_proj"
    transposed: bool = False
    q_norm: str | None = None
    k_norm: str | None = None
    output_norm: str | None = None
    norm_offset: float = 0.0
    scale: Callable[[Any, ModelShape], float] = lambda config, shape: shape.head_dim**-0.5
    softcap: Callable[[Any], float | None] = lambda config: None
    rotates: Callable[[Any, int], bool] = lambda config, layer: True
    interleaved: bool = False
    unsupported: tuple[str, ...] = ()
    biased: Callable[[Any], bool] = lambda config: bool(getattr(config, "attention_bias", False))
    portable: bool = False
    why_not_portable: str = ""
    gate_up: str | None = None
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)


def half_layout(head_dim: int, rotary_dim: int, *, interleaved: bool = False) -> Tensor:
    """(d,) where each dimension of a head comes from in rotate-half layout over the *whole* head.

    A head of which only the first `rotary_dim` rotate becomes rotating pairs followed by still ones.
    """
    rotating, still = torch.arange(rotary_dim), torch.arange(rotary_dim, head_dim)
    re, im = (rotating[::2], rotating[1::2]) if interleaved else rotating.chunk(2)
    first, second = still.chunk(2) if len(still) else (still, still)
    return torch.cat([re, first, im, second])
