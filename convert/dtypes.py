"""Floating point types, by the names that options and configs have for them."""

from __future__ import annotations

import torch

from latentfold.convert import choices

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in choices.DTYPES}

STORED = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16, "F64": torch.float64}
"""By their names in safetensors headers; float64 is read, never written."""


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def stored_name(dtype: torch.dtype) -> str:
    """`BF16` for torch.bfloat16."""
    return next(name for name, found in STORED.items() if found == dtype)
