"""What an evaluation finds, as plain typed records. `None` means not measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Nll:
    """Mean negative log-likelihood of both models over the same predictions, in nats.

    Attributes:
        start, end: context positions covered, [start, end).
        predictions: how many tokens were predicted.
        gap: converted - original.
        gap_standard_error: of the mean paired difference, with runs of 256 neighbouring tokens as the units.
    """

    start: int
    end: int
    predictions: int
    original: float
    converted: float
    gap: float
    gap_standard_error: float | None


@dataclass(frozen=True)
class Agreement:
    """How much the next-token distributions agree.

    Attributes:
        kl: mean KL(original || converted) in nats.  kl_standard_error: as for the gap.
        top1: share of positions where both rank the same token first.
    """

    kl: float
    kl_standard_error: float | None
    top1: float


@dataclass(frozen=True)
class LayerError:
    """Attention output of one layer, both models fed the original's input.

    Attributes:
        relative_error: |converted - original| / |original|, residual scale taken out.
        predicted: what the conversion expected, from latentfold.json.
    """

    layer: int
    relative_error: float
    predicted: float | None


@dataclass(frozen=True)
class CacheSize:
    """KV cache per token, all layers, in bytes of the stored dtype.

    Attributes:
        counted: by config.json (one token more, in a context below any window).
        measured: of the cache object that transformers filled.
    """

    counted: float
    measured: float | None


@dataclass(frozen=True)
class Evaluation:
    """Everything `evaluate` measured.

    Attributes:
        overall: over all predictions.  by_position: the same by context position.
        provenance: versions, machine, dtype, text and its hash: what it takes to repeat this.
    """

    original: str
    converted: str
    overall: Nll
    by_position: tuple[Nll, ...]
    agreement: Agreement
    layers: tuple[LayerError, ...] | None
    cache_original: CacheSize
    cache_converted: CacheSize
    provenance: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able data."""
        return asdict(self)
