"""Text to token windows, for calibration and for evaluation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from latentfold.convert.errors import InputError

DEFAULT_CALIBRATION = "latentfold default"


@dataclass(frozen=True)
class Document:
    """A named text."""

    name: str
    text: str


def default_calibration() -> list[Document]:
    """The text bundled with the package (convert/text/data/README.md says what it is and under which licence)."""
    folder = resources.files(__package__) / "data"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".txt")), key=lambda f: f.name)
    return [Document(f"{DEFAULT_CALIBRATION}: {f.name}", f.read_text(encoding="utf-8")) for f in files]


def read_documents(paths: Sequence[str | Path]) -> list[Document]:
    """Read .txt or .jsonl files (keys `text`, `content` or `messages`).

    Raises:
        InputError: a file is missing, undecodable, malformed or holds no text.
    """
    return [_read_document(Path(p)) for p in paths]


def _read_document(path: Path) -> Document:
    try:
        raw = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start})") from error
    if path.suffix in {".jsonl", ".ndjson"}:
        lines = [(i, line) for i, line in enumerate(raw.splitlines(), 1) if line.strip()]
        raw = "\n\n".join(_jsonl_text(path, i, line) for i, line in lines)
    if not raw.strip():
        raise InputError(f"{path}: holds no text")
    return Document(str(path), raw)


def _jsonl_text(path: Path, number: int, line: str) -> str:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise InputError(f"{path}, line {number}: not JSON ({error})") from error
    if isinstance(row, dict):
        for key in ("text", "content"):
            if isinstance(row.get(key), str):
                return str(row[key])
        if isinstance(row.get("messages"), list):
            return "\n\n".join(message_text(m) for m in row["messages"] if isinstance(m, dict))
    raise InputError(f"{path}, line {number}: expected an object with `text`, `content` or `messages`")


def message_text(message: dict[str, Any]) -> str:
    """The text of a chat message: a string, or the text parts of a list; tool calls and images have none."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "".join(text for text in texts if isinstance(text, str))
