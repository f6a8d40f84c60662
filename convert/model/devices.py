"""Where to compute."""

from __future__ import annotations

import torch

from latentfold.convert.errors import InputError


def resolve_device(name: str) -> torch.device:
    """A torch device by name; "auto" is the first GPU, or the CPU.

    Raises:
        InputError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].split(". ")[0][:150]
        raise InputError(f"device {name}: not available here ({reason})") from error
    return device
