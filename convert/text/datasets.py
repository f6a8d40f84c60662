"""Texts to evaluate on: files, and data sets of the Hub."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from latentfold.convert.errors import InputError
from latentfold.convert.text.documents import Document, message_text, read_documents

DATASET = "hf:"

SPLITS = ("test", "validation", "train")
"""Which split is read by default: the first of these that a data set has."""


def open_texts(specs: Sequence[str], *, token: str | None = None, characters: int = 2_000_000) -> list[Document]:
    """Read one document for each spec.

    A spec is a .txt or .jsonl file, or `hf:DATASET[@REVISION][:CONFIG[:SPLIT]]`: a data set of the Hub, or a folder
    that `datasets.load_dataset` takes. CONFIG may be left empty for the default. Without a SPLIT, it is test, else
    validation, else train. The text is in the column `text`, else `content`, else `messages` (a chat), else in the only
    column of strings.

    Rows are streamed, joined by blank lines, until there are `characters`. The document is named by a spec that says it
    all, the commit included, so that the name reads the same text again.

    Args:
        token: Hub token.
        characters: how much of a data set is taken, at most.

    Raises:
        InputError: a file is unreadable; a data set is not there, needs a login or the package `datasets`, cannot be
            reached, or has no such config, no such split or no text.
    """
    return [
        _read_dataset(spec, token, characters) if spec.startswith(DATASET) else read_documents([spec])[0]
        for spec in specs
    ]


def _read_dataset(spec: str, token: str | None, characters: int) -> Document:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise InputError(f"{spec}: data sets need the package `datasets`; pip install 'datasets>=4.0'") from error
    name, *rest = spec.removeprefix(DATASET).split(":")
    if not name or len(rest) > 2:
        raise InputError(f"{spec}: expected hf:DATASET, hf:DATASET:CONFIG or hf:DATASET:CONFIG:SPLIT")
    config, split = [*rest, "", ""][:2]
    commit = None
    if not os.path.isdir(name):
        name, _, revision = name.partition("@")
        commit = _resolve(spec, name, revision or None, token)
    try:
        streams = load_dataset(name, config or None, revision=commit, token=token, streaming=True)
    except Exception as error:  # its readers raise whatever they meet
        raise InputError(f"{spec}: cannot be opened ({_reason(error)})") from error
    split = split or next((each for each in SPLITS if each in streams), "")
    if split not in streams:
        wanted = f"no split {split!r}" if split else "no split of a usual name"
        raise InputError(f"{spec}: {wanted}; expected one of {', '.join(map(str, streams))} as hf:DATASET:CONFIG:SPLIT")
    stream = streams[split]
    text = _join(_texts(spec, _rows(spec, stream)), characters)
    if not text.strip():
        raise InputError(f"{spec}: holds no text")
    at = f"@{commit}" if commit else ""
    return Document(f"{DATASET}{name}{at}:{stream.info.config_name}:{split}", text)


def _resolve(spec: str, name: str, revision: str | None, token: str | None) -> str | None:
    """The commit that a data set of the Hub stands at, so that every request reads the same one."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return HfApi(token=token).dataset_info(name, revision=revision).sha
    except RepositoryNotFoundError as error:
        raise InputError(
            f"{spec}: no such folder here and no such data set on the Hub (or it is private: log in)"
        ) from error
    except RevisionNotFoundError as error:
        raise InputError(f"{spec}: no revision {revision!r} on the Hub") from error
    except HFValidationError as error:
        raise InputError(f"{spec}: no such folder, and not a valid Hub id") from error
    except Exception as error:  # offline, a proxy, a malformed HF_ENDPOINT: whatever the HTTP client raises
        raise InputError(
            f"{spec}: the Hub cannot be asked ({_reason(error)}); expected a connection, or a folder of the data"
        ) from error


def _reason(error: Exception) -> str:
    """What an exception says, without the examples and links of its further lines."""
    return " ".join(str(error).splitlines()[:2]) or type(error).__name__


def _rows(spec: str, stream: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    try:
        yield from stream
    except Exception as error:  # its readers raise whatever they meet
        raise InputError(f"{spec}: cannot be read ({_reason(error)})") from error


def _texts(spec: str, rows: Iterator[dict[str, Any]]) -> Iterator[str]:
    """The text of each row; empty rows are kept, as perplexity on WikiText is usually measured."""
    column = None
    for row in rows:
        column = column or _text_column(spec, row)
        value = row[column]
        if isinstance(value, list):
            yield "\n\n".join(message_text(message) for message in value if isinstance(message, dict))
        elif isinstance(value, str):
            yield value


def _text_column(spec: str, row: dict[str, Any]) -> str:
    strings = [column for column, value in row.items() if isinstance(value, str)]
    for column in ("text", "content"):
        if column in strings:
            return column
    if isinstance(row.get("messages"), list):
        return "messages"
    if len(strings) == 1:
        return strings[0]
    raise InputError(
        f"{spec}: expected a column `text`, `content` or `messages`, or a single column of strings; "
        f"found {', '.join(row) or 'none'}"
    )


def _join(texts: Iterator[str], characters: int) -> str:
    taken, total = [], 0
    for text in texts:
        taken.append(text)
        total += len(text) + 2
        if total >= characters:
            break
    return "\n\n".join(taken)[:characters]
