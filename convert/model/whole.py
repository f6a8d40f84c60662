"""A checkpoint as its users run it: whole, through plain transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM

from latentfold.convert.errors import InputError


class InFolder(Protocol):
    """A checkpoint on disk."""

    folder: Path
    name: str


def load(checkpoint: InFolder, dtype: torch.dtype, device: torch.device, **options: Any) -> Any:
    """The model with its weights; `options` are of `from_pretrained`.

    Raises:
        InputError: the weights do not fit in the device's memory.
    """
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=dtype, **options)
        return model.to(device).eval()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(f"{checkpoint.name}: its weights do not fit in the memory of {device}") from error


@contextmanager
def loaded(checkpoint: InFolder, dtype: torch.dtype, device: torch.device) -> Iterator[Any]:
    """The model with its weights, for the length of the block, so that two models need not be in memory at once.

    Raises:
        InputError: the weights do not fit in the device's memory.
    """
    model = load(checkpoint, dtype, device)
    try:
        yield model
    finally:
        model.to("meta")  # frees the weights even where the caller still holds the model
        if device.type == "cuda":
            torch.cuda.empty_cache()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch ran out of memory; its CPU allocator says so only in words."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
