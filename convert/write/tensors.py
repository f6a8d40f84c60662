"""An output tensor before it exists."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory


@dataclass(frozen=True)
class TensorPlan:
    """One output tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def into_files(tensors: dict[str, TensorPlan], max_shard_size: str) -> StateDictSplit:
    """Which file holds which tensor, as transformers names and fills them.

    Raises:
        ValueError: `max_shard_size` is no size such as 5GB.
    """
    return split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
