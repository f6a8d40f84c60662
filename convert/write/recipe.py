"""`latentfold.json`: everything it takes to repeat a conversion, and what it found."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from latentfold.convert.errors import InputError
from latentfold.convert.files import read_json, sha256
from latentfold.convert.write.writer import PARTIAL

RECIPE = "latentfold.json"


def fingerprint(recipe: dict[str, Any]) -> str:
    """SHA-256 over the names and hashes of the checkpoint's files: which conversion an evaluation speaks of."""
    return hashlib.sha256(json.dumps(recipe["files"], sort_keys=True).encode()).hexdigest()


def fingerprint_now(folder: Path, recipe: dict[str, Any]) -> str:
    """`fingerprint` of the files as they are: another one where they were changed after the conversion."""
    names = [name for name in recipe["files"] if (folder / name).is_file()]
    return fingerprint({"files": {name: sha256(folder / name) for name in names}})


def read_recipe(folder: Path) -> dict[str, Any]:
    """The record of a finished conversion.

    Raises:
        InputError: no such folder, not a converted checkpoint, an unfinished one, or a damaged record.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    if (folder / PARTIAL).exists():
        raise InputError(f"{folder}: an unfinished conversion; repeat its command to finish it")
    if not (folder / RECIPE).is_file():
        raise InputError(f"{folder}: no {RECIPE}; expected a folder that latentfold convert wrote")
    recipe = read_json(folder / RECIPE)
    missing = [key for key in ("source", "options", "calibration", "check", "files") if key not in recipe]
    if missing:
        raise InputError(f"{folder / RECIPE}: has no {', '.join(missing)}; convert again")
    if not all(isinstance(recipe[key], dict) for key in ("source", "options", "calibration", "check", "files")):
        raise InputError(f"{folder / RECIPE}: not the record of a conversion; convert again")
    return recipe
