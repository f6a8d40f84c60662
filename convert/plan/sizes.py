"""kv_rank and rope_dim: what is proposed, and what makes sense."""

from __future__ import annotations

from dataclasses import dataclass

from latentfold.convert.errors import InputError
from latentfold.convert.model.shape import ModelShape
from latentfold.convert.plan.config import ConversionConfig
from latentfold.convert.targets.kernels import KERNEL_SIZES, engine_kernels

HEAD_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1)
"""Shares of a head's size that may be given to rotation where a number of cached values is to be divided."""

TARGET_SHARE = 1 / 3
"""Share of the source's cached values that a proposal aims at: most of what can be kept without training is."""


@dataclass(frozen=True)
class Proposal:
    """Sizes for a conversion.

    Attributes:
        kv_rank, rope_dim: kv_lora_rank and qk_rope_head_dim.
        cached_share: cached values relative to the source's.
        kernels: which engine kernels take these sizes, in the stock class.
    """

    kv_rank: int
    rope_dim: int
    cached_share: float
    kernels: tuple[str, ...]


def propose_sizes(shape: ModelShape) -> Proposal:
    """About a third of the source's cached values, on sizes that fast kernels take where one is near."""
    values = shape.cache_values
    fitting = [
        size for size in KERNEL_SIZES if 0.2 * values <= sum(size) <= 0.4 * values and size[0] <= shape.max_kv_rank
    ]
    if fitting and shape.rotates:
        kv_rank, rope_dim = min(fitting, key=lambda size: abs(sum(size) - TARGET_SHARE * values))
    else:
        rope_dim = usual_rope_dim(shape, TARGET_SHARE * values)
        wanted = TARGET_SHARE * values - rope_dim
        step = 16 if wanted >= 32 else 1
        kv_rank = min(shape.max_kv_rank, max(step * round(wanted / step), rope_dim // 2, 1))
    share = (kv_rank + rope_dim) / values
    return Proposal(kv_rank, rope_dim, share, engine_kernels(kv_rank, rope_dim))


def usual_rope_dim(shape: ModelShape, values: float) -> int:
    """How many of so many cached values rotate: half a head's size (every other frequency), a third of them at most."""
    return max(2, 2 * int(min(shape.head_dim / 4, values / 6))) if shape.rotates else 0


def splits(shape: ModelShape, values: int) -> list[tuple[int, int]]:
    """(kv_rank, rope_dim) that together cache `values`; none where no division makes sense."""
    found = [(values - rope_dim, rope_dim) for rope_dim in _rotated(shape)]
    return [(rank, rope) for rank, rope in found if max(1, rope // 2) <= rank <= shape.max_kv_rank]


def divisible(shape: ModelShape) -> tuple[int, int]:
    """The fewest and the most cached values, below the source's, that `splits` divides."""
    rotated = _rotated(shape)
    return rotated[0] + max(1, rotated[0] // 2), min(shape.cache_values - 1, rotated[-1] + shape.max_kv_rank)


def _rotated(shape: ModelShape) -> list[int]:
    """Sizes of the rotated part to choose from, ascending."""
    if not shape.rotates:
        return [0]
    return sorted({max(2, round(shape.head_dim * share / 2) * 2) for share in HEAD_SHARES})


def check_sizes(shape: ModelShape, kv_rank: int, rope_dim: int) -> None:
    """Refuse sizes that mean nothing.

    Raises:
        InputError: kv_rank above what K and V can fill, or a rope part above the model's own.
    """
    proposal = propose_sizes(shape)
    if kv_rank > shape.max_kv_rank:
        raise InputError(
            f"kv_rank {kv_rank}: this model's keys and values have at most {shape.max_kv_rank} dimensions a token "
            f"(min of 2 x {shape.num_kv_heads} KV heads x {shape.head_dim}, hidden size {shape.hidden_size}); "
            f"try kv_rank {proposal.kv_rank} rope_dim {proposal.rope_dim}"
        )
    if rope_dim < 2 and shape.rotates:
        raise InputError(f"rope_dim {rope_dim}: expected a positive even number (two values a frequency)")
    largest = shape.num_kv_heads * shape.head_dim
    if rope_dim > largest:
        raise InputError(
            f"rope_dim {rope_dim}: this model rotates {largest} dimensions a token "
            f"({shape.num_kv_heads} KV heads x {shape.head_dim}); try rope_dim {proposal.rope_dim}"
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
