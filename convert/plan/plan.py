"""Everything that will be written, and every refusal, before a weight is read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory

from latentfold.convert.config import OUTPUT_DTYPES, PORTABLE_DTYPES, ConversionConfig
from latentfold.convert.errors import InputError
from latentfold.convert.families.family import Family
from latentfold.convert.model.shape import ModelShape, first_context, model_shape
from latentfold.convert.plan.sizes import candidate_splits, check_sizes, propose_sizes
from latentfold.convert.plan.support import choose_target, judge
from latentfold.convert.plan.tensors import check_tensors
from latentfold.convert.source.checkpoint import Checkpoint
from latentfold.convert.source.config import read_config
from latentfold.convert.targets.deepseek.target import PortableTarget
from latentfold.convert.targets.native.target import NativeTarget
from latentfold.convert.targets.target import Target
from latentfold.convert.write.tensors import TensorPlan

SAVING_WORTH = 0.9
"""A result that caches more than this share of the source's values earns a warning."""


@dataclass(frozen=True)
class ConversionPlan:
    """A conversion that nothing known beforehand stands against.

    Attributes:
        checkpoint: the source.
        config: its transformers config.
        family, shape: what it is.
        kv_rank, rope_dim: sizes of the result.
        seq_len: tokens of a calibration window.
        dtype: stored dtype.
        target: the format of the result.
        tensors: every output tensor in the order it is written.
        shards: which file holds which.
        notices: what the user should know before it starts.
    """

    checkpoint: Checkpoint
    config: Any
    family: Family
    shape: ModelShape
    kv_rank: int
    rope_dim: int
    seq_len: int
    dtype: torch.dtype
    target: PortableTarget | NativeTarget
    tensors: dict[str, TensorPlan]
    shards: StateDictSplit
    notices: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Size of the weights to be written."""
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def cache_values(self) -> int:
        """Values the result caches per token and layer."""
        return self.kv_rank + self.rope_dim

    def target_of(self, kv_rank: int, rope_dim: int) -> Target:
        """The same format at another size."""
        return replace(self.target, kv_rank=kv_rank, rope_dim=rope_dim)


def make_plan(config: ConversionConfig, checkpoint: Checkpoint) -> ConversionPlan:
    """Decide everything that can be decided from config.json and, where they have been read, file headers.

    Raises:
        InputError: for anything that would fail or give a wrong model later.
    """
    model = read_config(checkpoint)
    shape = model_shape(model)
    family, target_name, notices = choose_target(config, checkpoint.name, judge(model, shape, config.engine))
    proposal = propose_sizes(shape)
    kv_rank = config.kv_rank or proposal.kv_rank
    rope_dim = proposal.rope_dim if config.rope_dim is None else config.rope_dim
    if candidates := candidate_splits(config, shape):
        kv_rank, rope_dim = candidates[0]
    check_sizes(shape, kv_rank, rope_dim)
    if len(candidates) > 1:
        divisions = ", ".join(f"{rank} + {rope}" for rank, rope in candidates)
        notices.append(f"a short survey of the model chooses kv-rank + rope-dim from {divisions}")
    source_dtype = checkpoint.dtype if checkpoint.headers else model.dtype or torch.bfloat16
    held = [*PORTABLE_DTYPES.values()] + ([torch.float16] if target_name == "native" else [])
    dtype = OUTPUT_DTYPES.get(config.dtype, source_dtype)
    if dtype not in held:
        other = torch.bfloat16 if dtype == torch.float16 else torch.float32
        notices.append(f"source is stored as {_short(dtype)}: writing {_short(other)} (the target cannot hold it)")
        dtype = other
    kind = PortableTarget if target_name == PortableTarget.name else NativeTarget
    target = kind(checkpoint, model, family, shape, kv_rank, rope_dim, dtype)
    rope_dim = max(target.rope_dims)
    if checkpoint.headers:
        check_tensors(checkpoint, family, target)
    if kv_rank + rope_dim > SAVING_WORTH * shape.cache_values:
        notices.append(
            f"kv-rank {kv_rank} + rope-dim {rope_dim} caches {kv_rank + rope_dim} of the {shape.cache_values} values "
            "per token and layer that the source does: this saves next to nothing"
        )
    tensors = {name: TensorPlan(size, dtype) for name, size in target.tensors.items()}
    return ConversionPlan(
        checkpoint=checkpoint,
        config=model,
        family=family,
        shape=shape,
        kv_rank=kv_rank,
        rope_dim=rope_dim,
        seq_len=config.window(_rotating_alike(model)),
        dtype=dtype,
        target=target,
        tensors=tensors,
        shards=_split(tensors, config.max_shard_size),
        notices=tuple(notices),
    )


def _rotating_alike(model: Any) -> int:
    """Positions that one list of frequencies covers: calibration must not see two."""
    return min(model.max_position_embeddings, first_context(model) or model.max_position_embeddings)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _split(tensors: dict[str, TensorPlan], max_shard_size: str) -> StateDictSplit:
    try:
        if max_shard_size.strip().startswith(("-", "0")):
            raise ValueError("not positive")
        return split_state_dict_into_shards_factory(
            tensors,
            get_storage_size=lambda tensor: tensor.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
    except ValueError as error:
        raise InputError(f"--max-shard-size {max_shard_size}: expected a size such as 5GB or 500MB") from error
