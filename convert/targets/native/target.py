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
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from latentfold.convert.attention.latent import LatentAttention
from latentfold.convert.attention.sizes import LayerSize
from latentfold.convert.calibrate.statistics import RopeStatistics
from latentfold.convert.dtypes import dtype_name
from latentfold.convert.factorize.rope import choose_pairs
from latentfold.convert.families.reading import rows_of
from latentfold.convert.model.shape import first_context
from latentfold.convert.model.streamed import StreamedModel
from latentfold.convert.source.checkpoint import Checkpoint
from latentfold.convert.targets.native.configuration_latentfold import LatentfoldConfig
from latentfold.convert.targets.target import Conversion, Copied, Unwritten


@dataclass(frozen=True)
class OwnFrequencies:
    """Frequencies that the layer has anyway.

    Attributes:
        source: (n,) all of them.
        pairs: which, fastest first, repeated ones included.
    """

    source: Tensor
    pairs: tuple[int, ...]

    @property
    def frequencies(self) -> Tensor:
        """(S,) inverse frequencies in float64."""
        return self.source[list(self.pairs)]

    @property
    def data(self) -> list[int]:
        """Which."""
        return list(self.pairs)

    def __str__(self) -> str:
        return f"its own, pairs {', '.join(map(str, self.pairs))}"


@dataclass(frozen=True)
class NativeTarget(Conversion):
    """Any family, loaded by the class that ships with it; layers may differ, or stay as they are."""

    name: ClassVar[str] = "native"
    model_type: ClassVar[str] = LatentfoldConfig.model_type
    code: ClassVar[tuple[Path, ...]] = tuple(
        Path(__file__).with_name(name) for name in ("configuration_latentfold.py", "modeling_latentfold.py")
    )

    @property
    def engine(self) -> str:
        return "transformers"

    @cached_property
    def sizes(self) -> tuple[LayerSize | None, ...]:
        """As wanted, but no more rotating keys than a layer has pairs."""
        heads = self.shape.num_kv_heads

        def fitted(layer: int, size: LayerSize) -> LayerSize:
            return LayerSize(size.kv_rank, 2 * min(size.rope_dim // 2, heads * len(self._rotation(layer))))

        return tuple(size and fitted(layer, size) for layer, size in enumerate(self.wanted))

    def kind(self, layer: int) -> str:
        return str(layer)

    def _rotation(self, layer: int) -> Tensor:
        frequencies, _ = self.model.rotation(layer)
        return frequencies if self.family.rotates(self.source, layer) else frequencies[:0]

    @cached_property
    def _beyond(self) -> Tensor | None:
        """(n,) what the frequencies become beyond the first training's context, where they do (longrope)."""
        if (first := first_context(self.source)) is None:
            return None
        found, _ = ROPE_INIT_FUNCTIONS["longrope"](self.source, torch.device("cpu"), seq_len=first + 1)
        return found.to(torch.float64)

    def _literal(self, layer: int) -> OwnFrequencies:
        """Every frequency equally often, or every so many-th: all that is possible at full size."""
        size = self.sizes[layer]
        assert size is not None
        source, slots = self._rotation(layer), size.rope_dim // 2
        return OwnFrequencies(source, tuple(s * len(source) // slots for s in range(slots)))

    def candidates(self, layer: int, stats: RopeStatistics, pairs: Tensor) -> list[OwnFrequencies]:
        literal = self._literal(layer)
        if len(literal.pairs) in (0, self.shape.num_kv_heads * len(literal.source)):
            return [literal]
        chosen = choose_pairs(stats, pairs, len(literal.pairs))
        return [OwnFrequencies(literal.source, tuple(chosen.tolist())), literal]

    def ladder(self, kind: str, data: list[int]) -> OwnFrequencies:
        return OwnFrequencies(self._rotation(int(kind)), tuple(data))

    @cached_property
    def _converted(self) -> StreamedModel:
        data = self.config({self.kind(layer): self._literal(layer) for layer in self.converted})
        return StreamedModel(Unwritten(), LatentfoldConfig(**data), torch.float32, torch.device("cpu"))

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        return self._converted.shapes

    def _prefix(self, layer: int) -> str:
        return f"{self.model.layers_name}.{layer}."

    def _copies(self, wanted: Callable[[str], bool]) -> dict[str, Copied]:
        return {
            name: Copied(source)
            for module, names in self._converted.stored.items()
            if wanted(module)
            for name, source in zip(names, self.model.stored[module], strict=True)
        }

    def outer(self) -> dict[str, Copied]:
        return self._copies(lambda name: not name.startswith(self.model.layers_name + "."))

    def copied(self, layer: int) -> dict[str, Copied]:
        prefix = self._prefix(layer)
        attention = f"{prefix}{self.family.attention}."
        return self._copies(
            lambda name: (
                name.startswith(prefix)
                and not (layer in self.converted and name.startswith(attention) and self._is_new(name))
            )
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

    def config(self, chosen: Mapping[str, OwnFrequencies]) -> dict[str, Any]:
        prefix = f"{self._prefix(0)}{self.family.attention}."
        q, k, v = self.family.split(rows_of(self._meta, prefix, self.family, self.model.stored), self.shape)
        biased = [rows.shape[1] > self.shape.hidden_size for rows in (q, k, v)]
        ladders = [chosen[self.kind(layer)] if size else None for layer, size in enumerate(self.sizes)]
        ranks = [size and size.kv_rank for size in self.sizes]
        beyond = self._beyond
        text = json.loads(self.source.to_json_string(use_diff=False))
        dtype = dtype_name(self.dtype)
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
            "kv_lora_rank": ranks[0] if len(set(ranks)) == 1 else ranks,
            "frequencies": [ladder and ladder.frequencies.tolist() for ladder in ladders],
            "frequencies_beyond": None
            if beyond is None
            else [ladder and beyond[ladder.data].tolist() for ladder in ladders],
            "first_context": first_context(self.source),
            "scaling": [self._scaling(layer) for layer in range(self.shape.num_layers)],
            "softcap": self.family.softcap(self.source),
            "qk_norm": self._has_norm,
            "qkv_bias": not self._has_norm and any(biased),
            "o_bias": f"{prefix}{self.family.output}.bias" in self.model.stored or (biased[2] and not self._has_norm),
            "text_config": text | {"dtype": dtype},
        }

    def _scaling(self, layer: int) -> float:
        """Of the scores; without q/k-norm the factor on cos and sin is part of the queries."""
        _, factor = self.model.rotation(layer)
        turned = self._has_norm and self.family.rotates(self.source, layer)
        return self.family.scale(self.source, self.shape) * (factor**2 if turned else 1.0)

    def _meta(self, name: str) -> Tensor:
        return torch.empty(self.expected[self.model.stored[name][0]], device="meta")

    def rope_parameters(self, chosen: Mapping[str, OwnFrequencies]) -> dict[str, Any]:
        return {"rope_type": "frequencies of the source, chosen for each layer"}
