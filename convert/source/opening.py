"""From a folder or a Hub id to a checkpoint."""

from __future__ import annotations

import os
import re
from pathlib import Path

from latentfold.convert.errors import InputError
from latentfold.convert.files import read_json
from latentfold.convert.source.checkpoint import Checkpoint
from latentfold.convert.source.hub import fetch


def is_local(name: str) -> bool:
    """Whether `name` means a folder (it exists, or it cannot be a Hub id)."""
    try:
        exists = Path(name).exists()
    except (OSError, ValueError):
        exists = False
    return exists or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith(".")


def open_checkpoint(
    name: str | os.PathLike[str], *, revision: str | None = None, token: str | None = None
) -> Checkpoint:
    """Find a checkpoint and read its config.json, nothing more.

    A Hub id is resolved to a commit; only config.json is downloaded. HF_HUB_OFFLINE, HF_HOME, HF_ENDPOINT and the
    stored token are honoured by huggingface_hub itself.

    Raises:
        InputError: no such folder or repository, no access, no usable config.json, or a revision of a folder.
    """
    name = os.fspath(name)
    if is_local(name):
        folder = Path(name)
        if not os.path.isdir(name):
            raise InputError(f"{name}: no such folder, and not a Hub id of the form org/model")
        if not (folder / "config.json").is_file():
            raise InputError(f"{name}: no config.json; expected the folder of a transformers checkpoint")
        if revision is not None:
            raise InputError(f"revision {revision}: {name} is a folder on this disk; expected a Hub id")
        return Checkpoint(folder, name, None, read_json(folder / "config.json"))
    config = fetch(name, ["config.json"], revision, token) / "config.json"
    if not config.is_file():
        raise InputError(f"{name}: no config.json on the Hub (or in the local cache); expected a transformers model")
    return Checkpoint(config.parent, name, config.parent.name, read_json(config))
