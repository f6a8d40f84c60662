"""Everything that will be written, and every refusal, before a weight is read."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory
from transformers import AutoConfig

from latentfold.convert.checkpoint import PARTIAL, CheckpointWriter
from latentfold.convert.config import OUTPUT_DTYPES, PORTABLE_DTYPES, ConversionConfig
from latentfold.convert.errors import InputError
from latentfold.convert.families import Verdict, judge
from latentfold.convert.families.family import Family
from latentfold.convert.inspection import divisible, propose_sizes, splits
from latentfold.convert.shapes import ModelShape, first_context, model_shape
from latentfold.convert.source import Checkpoint
from latentfold.convert.targets.deepseek import PortableTarget
from latentfold.convert.targets.native.target import NativeTarget
from latentfold.convert.targets.target import Target

SAVING_WORTH = 0.9
"""A result that caches more than this share of the source's values earns a warning."""


@dataclass(frozen=True)
class TensorPlan:
    """One output tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


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


def read_config(checkpoint: Checkpoint) -> Any:
    """The transformers config of a checkpoint, both spellings of rope parameters understood.

    Raises:
        InputError: no model_type, or one that this transformers does not know.
    """
    data = dict(checkpoint.config)
    model_type = data.pop("model_type", None)
    if model_type is None:
        raise InputError(f"{checkpoint.name}: config.json has no model_type; expected a transformers checkpoint")
    try:
        return AutoConfig.for_model(model_type, **data)
    except ValueError as error:
        known = "Unrecognized model identifier" in str(error)
        detail = "unknown to this transformers" if known else " ".join(str(error).split())
        raise InputError(f"{checkpoint.name}: model type {model_type!r}: {detail}") from error
    except Exception as error:  # transformers validates configs with exceptions of its own
        raise InputError(f"{checkpoint.name}: config.json is not valid: {' '.join(str(error).split())}") from error


def check_output(config: ConversionConfig, checkpoint: Checkpoint) -> None:
    """Refuse an output folder that cannot or must not be written.

    Raises:
        InputError: OUT is not a folder, not empty, not writable, or overlaps the source.
    """
    if not config.output.strip():
        raise InputError("OUT is empty; expected a folder to write to")
    try:
        _check_output(config, checkpoint)
    except InputError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # names too long, link loops, NUL bytes
        raise InputError(f"{config.output}: not usable as a folder ({error})") from error


def _check_output(config: ConversionConfig, checkpoint: Checkpoint) -> None:
    out = config.output_path.absolute()
    if out.is_symlink() and not out.exists():
        raise InputError(f"{config.output}: is a link to nothing; expected a folder to write to")
    if (out.exists() and not out.is_dir()) or ((out / PARTIAL).exists() and not (out / PARTIAL).is_dir()):
        raise InputError(f"{config.output}: is a file; expected a folder to write to")
    real_out, source = out.resolve(), checkpoint.folder.resolve()
    if real_out == source or source in real_out.parents:
        raise InputError(f"{config.output}: lies inside the source {config.source}; choose another folder")
    if config.overwrite:
        if real_out == Path.cwd() or real_out in Path.cwd().parents:
            raise InputError(f"{config.output}: is or holds the current folder; --overwrite would empty it")
        for path in (source, *source.iterdir(), *(Path(file) for file in config.calibration)):
            if real_out in path.resolve().parents:
                raise InputError(f"{config.output}: holds {path}, which is needed; --overwrite would delete it")
    elif out.is_dir():
        found = sorted(path.name for path in out.iterdir() if path.name != PARTIAL)
        if found and not set(found) <= CheckpointWriter.files_being_moved(out):
            raise InputError(
                f"{config.output}: not empty (holds {found[0]}); choose another folder or pass --overwrite"
            )
    parent = out
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"{config.output}: cannot be written ({parent} is not a writable folder)")


def check_sizes(shape: ModelShape, kv_rank: int, rope_dim: int) -> None:
    """Refuse sizes that mean nothing.

    Raises:
        InputError: kv_rank above what K and V can fill, or a rope part above the model's own.
    """
    proposal = propose_sizes(shape)
    if kv_rank > shape.max_kv_rank:
        raise InputError(
            f"--kv-rank {kv_rank}: this model's keys and values have at most {shape.max_kv_rank} dimensions a token "
            f"(min of 2 x {shape.num_kv_heads} KV heads x {shape.head_dim}, hidden size {shape.hidden_size}); "
            f"try --kv-rank {proposal.kv_rank} --rope-dim {proposal.rope_dim}"
        )
    if rope_dim < 2 and shape.rotates:
        raise InputError(f"--rope-dim {rope_dim}: expected a positive even number (two values a frequency)")
    largest = shape.num_kv_heads * shape.head_dim
    if rope_dim > largest:
        raise InputError(
            f"--rope-dim {rope_dim}: this model rotates {largest} dimensions a token "
            f"({shape.num_kv_heads} KV heads x {shape.head_dim}); try --rope-dim {proposal.rope_dim}"
        )


def candidate_splits(config: ConversionConfig, shape: ModelShape) -> list[tuple[int, int]]:
    """(kv_rank, rope_dim) to choose from where only their sum is given; otherwise none.

    Raises:
        InputError: no division of that many values makes sense.
    """
    values = config.cache_values
    if config.cache_ratio is not None:
        values = round(config.cache_ratio * shape.cache_values)
    if values is None:
        return []
    found = splits(shape, values)
    if not found or values >= shape.cache_values:
        fewest, most = divisible(shape)
        raise InputError(
            f"{values} cached values: expected between {fewest} and {most}; "
            f"the source caches {shape.cache_values} per token and layer"
        )
    return found


def choose_target(config: ConversionConfig, name: str, verdict: Verdict) -> tuple[Family, str, list[str]]:
    """A model's family, the target that holds it, and what is to be said about the choice.

    Raises:
        InputError: naming every feature that stands in the way.
    """
    reasons = verdict.reasons + (verdict.not_portable if config.target == PortableTarget.name else ())
    if verdict.family is None or reasons:
        raise InputError(f"{name} cannot be converted: {'; '.join(reasons)}")
    if config.target != "auto":
        return verdict.family, config.target, []
    if not verdict.not_portable:
        return verdict.family, PortableTarget.name, []
    notice = f"no stock class holds this model ({'; '.join(verdict.not_portable)}): writing latentfold's own, which "
    return verdict.family, "native", [notice + "transformers loads with trust_remote_code or with latentfold imported"]


def check_tensors(checkpoint: Checkpoint, family: Family, target: Target) -> None:
    """Compare every tensor the conversion needs with the files' headers.

    Raises:
        InputError: naming the tensor, its file, what was expected and what was found.
    """
    expected = target.expected
    for name, size in expected.items():
        header = checkpoint.headers.get(name)
        if header is None:
            raise InputError(
                f"tensor {name}: expected shape {list(size)}, found nothing in {checkpoint.name} "
                f"({len(checkpoint.headers)} tensors in {len({h.file for h in checkpoint.headers.values()})} files)"
            )
        if header.shape != size:
            raise InputError(
                f"tensor {name} in {header.file}: expected shape {list(size)}, as config.json says, "
                f"found {list(header.shape)}"
            )
        if header.dtype not in ("F16", "BF16", "F32", "F64"):
            raise InputError(f"tensor {name} in {header.file}: expected F16, BF16 or F32, found {header.dtype}")
    for name, header in checkpoint.headers.items():
        if name not in expected and name not in target.tied and not name.endswith(family.ignored):
            raise InputError(
                f"tensor {name} in {header.file}: a {family.model_type} checkpoint has no such tensor, and leaving it "
                "out would change the model"
            )


def make_plan(config: ConversionConfig, checkpoint: Checkpoint) -> ConversionPlan:
    """Decide everything that can be decided from config.json and, where they have been read, file headers.

    Raises:
        InputError: for anything that would fail or give a wrong model later.
    """
    if config.output is not None:
        check_output(config, checkpoint)
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
