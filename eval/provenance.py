"""What it takes to repeat a measurement: versions, machine, dtype, seed, which weights."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def provenance(*, command: str | None, dtype: str, device: torch.device, seed: int) -> dict[str, Any]:
    """The part of a record's provenance that does not depend on the models."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "dtype": dtype,
        "device": _device_name(device),
        "seed": seed,
        "versions": {name: version(name) for name in ("latentfold", "torch", "transformers")},
        "commit": _commit(),
        "python": platform.python_version(),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
    }


def _device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def _processor() -> str:
    """The CPU's name where the system tells it, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """latentfold's own commit, where it runs from a git checkout; `+` after it means uncommitted changes."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
