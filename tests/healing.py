"""What tests of healing share: tiny conversions, and options that take moments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from latentfold.convert import convert_checkpoint
from tests.conftest import TEXT

SHORT: dict[str, Any] = {"seq_len": 64, "batch_tokens": 128, "dtype": "float32", "progress": False}


def converted(source: Path, out: Path, options: dict[str, Any], **changes: Any) -> Path:
    """A small conversion of a folder."""
    convert_checkpoint(str(source), str(out), **{"kv_rank": 8, "rope_dim": 4} | options | changes)
    return out


def healing_text(folder: Path) -> str:
    """A file of enough text for a few epochs."""
    path = folder / "healing.txt"
    path.write_text(TEXT * 12)
    return str(path)
