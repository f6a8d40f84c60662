"""What an evaluation finds, as plain typed records; their JSON is the schema. `None` means not measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from latentfold.convert.errors import InputError
from latentfold.convert.files import read_json

EVALUATION = "evaluation.json"
"""The file beside a converted checkpoint that `latentfold eval` leaves its result in."""
SCHEMA = 1
"""Raised when a field changes meaning or goes; a record with another number is not read."""


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
class Curve:
    """NLL against context length, both models, in nats: mean over all windows and over each run of positions.

    Attributes:
        context: tokens of context in the middle of each run.
        original, converted: one value a run.
    """

    context: tuple[float, ...]
    original: tuple[float, ...]
    converted: tuple[float, ...]


@dataclass(frozen=True)
class Agreement:
    """How much the next-token distributions agree.

    Attributes:
        kl: mean KL(original || converted) in nats.  kl_standard_error: as for the gap.
        kl_quantiles: quantile ("0.5", "0.9", "0.99") -> KL in nats.
        top1: share of positions where both rank the same token first.
    """

    kl: float
    kl_standard_error: float | None
    kl_quantiles: dict[str, float]
    top1: float


@dataclass(frozen=True)
class TextResult:
    """Both models on one text.

    Attributes:
        name: file, data set or bundled text.  sha256: of the tokens used.
        windows, window_length: how many windows of how many tokens.  skipped_tokens: passed over before the first.
        overall: over all predictions.  by_position: the same by context position.
    """

    name: str
    sha256: str
    windows: int
    window_length: int
    skipped_tokens: int
    overall: Nll
    by_position: tuple[Nll, ...]
    curve: Curve
    agreement: Agreement


@dataclass(frozen=True)
class LayerError:
    """Attention of one layer, both models fed the original's input; |converted - original| / |original|.

    Attributes:
        scores: of the attention scores before the softmax, each query's mean over its keys taken out.
        values: of the attention output with the original's attention weights on both models' values.
        output: of the attention output.  predicted: what the conversion expected of it, from latentfold.json.
    """

    layer: int
    scores: float
    values: float
    output: float
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
class CachePoint:
    """Measured bytes of the whole cache of one sequence, all layers, after `context` tokens, in the stored dtype."""

    context: int
    original: float
    converted: float


@dataclass(frozen=True)
class Continuation:
    """Greedy continuations of one prompt.

    Attributes:
        prompt: its text.  original, converted: what each model wrote.
        shared_tokens: how many tokens both wrote alike before they part.  tokens: how many were asked for.
    """

    prompt: str
    original: str
    converted: str
    shared_tokens: int
    tokens: int


@dataclass(frozen=True)
class SpeedPoint:
    """Median tokens per second of both models in one process, after warm-up; prefill of `batch` x `context` tokens,
    then decoding with that context in the cache. None where a model ran out of memory.

    Attributes:
        context: tokens a sequence.  batch: sequences.
        cache_original, cache_converted: bytes of the whole cache, measured, after the prefill.
    """

    context: int
    batch: int
    prefill_original: float | None
    prefill_converted: float | None
    decode_original: float | None
    decode_converted: float | None
    cache_original: float | None
    cache_converted: float | None


@dataclass(frozen=True)
class TaskScore:
    """One metric of one lm-evaluation-harness task.

    Attributes:
        task, metric: the harness's names.  higher_is_better: None where the task does not say.
        samples: how many were scored.
        original_standard_error, converted_standard_error: the harness's, or None.
    """

    task: str
    metric: str
    higher_is_better: bool | None
    samples: int | None
    original: float
    original_standard_error: float | None
    converted: float
    converted_standard_error: float | None


@dataclass(frozen=True)
class Evaluation:
    """Everything `evaluate` measured.

    Attributes:
        original, converted: names as given.
        texts: each text's results.  overall, agreement: their macro average (every text counts alike); the standard
            errors follow from the texts' own, and KL quantiles are averaged too.
        layers: None where the layers cannot be compared (no latentfold.json beside the converted model).
        cache_original, cache_converted: bytes per token.  cache_by_context: measured over context lengths.
        continuations, speed, tasks: None unless asked for.
        provenance: what it takes to repeat this: `command`, `created` (UTC), `dtype`, `device`, `seed`,
            `versions`, `python`, `machine`, `revisions` of both models, `fingerprint` of the converted weights,
            `healed` (tokens, minutes) where they were trained after the conversion, and `speed` (dtype, repeats) where
            speed was measured.
    """

    original: str
    converted: str
    texts: tuple[TextResult, ...]
    overall: Nll
    agreement: Agreement
    layers: tuple[LayerError, ...] | None
    cache_original: CacheSize
    cache_converted: CacheSize
    cache_by_context: tuple[CachePoint, ...]
    continuations: tuple[Continuation, ...] | None
    speed: tuple[SpeedPoint, ...] | None
    tasks: tuple[TaskScore, ...] | None
    provenance: dict[str, Any]
    schema: int = SCHEMA

    def to_dict(self) -> dict[str, Any]:
        """JSON-able data."""
        return asdict(self)


def read_evaluation(path: Path) -> Evaluation:
    """An evaluation from the JSON that `latentfold eval` wrote.

    Raises:
        InputError: unreadable, or not an evaluation of this schema.
    """
    from pydantic import TypeAdapter, ValidationError

    data = read_json(path)
    if data.get("schema") != SCHEMA:
        raise InputError(
            f"{path}: expected an evaluation of schema {SCHEMA}, found {data.get('schema')!r}; "
            "run latentfold eval again"
        )
    try:
        return TypeAdapter(Evaluation).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{path}: not an evaluation ({place}: {first['msg']}); run latentfold eval again") from error
