"""What the conversion asks of the format it writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from latentfold.convert.attention.latent import LatentAttention
from latentfold.convert.attention.sizes import LayerSize
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
        """What `Conversion.ladder` makes it from again; survives JSON."""


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


@dataclass(frozen=True)
class Conversion(ABC):
    """One conversion in a target's format: its sizes are fixed, its frequencies are to be chosen.

    Attributes:
        name: of the target, as the option has it.
        model_type: in the result's config.json.
        code: files that go into the checkpoint as they are.
        checkpoint, source, family, shape: the model, `source` its transformers config.
        wanted: sizes of the result, as asked for.
        dtype: stored dtype.
    """

    name: ClassVar[str]
    model_type: ClassVar[str]
    code: ClassVar[tuple[Path, ...]] = ()

    checkpoint: Checkpoint
    source: Any
    family: Family
    shape: ModelShape
    wanted: tuple[LayerSize | None, ...]
    dtype: torch.dtype

    @property
    def residual(self) -> float:
        """Factor on the residual stream."""
        return 1.0

    @property
    @abstractmethod
    def engine(self) -> str:
        """What loads the result: "any", or "transformers" alone."""

    @property
    def sizes(self) -> tuple[LayerSize | None, ...]:
        """Sizes of the result, None for a layer that is left as it is."""
        return self.wanted

    @property
    def converted(self) -> tuple[int, ...]:
        """Layers that are converted."""
        return tuple(layer for layer, size in enumerate(self.sizes) if size is not None)

    @cached_property
    def model(self) -> StreamedModel:
        """The source as transformers builds it."""
        return StreamedModel(self.checkpoint, self.source, torch.float32, torch.device("cpu"))

    @property
    def expected(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of every tensor the source must hold."""
        return self.model.shapes

    @property
    def tied(self) -> frozenset[str]:
        """Names of tensors that in the source are another one."""
        return frozenset(self.model.tied)

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of every tensor of the result, in the order in which they are written."""

    @abstractmethod
    def kind(self, layer: int) -> str:
        """The kind of a converted layer; layers of one kind have one ladder."""

    @abstractmethod
    def candidates(self, layer: int, stats: RopeStatistics, pairs: Tensor) -> Sequence[Ladder]:
        """Ladders worth trying for a layer, most promising first; for layers of one kind always the same ones.

        Args:
            pairs: (n,) inverse frequencies of its rotary pairs.
        """

    @abstractmethod
    def ladder(self, kind: str, data: Any) -> Ladder:
        """A ladder of a kind of layers from its `data`."""

    @abstractmethod
    def outer(self) -> dict[str, Copied]:
        """Tensors outside the layers, by their name in the result."""

    @abstractmethod
    def copied(self, layer: int) -> dict[str, Copied]:
        """A layer's tensors that go over as they are, by their name in the result: all but a converted attention."""

    @abstractmethod
    def attention(
        self, layer: int, converted: LatentAttention, ladder: Any, checkpoint: Checkpoint
    ) -> dict[str, Tensor]:
        """A factorized layer's tensors by their name in the result."""

    @abstractmethod
    def config(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """config.json, with the ladder chosen for each kind of layer."""

    @abstractmethod
    def rope_parameters(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """What the record says of the choice."""


class Unwritten:
    """Stands for the checkpoint of a model that is not there yet: it has no tensors."""

    headers: ClassVar[dict[str, Any]] = {}

    def tensor(self, name: str) -> Tensor:
        raise KeyError(name)
