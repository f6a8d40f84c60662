"""What of a folder may go to the Hub."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from latentfold.convert.errors import InputError
from latentfold.convert.files import sha256
from latentfold.convert.source.licence import LEGAL_FILES
from latentfold.convert.write.recipe import RECIPE, Recipe

GENERATED = ["README.md", "evaluation.json", "report.html", "figures/*.png"]
"""Written beside a checkpoint after its conversion."""

ALLOWED = [RECIPE, *GENERATED, *LEGAL_FILES, ".gitattributes"]

SECRETS = {
    "a Hub token": r"\bhf_[A-Za-z0-9]{20,}",
    "an API key": r"\bsk-[A-Za-z0-9_-]{20,}",
    "an AWS key": r"\bAKIA[0-9A-Z]{16}\b",
    "a GitHub token": r"\bgh[pousr]_[A-Za-z0-9]{36}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
}

UNSCANNED = {".safetensors", ".png"}


def check_files(folder: Path, recipe: Recipe) -> None:
    """Compare a converted folder with the hashes that its conversion recorded.

    Raises:
        InputError: a file is missing or changed.
    """
    for name, expected in recipe.files.items():
        if not (folder / name).is_file():
            raise InputError(f"{folder}: {name} is missing; convert again")
        if sha256(folder / name) != expected:
            raise InputError(f"{folder}: {name} is not what the conversion wrote (its SHA-256 differs); convert again")


def files_to_push(folder: Path, recipe: Recipe) -> dict[str, Path]:
    """Name in the repository -> file, of everything in a converted folder.

    Raises:
        InputError: there is a file that does not belong to a conversion, or one that holds a secret.
    """
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    stray = [name for name in files if name not in recipe.files and not _matches(name, ALLOWED)]
    if stray:
        raise InputError(f"{folder}: holds {', '.join(stray)}, which is no part of a conversion; move it elsewhere")
    for name, path in files.items():
        text = "" if path.suffix in UNSCANNED else path.read_text(encoding="utf-8", errors="replace")
        for kind, pattern in SECRETS.items():
            if re.search(pattern, text):
                raise InputError(f"{folder}: {name} holds what looks like {kind}; nothing was sent, remove it")
    return files


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a path matches a pattern as deep as itself (fnmatch alone lets `*` match slashes)."""
    return any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns)
