"""What the source's licence wants to go with every copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LEGAL_FILES = ["LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*"]
"""What a licence usually demands to go with every copy."""


def card_metadata(folder: Path) -> dict[str, Any]:
    """The metadata at the head of a folder's README.md; empty where there is none that can be read."""
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    try:
        return ModelCard.load(folder / "README.md", ignore_metadata_errors=True).data.to_dict()
    except (OSError, ValueError, TypeError, YAMLError):
        return {}


def legal_files(folder: Path) -> dict[str, Path]:
    """Name -> file of what the source's licence wants in every copy."""
    return {path.name: path for pattern in LEGAL_FILES for path in sorted(folder.glob(pattern)) if path.is_file()}
