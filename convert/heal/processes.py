"""Several processes that train one student: each takes its share of a step's windows, and all take the same step.

Whatever starts them sets RANK, WORLD_SIZE and where to meet, as `torchrun` and `accelerate launch` do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Item = TypeVar("Item")


@dataclass(frozen=True)
class Processes:
    """Who takes part.

    Attributes:
        rank: of this process.  count: of all.
    """

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the one that reads, writes and speaks."""
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """What of a list is this process's."""
        return items[self.rank :: self.count]

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def agree_(self, tensor: Tensor) -> Tensor:
        """What the first process has, in place."""
        if self.count > 1:
            dist.broadcast(tensor, 0)
        return tensor

    def agreed(self, value: float) -> float:
        """A number that the first process has."""
        return value if self.count == 1 else float(self.agree_(torch.tensor(value, dtype=torch.float64)))

    def shared(self, found: Item | None) -> Item | None:
        """An object that the first process has; tensors are copied to the others."""
        if self.count == 1:
            return found
        box = [found]
        dist.broadcast_object_list(box, 0)
        return box[0]

    def wait(self) -> None:
        """Until all are here."""
        if self.count > 1:
            dist.barrier()


@contextmanager
def launched(device: torch.device) -> Iterator[Processes]:
    """The processes that this one was started with, for the length of the block."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes()
        return
    if device.type == "cuda":
        torch.cuda.set_device(local_device(device))
    # gloo beside NCCL: the numbers that processes agree on lie in main memory
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    try:
        yield Processes(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def launched_first() -> bool:
    """Whether this is the process that speaks, also after `launched` has ended."""
    return os.environ.get("RANK", "0") == "0"


def local_device(device: torch.device) -> torch.device:
    """Of several GPUs each process takes its own."""
    rank = os.environ.get("LOCAL_RANK")
    return torch.device("cuda", int(rank)) if device.type == "cuda" and rank is not None else device
