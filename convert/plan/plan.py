"""Everything that will be written, and every refusal, before a weight is read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from huggingface_hub import StateDictSplit

from latentfold.convert.attention.sizes import LayerSize
from latentfold.convert.dtypes import DTYPES, dtype_name
from latentfold.convert.errors import InputError
from latentfold.convert.families.family import Family
from latentfold.convert.model.shape import ModelShape, first_context, longest_context, model_shape
from latentfold.convert.plan.config import ConversionConfig
from latentfold.convert.plan.sizes import candidate_splits, check_sizes, propose_sizes
from latentfold.convert.plan.support import choose_target, judge
from latentfold.convert.plan.tensors import check_tensors
from latentfold.convert.source.checkpoint import Checkpoint
from latentfold.convert.source.config import read_config
from latentfold.convert.targets.registry import TARGETS, TargetEntry
from latentfold.convert.targets.target import Conversion
from latentfold.convert.text.windows import DEFAULT_WINDOW
from latentfold.convert.write.tensors import TensorPlan, into_files

SAVING_WORTH = 0.9
"""A result that caches more than this share of the source's values earns a warning."""


@dataclass(frozen=True)
class ConversionPlan:
    """A conversion that nothing known beforehand stands against.

    Attributes:
        request: what was asked for.
        checkpoint: the source.
        config: its transformers config.
        family, shape: what it is.
        seq_len: tokens of a calibration window.
        target: the format of the result, with its sizes and dtype.
        candidates: sizes to choose from by a survey, where only the number of cached values was given.
        shards: which file will hold which tensor.
        notices: what the user should know before it starts.
    """

    request: ConversionConfig
    checkpoint: Checkpoint
    config: Any
    family: Family
    shape: ModelShape
    seq_len: int
    target: Conversion
    candidates: tuple[LayerSize, ...]
    shards: StateDictSplit
    notices: tuple[str, ...]

    @property
    def sizes(self) -> tuple[LayerSize | None, ...]:
        """What each layer of the result caches per token; None for one that is left as it is."""
        return self.target.sizes

    @property
    def tensors(self) -> dict[str, TensorPlan]:
        """Every output tensor in the order it is written."""
        return _tensors(self.target)

    @property
    def nbytes(self) -> int:
        """Size of the weights to be written."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def cache_values(self) -> tuple[int, int]:
        """Values cached per token, all layers: by the source and by the result."""
        before = self.shape.layer_values
        after = [size.values if size else values for size, values in zip(self.sizes, before, strict=True)]
        return sum(before), sum(after)

    def resized(self, sizes: tuple[LayerSize | None, ...]) -> ConversionPlan:
        """The same conversion at other sizes."""
        target = replace(self.target, wanted=sizes)
        return replace(self, target=target, shards=_split(_tensors(target), self.request.max_shard_size))

    def at(self, size: LayerSize) -> ConversionPlan:
        """The same conversion with another size for all layers that are converted."""
        return self.resized(tuple(old and size for old in self.sizes))


def make_plan(config: ConversionConfig, checkpoint: Checkpoint) -> ConversionPlan:
    """Decide everything that can be decided from config.json and, where they have been read, file headers.

    Raises:
        InputError: for anything that would fail or give a wrong model later.
    """
    model = read_config(checkpoint)
    shape = model_shape(model)
    wanted, candidates = _sizes(config, shape)
    verdict = judge(model, shape, config.engine)
    family, entry, notices = choose_target(config.target, checkpoint.name, verdict, wanted)
    if len(candidates) > 1:
        divisions = ", ".join(map(str, candidates))
        notices.append(f"a short survey of the model chooses kv_rank + rope_dim from {divisions}")
    dtype, notice = _dtype(config, entry, checkpoint, model)
    target = entry.conversion(checkpoint, model, family, shape, wanted, dtype)
    if checkpoint.headers:
        check_tensors(checkpoint, family, target)
    plan = ConversionPlan(
        request=config,
        checkpoint=checkpoint,
        config=model,
        family=family,
        shape=shape,
        seq_len=config.window(_rotating_alike(model)),
        target=target,
        candidates=candidates,
        shards=_split(_tensors(target), config.max_shard_size),
        notices=(*notices, *notice),
    )
    before, after = plan.cache_values
    if after > SAVING_WORTH * before:
        layers = shape.num_layers
        saving = f"{after / layers:g} of the {before / layers:g} values per token and layer that the source does"
        plan = replace(plan, notices=(*plan.notices, f"the result caches {saving}: this saves next to nothing"))
    return plan


def _sizes(config: ConversionConfig, shape: ModelShape) -> tuple[tuple[LayerSize | None, ...], tuple[LayerSize, ...]]:
    """The size of every layer, and what a survey may choose instead."""
    if config.sizes is not None:
        if len(config.sizes) != shape.num_layers:
            raise InputError(f"sizes of {len(config.sizes)} layers: expected {shape.num_layers}, one for each")
        if not any(config.sizes):
            raise InputError("sizes: no layer is to be converted; expected at least one")
        for size in set(config.sizes) - {None}:
            assert size is not None
            check_sizes(shape, size.kv_rank, size.rope_dim)
        return config.sizes, ()
    proposal = propose_sizes(shape)
    rope_dim = proposal.rope_dim if config.rope_dim is None else config.rope_dim
    size = LayerSize(config.kv_rank or proposal.kv_rank, rope_dim)
    candidates = tuple(LayerSize(*split) for split in candidate_splits(config, shape))
    if candidates:
        size = candidates[0]
    check_sizes(shape, size.kv_rank, size.rope_dim)
    return (size,) * shape.num_layers, candidates


def _dtype(
    config: ConversionConfig, entry: TargetEntry, checkpoint: Checkpoint, model: Any
) -> tuple[torch.dtype, list[str]]:
    """What the result is stored in, and what is to be said about it.

    Raises:
        InputError: the target cannot be stored in the dtype asked for.
    """
    if config.dtype != "auto" and config.dtype not in entry.dtypes:
        others = [other.name for other in TARGETS.values() if config.dtype in other.dtypes]
        raise InputError(
            f"dtype {config.dtype}: the target {entry.name} cannot be stored in it ({entry.other_dtype}); "
            f"use {' or '.join(entry.dtypes)}, or the target {' or '.join(others)}"
        )
    if config.dtype != "auto":
        return DTYPES[config.dtype], []
    found = checkpoint.dtype if checkpoint.headers else model.dtype or torch.bfloat16
    if dtype_name(found) in entry.dtypes:
        return found, []
    other = torch.bfloat16 if found == torch.float16 else torch.float32
    stored, written = dtype_name(found), dtype_name(other)
    return other, [f"source is stored as {stored}: writing {written} (the target cannot hold it)"]


def _rotating_alike(model: Any) -> int:
    """Positions that one list of frequencies covers: calibration must not see two."""
    longest = longest_context(model) or DEFAULT_WINDOW
    return min(longest, first_context(model) or longest)


def _tensors(target: Conversion) -> dict[str, TensorPlan]:
    return {name: TensorPlan(size, target.dtype) for name, size in target.tensors.items()}


def _split(tensors: dict[str, TensorPlan], max_shard_size: str) -> StateDictSplit:
    try:
        if max_shard_size.strip().startswith(("-", "0")):
            raise ValueError("not positive")
        return into_files(tensors, max_shard_size)
    except ValueError as error:
        raise InputError(f"max_shard_size {max_shard_size}: expected a size such as 5GB or 500MB") from error
