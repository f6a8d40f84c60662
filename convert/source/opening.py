"""From a folder or a Hub id to a checkpoint."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NoReturn

from latentfold.convert.errors import InputError
from latentfold.convert.files import read_json
from latentfold.convert.source.checkpoint import INDEX, SINGLE, Checkpoint
from latentfold.convert.source.hub import fetch

CONFIG, ADAPTER = "config.json", "adapter_config.json"


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
        InputError: no such folder or repository, no access, no usable config.json, an adapter alone, or a revision
            of a folder.
    """
    name = os.fspath(name)
    if is_local(name):
        folder = Path(name)
        if not os.path.isdir(name):
            raise InputError(f"{name}: no such folder, and not a Hub id of the form org/model")
        whole = any((folder / file).is_file() for file in (SINGLE, INDEX))  # trainers put config.json beside an adapter
        if (folder / ADAPTER).is_file() and not (whole and (folder / CONFIG).is_file()):
            _refuse_adapter(name, folder)
        if not (folder / CONFIG).is_file():
            raise InputError(f"{name}: no {CONFIG}; expected the folder of a transformers checkpoint")
        if revision is not None:
            raise InputError(f"revision {revision}: {name} is a folder on this disk; expected a Hub id")
        return Checkpoint(folder, name, None, read_json(folder / CONFIG))
    folder = fetch(name, [CONFIG, ADAPTER], revision, token)
    if not (folder / CONFIG).is_file():
        if (folder / ADAPTER).is_file():
            _refuse_adapter(name, folder)
        raise InputError(f"{name}: no {CONFIG} on the Hub (or in the local cache); expected a transformers model")
    return Checkpoint(folder, name, folder.name, read_json(folder / CONFIG))


def _refuse_adapter(name: str, folder: Path) -> NoReturn:
    adapter = read_json(folder / ADAPTER)
    base = adapter.get("base_model_name_or_path") or f"a model that its {ADAPTER} does not name"
    raise InputError(
        f"{name}: an adapter ({adapter.get('peft_type', 'PEFT')}) for {base}, not a whole model; merge the two and "
        f"take the result: peft.AutoPeftModelForCausalLM.from_pretrained({name!r}).merge_and_unload()"
        '.save_pretrained("merged"), and the tokenizer beside it'
    )
