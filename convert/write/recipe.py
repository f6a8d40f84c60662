"""`latentfold.json`: everything it takes to repeat a conversion, and what it found. Its JSON is the schema."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from latentfold.convert.attention.sizes import LayerSize, uniform
from latentfold.convert.errors import InputError
from latentfold.convert.files import read_json, sha256
from latentfold.convert.write.writer import CheckpointWriter

RECIPE = "latentfold.json"
SCHEMA = 2
"""Raised when a field changes meaning or goes; a record with another number is not read."""


@dataclass(frozen=True)
class SourceRecord:
    """The model that was converted.

    Attributes:
        name: Hub id, or a folder as it was given.  revision: the commit, of a Hub id.
        model_type: its family.  tensors: how many it holds.
        license, license_name, license_link, language: as its model card says.
    """

    name: str
    revision: str | None
    model_type: str
    tensors: int
    license: str | list[str] | None = None
    license_name: str | None = None
    license_link: str | None = None
    language: str | list[str] | None = None


@dataclass(frozen=True)
class OptionsRecord:
    """Options of the conversion, every choice made; see `ConversionConfig`.

    Attributes:
        kv_rank, rope_dim: the one size of all layers; None where layers differ.
        cache_values, cache_ratio: as asked for.
    """

    kv_rank: int | None
    rope_dim: int | None
    cache_values: int | None
    cache_ratio: float | None
    calibration: tuple[str, ...]
    calibration_tokens: int
    seq_len: int
    queries: int
    seed: int
    device: str
    target: str
    engine: str
    dtype: str
    max_shard_size: str


@dataclass(frozen=True)
class CalibrationRecord:
    """The text that was calibrated on.

    Attributes:
        texts: names.  windows: how many of how many tokens.  sha256: of the tokens.
    """

    texts: tuple[str, ...]
    windows: tuple[int, int]
    sha256: str


@dataclass(frozen=True)
class Beginnings:
    """What the written tensors depend on.

    Attributes:
        latentfold: its version.
        sizes: (kv_rank, rope_dim) of each layer, None for one that was left as it is.
        residual_scale: factor on the residual stream.
        versions: of the libraries and of Python.
    """

    latentfold: str
    source: SourceRecord
    options: OptionsRecord
    sizes: tuple[LayerSize | None, ...]
    calibration: CalibrationRecord
    residual_scale: float
    versions: dict[str, str]


@dataclass(frozen=True)
class Change:
    """A number of the source and of the result."""

    source: int
    converted: int


@dataclass(frozen=True)
class LadderRecord:
    """The rotating keys' frequencies.

    Attributes:
        rope_parameters: as the target has them.
        expected_rotation_error: relative squared error of the attention output, from rotation alone.
        candidates: all that were tried.
    """

    rope_parameters: dict[str, Any]
    expected_rotation_error: float
    candidates: tuple[LadderCandidate, ...]


@dataclass(frozen=True)
class LadderCandidate:
    """One that was tried; `layers` names the kind of layers it was tried for, where there are several."""

    rope: str
    expected_rotation_error: float
    layers: str | None = None


@dataclass(frozen=True)
class SizeRecord:
    """A size that a survey tried; see `SizeEstimate`."""

    kv_rank: int
    rope_dim: int
    cached_share: float
    expected_error: float
    hopeless: bool


@dataclass(frozen=True)
class LayerRecord:
    """What a conversion expects of a layer: relative squared errors of its attention output.

    Attributes:
        rope, key, value: the statistics' own estimates.
        output: found on samples left out; contains everything.
    """

    rope: float
    key: float
    value: float
    output: float


@dataclass(frozen=True)
class Probe:
    """What the checkpoint has to give again wherever it is loaded: each probe token's largest logit."""

    tokens: tuple[int, ...]
    largest_logits: tuple[float, ...]


@dataclass(frozen=True)
class CheckRecord:
    """What was compared while the checkpoint was written; relative differences.

    Attributes:
        largest_layout_error: of a layer's written attention from its factorization.
        reload_logit_difference: of the reloaded checkpoint's logits from the written tensors'.
        probe: for whoever loads it later.
    """

    largest_layout_error: float
    reload_logit_difference: float
    probe: Probe


@dataclass(frozen=True)
class HealingPoint:
    """How a student did on held-out text.

    Attributes:
        step, tokens, seconds: trained before it.
        divergence: KL(original || student), nats per token.  nll: of the student, nats per token.
    """

    step: int
    tokens: int
    seconds: float
    divergence: float
    nll: float


@dataclass(frozen=True)
class HealingRecord:
    """A training on the original's predictions.

    Attributes:
        latentfold, versions: as for the conversion.
        teacher, revision: the original.
        texts, sha256: what was trained on, but for its held-out ends.
        seq_len, batch_tokens, train, rate, seed, dtype: see `HealingConfig`.
        minutes: the budget, where it was one of time.
        curve: held-out text, from before the first step on; `best` of them is what was kept.
    """

    latentfold: str
    versions: dict[str, str]
    teacher: str
    revision: str | None
    texts: tuple[str, ...]
    sha256: str
    seq_len: int
    batch_tokens: int
    train: str
    rate: float
    seed: int
    dtype: str
    minutes: float | None
    curve: tuple[HealingPoint, ...]
    best: int


@dataclass(frozen=True)
class Recipe(Beginnings):
    """Everything that `latentfold.json` holds.

    Attributes:
        cache_values: values cached per token, all layers together.
        parameters: of all tensors.
        untied_parameters: of them those of an output head that the source ties to its embedding and the target cannot.
        split: what a survey found, where it chose the size.
        layers: None for a layer that was left as it is.
        files: SHA-256 of every file.
        healing: every training since, in turn.
    """

    cache_values: Change
    parameters: Change
    untied_parameters: int
    ladder: LadderRecord
    split: tuple[SizeRecord, ...] | None
    layers: tuple[LayerRecord | None, ...]
    check: CheckRecord
    files: dict[str, str]
    healing: tuple[HealingRecord, ...] = ()
    schema: int = SCHEMA

    @property
    def size(self) -> LayerSize | None:
        """The one size of all layers, or None where they differ."""
        return uniform(self.sizes)

    @property
    def trained(self) -> tuple[int, float]:
        """Tokens and seconds of training that are in the weights: of every healing, up to the point that it kept."""
        kept = [record.curve[record.best] for record in self.healing]
        return sum(point.tokens for point in kept), sum(point.seconds for point in kept)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able data."""
        return asdict(self)


def fingerprint(files: Mapping[str, str]) -> str:
    """SHA-256 over the names and hashes of a checkpoint's files: which conversion an evaluation speaks of."""
    return hashlib.sha256(json.dumps(dict(files), sort_keys=True).encode()).hexdigest()


def fingerprint_now(folder: Path, recipe: Recipe) -> str:
    """`fingerprint` of the files as they are: another one where they were changed after the conversion."""
    return fingerprint({name: sha256(folder / name) for name in recipe.files if (folder / name).is_file()})


def read_recipe(folder: str | Path) -> Recipe:
    """The record of a finished conversion.

    Raises:
        InputError: no such folder, not a converted checkpoint, an unfinished one, or a record that is damaged or of
            another version.
    """
    from pydantic import TypeAdapter, ValidationError

    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    if CheckpointWriter.is_interrupted(folder):
        raise InputError(f"{folder}: an unfinished conversion; repeat its command to finish it")
    path = folder / RECIPE
    if not path.is_file():
        raise InputError(f"{folder}: no {RECIPE}; expected a folder that latentfold convert wrote")
    data = read_json(path)
    if data.get("schema") != SCHEMA:
        found = data.get("schema", 1 if "options" in data else None)
        raise InputError(
            f"{path}: not the record of a conversion that this version reads (expected schema {SCHEMA}, "
            f"found {found}); convert again"
        )
    try:
        recipe = TypeAdapter(Recipe).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{path}: not the record of a conversion ({place}: {first['msg']}); convert again") from error
    if len(recipe.layers) != len(recipe.sizes):
        raise InputError(f"{path}: not the record of a conversion ({len(recipe.layers)} layers); convert again")
    return recipe
