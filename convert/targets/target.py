"""What the conversion asks of the format it writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from latentfold.convert.attention.latent import LatentAttention
from latentfold.convert.calibrate.statistics import RopeStatistics
from latentfold.convert.families.family import Family
from latentfold.convert.model.shape import ModelShape
from latentfold.convert.model.streamed import StreamedModel
from latentfold.convert.source.checkpoint import Checkpoint


class Ladder(Protocol):
    """Frequencies that the rotating keys of a layer may have; `str` names them."""

    @property
    def frequencies(self) -> Tensor:
        """(S,) inverse frequencies in float64."""

    @property
    def data(self) -> Any:
        """What `Target.ladder` makes it from again; survives JSON."""


class Copied(NamedTuple):
    """A tensor that goes over as it is.

    Attributes:
        source: its name in the source.
        to_residual: whether it writes to the residual stream.
        part: (k, n): the k-th of n equal parts of its rows.
    """

    source: str
    to_residual: bool = False
    part: tuple[int, int] = (0, 1)


class Target(Protocol):
    """A format for one conversion: its sizes are fixed, its frequencies are to be chosen.

    Attributes:
        name: as `--target` has it.
        model_type: in the result's config.json.
        expected: name and shape of every tensor the source must hold.
        tied: names the source may hold besides, as a second copy of another tensor.
        tensors: name and shape of every tensor of the result, in the order in which they are written.
        kinds: the kind of each layer; layers of one kind have one ladder.
        rope_dims: rotated values cached per token by each layer.
        residual: factor on the residual stream.
        engine: what loads the result: "any", or "transformers" alone.
        code: files that go into the checkpoint as they are.
    """

    name: str
    model_type: str
    shape: ModelShape
    dtype: torch.dtype
    expected: Mapping[str, tuple[int, ...]]
    tied: frozenset[str]
    tensors: Mapping[str, tuple[int, ...]]
    kinds: tuple[str, ...]
    rope_dims: tuple[int, ...]
    residual: float
    engine: str
    code: tuple[Path, ...]

    def candidates(self, layer: int, stats: RopeStatistics, pairs: Tensor) -> Sequence[Ladder]:
        """Ladders worth trying for a layer, most promising first; for layers of one kind always the same ones.

        Args:
            pairs: (n,) inverse frequencies of its rotary pairs.
        """

    def ladder(self, kind: str, data: Any) -> Ladder:
        """A ladder of a kind of layers from its `data`."""

    def outer(self) -> dict[str, Copied]:
        """Tensors outside the layers, by their name in the result."""

    def copied(self, layer: int) -> dict[str, Copied]:
        """A layer's tensors that are not attention, by their name in the result."""

    def attention(
        self, layer: int, converted: LatentAttention, ladder: Ladder, checkpoint: Checkpoint
    ) -> dict[str, Tensor]:
        """A factorized layer's tensors by their name in the result."""

    def config(self, chosen: Mapping[str, Ladder]) -> dict[str, Any]:
        """config.json, with the ladder chosen for each kind of layer."""

    def rope_parameters(self, chosen: Mapping[str, Ladder]) -> dict[str, Any]:
        """What the record says of the choice."""


@dataclass(frozen=True)
class OneConversion:
    """What a target knows of the conversion it is for.

    Attributes:
        checkpoint, source, family, shape: the model, `source` its transformers config.
        kv_rank, rope_dim: sizes of the result.
        dtype: stored dtype.
        model: the source as transformers builds it.
    """

    checkpoint: Checkpoint
    source: Any
    family: Family
    shape: ModelShape
    kv_rank: int
    rope_dim: int
    dtype: torch.dtype

    @cached_property
    def model(self) -> StreamedModel:
        return StreamedModel(self.checkpoint, self.source, torch.float32, torch.device("cpu"))

    @property
    def expected(self) -> dict[str, tuple[int, ...]]:
        return self.model.shapes

    @property
    def tied(self) -> frozenset[str]:
        return frozenset(self.model.tied)


class Unwritten:
    """Stands for the checkpoint of a model that is not there yet: it has no tensors."""

    headers: ClassVar[dict[str, Any]] = {}

    def tensor(self, name: str) -> Tensor:
        raise KeyError(name)
