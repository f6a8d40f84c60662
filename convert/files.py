"""Small files: JSON in, text out, hashes, names that may be published."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from latentfold.convert.errors import InputError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        InputError: unreadable, or something else than an object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def public_name(name: str) -> str:
    """What a record that may be published calls a model, a file or a data set: an absolute path by its last part."""
    scheme = "hf:" if name.startswith("hf:") else ""
    path = name.removeprefix(scheme)
    return scheme + (Path(path).name if os.path.isabs(path) else path)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A file to write in the block and that becomes `path` at its end: readers see the old content or the new."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Write a text file so that readers see the old content or the new, never a part."""
    with replaced(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
