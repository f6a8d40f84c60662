"""What it takes to repeat a measurement: versions, machine, dtype, seed, which weights."""

from __future__ import annotations

import os
import platform
import subprocess
import tomllib
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
    """latentfold's own commit, where it runs from a git checkout; `+` after it means uncommitted changes.

    Installed somewhere inside another repository, it is that repository's commit that git would tell: asked for only
    where this very file is tracked by the repository of our pyproject.toml.
    """
    here = Path(__file__).resolve()
    try:
        root = Path(_git(here.parent, "rev-parse", "--show-toplevel"))
        if tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"] != "latentfold":
            return None
        _git(here.parent, "ls-files", "--error-unmatch", here.name)
        return _git(here.parent, "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*") or None
    except (OSError, ValueError, LookupError, TypeError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    """What git says of the repository that `folder` lies in, whatever GIT_DIR says."""
    found = subprocess.run(
        ["git", *arguments],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
        capture_output=True,
        text=True,
        timeout=10,
        check=True,
    )
    return found.stdout.strip()
