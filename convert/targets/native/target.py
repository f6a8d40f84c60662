"""Writing a checkpoint of our own class.

Shape legend
    D  hidden size    H  query heads    d  head size    r  kv_lora_rank    S  rotating keys    X, Z  see `factorize`
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from latentfold.convert.factorize import LatentAttention
from latentfold.convert.families.family import Family
from latentfold.convert.families.reading import rows_of
from latentfold.convert.layers import StreamedModel
from latentfold.convert.shapes import ModelShape
from latentfold.convert.source import Checkpoint
from latentfold.convert.targets.native import LatentfoldConfig
from latentfold.convert.targets.target import Copied, Unwritten

STEPS = (1.0, 5 / 6, 2 / 3, 1 / 2, 1 / 3, 1 / 6, 0.0, 1.15, 1.3)
"""How far apart candidate frequencies lie on the source's own scale: 0 its fastest ones, 1 evenly over all of it."""

ALL, NONE = "all", "none"
"""Kinds of layers where the family does not tell them apart, and of those that do not rotate."""


@dataclass(frozen=True)
class Frequencies:
    """A list of frequencies, stored as it is.

    Attributes:
        values: the list, fastest first, repeated ones included.
        label: what it is.
    """

    values: tuple[float, ...]
    label: str

    @property
    def frequencies(self) -> Tensor:
        """(S,) inverse frequencies in float64."""
        return torch.tensor(self.values, dtype=torch.float64)

    def __str__(self) -> str:
        return self.label


def candidates(source: Tensor, slots: int) -> tuple[Frequencies, ...]:
    """Lists of `slots` frequencies worth trying for a layer that rotates with `source` (n,), most literal first.

    With at least n slots every frequency of the source is there, as often as there are KV heads at full size. With
    fewer, they are read off the source's own log-frequencies (any scaling included) at even steps.
    """
    n = len(source)
    if slots >= n:
        copies, extra = divmod(slots, max(n, 1))
        values = torch.cat([f.repeat(copies + (i < extra)) for i, f in enumerate(source)]) if slots else source
        return (Frequencies(tuple(values.tolist()), "the source's own"),)
    place = torch.arange(n, dtype=torch.float64)
    found = []
    for share in STEPS:
        wanted = torch.arange(slots, dtype=torch.float64) * (1 + share * (n / slots - 1))
        left = wanted.floor().clamp(max=max(n - 2, 0)).long()
        right = (left + 1).clamp(max=n - 1)
        logs = source.log()
        values = (logs[left] + (wanted - place[left]) * (logs[right] - logs[left])).exp()
        exact = wanted == wanted.round()
        values[exact & (wanted < n)] = source[wanted[exact & (wanted < n)].long()]
        found.append(
            Frequencies(tuple(values.tolist()), f"{1 + share * (n / slots - 1):.3g} of the source's pairs apart")
        )
    return tuple(found)


@dataclass(frozen=True)
class NativeTarget:
    """A `latentfold.convert.targets.target.Target`: any family, loaded by the class that ships with it."""

    checkpoint: Checkpoint
    source: Any
    family: Family
    shape: ModelShape
    kv_rank: int
    rope_dim: int
    dtype: torch.dtype
    name = "native"
    residual = 1.0
    engine = "transformers"
    code = tuple(Path(__file__).with_name(name) for name in ("configuration_latentfold.py", "modeling_latentfold.py"))

    @cached_property
    def _model(self) -> StreamedModel:
        return StreamedModel(self.checkpoint, self.source, torch.float32, torch.device("cpu"))

    @cached_property
    def expected(self) -> dict[str, tuple[int, ...]]:
        return self._model.shapes

    @cached_property
    def tied(self) -> frozenset[str]:
        return frozenset(self._model.tied)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        apart = not hasattr(getattr(self._model.decoder, "rotary_emb", None), "inv_freq")
        return tuple(
            NONE if not len(self._rotation(layer)) else self.source.layer_types[layer] if apart else ALL
            for layer in range(self.shape.num_layers)
        )

    def _rotation(self, layer: int) -> Tensor:
        frequencies, _ = self._model.rotation(layer)
        return frequencies if self.family.rotates(self.source, layer) else frequencies[:0]

    @cached_property
    def ladders(self) -> dict[str, tuple[Frequencies, ...]]:
        found: dict[str, tuple[Frequencies, ...]] = {}
        for layer, kind in enumerate(self.kinds):
            if kind not in found:
                pairs = self._rotation(layer)
                found[kind] = candidates(pairs, min(self.rope_dim // 2, self.shape.num_kv_heads * len(pairs)))
        return found

    @cached_property
    def _converted(self) -> StreamedModel:
        data = self.config({kind: options[0] for kind, options in self.ladders.items()})
        return StreamedModel(Unwritten(), LatentfoldConfig(**data), torch.float32, torch.device("cpu"))

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        return self._converted.shapes

    def _prefix(self, layer: int) -> str:
        return f"{self._model.layers_name}.{layer}."

    def _copies(self, wanted: Callable[[str], bool]) -> dict[str, Copied]:
        return {
            name: Copied(source)
            for module, names in self._converted.stored.items()
            if wanted(module)
            for name, source in zip(names, self._model.stored[module], strict=True)
        }

    def outer(self) -> dict[str, Copied]:
        return self._copies(lambda name: not name.startswith(self._model.layers_name + "."))

    def copied(self, layer: int) -> dict[str, Copied]:
        prefix = self._prefix(layer)
        attention = f"{prefix}{self.family.attention}."
        return self._copies(
            lambda name: name.startswith(prefix) and not (name.startswith(attention) and self._is_new(name))
        )

    def _is_new(self, name: str) -> bool:
        """Whether a tensor of the attention module is made here: all of them, but for what stands before q/k-norms."""
        module = name.rpartition(".")[0].rpartition(".")[2]
        return not self._has_norm or module in ("q_rope_proj", "kv_a_proj", "kv_b_proj", "o_proj")

    @property
    def _has_norm(self) -> bool:
        return self.family.q_norm is not None

    def attention(
        self, layer: int, converted: LatentAttention, ladder: Any, checkpoint: Checkpoint
    ) -> dict[str, Tensor]:
        heads, hidden, size = converted.o.shape
        queries = torch.cat([converted.q_rope.real, converted.q_rope.imag], dim=1)  # (H, 2S, X)
        key = converted.rope_key
        rows = {"kv_a_proj": torch.cat([converted.latent, key.real, key.imag])}  # (r + 2S, Z)
        tensors = {
            "kv_b_proj.weight": torch.cat([converted.k_up, converted.v_up], dim=1).flatten(0, 1),
            "o_proj.weight": converted.o.transpose(0, 1).reshape(hidden, heads * size),
        }
        if self._has_norm:
            tensors["q_rope_proj.weight"] = queries.flatten(0, 1)
            tensors["kv_a_proj.weight"] = rows["kv_a_proj"]
        else:
            rows["q_proj"] = torch.cat([converted.q_nope, queries], dim=1).flatten(0, 1)
            for name, matrix in rows.items():
                tensors[f"{name}.weight"] = matrix[:, :hidden]
                if converted.source.has_bias:
                    tensors[f"{name}.bias"] = matrix[:, hidden]
        if converted.source.o_bias is not None:
            tensors["o_proj.bias"] = converted.source.o_bias
        prefix = f"{self._prefix(layer)}{self.family.attention}."
        return {prefix + name: tensor for name, tensor in tensors.items()}

    def config(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        prefix = f"{self._prefix(0)}{self.family.attention}."
        q, k, v = self.family.split(rows_of(self._meta, prefix, self.family, self._model.stored), self.shape)
        biased = [rows.shape[1] > self.shape.hidden_size for rows in (q, k, v)]
        text = json.loads(self.source.to_json_string(use_diff=False))
        dtype = str(self.dtype).removeprefix("torch.")
        return {
            "architectures": ["LatentfoldForCausalLM"],
            "model_type": LatentfoldConfig.model_type,
            "auto_map": {
                "AutoConfig": "configuration_latentfold.LatentfoldConfig",
                "AutoModelForCausalLM": "modeling_latentfold.LatentfoldForCausalLM",
            },
            "dtype": dtype,
            "attention": self.family.attention,
            "num_heads": self.shape.num_heads,
            "num_kv_heads": self.shape.num_kv_heads,
            "head_dim": self.shape.head_dim,
            "kv_lora_rank": self.kv_rank,
            "frequencies": {kind: ladder.frequencies.tolist() for kind, ladder in chosen.items()},
            "layer_kinds": list(self.kinds),
            "scaling": self._scaling,
            "softcap": self.family.softcap(self.source),
            "qk_norm": self._has_norm,
            "qkv_bias": not self._has_norm and any(biased),
            "o_bias": f"{prefix}{self.family.output}.bias" in self._model.stored or (biased[2] and not self._has_norm),
            "text_config": text | {"dtype": dtype},
        }

    @property
    def _scaling(self) -> float:
        """Of the scores; without q/k-norm the factor on cos and sin is part of the queries."""
        _, factor = self._model.rotation(0)
        return self.family.scale(self.source, self.shape) * (factor**2 if self._has_norm else 1.0)

    def _meta(self, name: str) -> Tensor:
        return torch.empty(self.expected[self._model.stored[name][0]], device="meta")

    def rope_parameters(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        return {"rope_type": "stored"} | {kind: str(ladder) for kind, ladder in chosen.items()}
