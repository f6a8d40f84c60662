"""A source checkpoint: a local folder or a Hub id, its config, and its tensors one at a time."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from latentfold.convert.errors import InputError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SMALL_FILES = ["*.json", "*.jinja", "*.model", "tokenizer*", "*.txt", "LICENSE*"]
"""Everything but weights: config, generation config, tokenizer of any kind, chat template, licence."""


@dataclass(frozen=True)
class TensorHeader:
    """Where a tensor lies and what its file's header says of it."""

    file: str
    shape: tuple[int, ...]
    dtype: str


@dataclass
class Checkpoint:
    """A folder of safetensors, read lazily.

    Attributes:
        folder: where the files are.
        name: what the user called it (folder or Hub id).
        revision: the commit it was resolved to, for a Hub id.
        config: config.json as it stands.
    """

    folder: Path
    name: str
    revision: str | None
    config: dict[str, Any]
    headers: dict[str, TensorHeader] = field(default_factory=dict)

    def read_headers(self) -> None:
        """Read every shard's header, so that missing, misshapen and truncated tensors show before work starts.

        Raises:
            InputError: no safetensors, a shard is missing, or a file is cut off.
        """
        self.headers = {}
        for file, expected in _shards(self.folder).items():
            path = self.folder / file
            if not path.is_file():
                raise InputError(f"{file}: listed in {INDEX} but not in {self.folder}; download the checkpoint again")
            try:
                with safe_open(path, framework="pt") as shard:
                    for name in shard.keys():  # noqa: SIM118 - safe_open is not a mapping
                        if expected is None or name in expected:
                            part = shard.get_slice(name)
                            self.headers[name] = TensorHeader(file, tuple(part.get_shape()), part.get_dtype())
            except (SafetensorError, OSError) as error:
                raise InputError(f"{path}: not a complete safetensors file ({error}); download it again") from error

        if not self.headers:
            raise InputError(f"{self.name}: its safetensors hold no tensors; download the checkpoint again")

    def tensor(self, name: str) -> Tensor:
        """One tensor as stored.

        Raises:
            InputError: the checkpoint has no tensor of that name.
        """
        if name not in self.headers:
            raise InputError(f"tensor {name} is missing from {self.name}")
        with safe_open(self.folder / self.headers[name].file, framework="pt") as shard:
            return shard.get_tensor(name)

    def check_values(self) -> None:
        """Read everything once, so that damage shows before anything is written.

        Raises:
            InputError: a tensor holds infinite or undefined values.
        """
        for name, header in self.headers.items():
            if not torch.isfinite(self.tensor(name)).all():
                raise InputError(f"tensor {name} in {header.file}: holds infinite or undefined values")

    def stamps(self) -> dict[str, list[int]]:
        """Size and modification time (ns) of every shard: whether the source is still the same."""
        stats = {file: (self.folder / file).stat() for file in sorted({h.file for h in self.headers.values()})}
        return {file: [stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()}

    @property
    def dtype(self) -> torch.dtype:
        """The float dtype most bytes are stored in."""
        sizes: dict[str, int] = {}
        for header in self.headers.values():
            sizes[header.dtype] = sizes.get(header.dtype, 0) + torch.Size(header.shape).numel()
        name = max(sizes, key=lambda key: sizes[key])
        known = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
        if name not in known:
            raise InputError(f"{self.name}: weights are stored as {name}; expected F16, BF16 or F32 safetensors")
        return known[name]


def _shards(folder: Path) -> dict[str, set[str] | None]:
    """File -> names it should hold (None: all). `consolidated*` and other duplicates are not listed, so not read."""
    index = folder / INDEX
    if index.is_file():
        files: dict[str, set[str] | None] = {}
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise InputError(f"{index}: expected a `weight_map` from tensor names to files")
        for name, file in weight_map.items():
            names = files.setdefault(file, set())
            assert names is not None
            names.add(name)
        return files
    if (folder / SINGLE).is_file():
        return {SINGLE: None}
    pickles = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pth"))
    if pickles:
        raise InputError(
            f"{folder}: only pickled weights ({pickles[0]}), which can run code when loaded; "
            "expected safetensors (re-save with save_pretrained, or use the Hub's safetensors conversion)"
        )
    raise InputError(f"{folder}: no {SINGLE} and no {INDEX}; expected a safetensors checkpoint")


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
        InputError: no such folder or repository, no access, or no usable config.json.
    """
    name = os.fspath(name)
    if is_local(name):
        folder = Path(name)
        if not os.path.isdir(name):
            raise InputError(f"{name}: no such folder, and not a Hub id of the form org/model")
        if not (folder / "config.json").is_file():
            raise InputError(f"{name}: no config.json; expected the folder of a transformers checkpoint")
        return Checkpoint(folder, name, None, read_json(folder / "config.json"))
    config = Path(_from_hub(name, ["config.json"], revision, token)) / "config.json"
    if not config.is_file():
        raise InputError(f"{name}: no config.json on the Hub (or in the local cache); expected a transformers model")
    return Checkpoint(config.parent, name, config.parent.name, read_json(config))


def download(checkpoint: Checkpoint, *, token: str | None = None, weights: bool = True) -> Checkpoint:
    """Bring tokenizer, generation config and (if `weights`) safetensors of a Hub checkpoint to disk.

    A local checkpoint is returned unchanged. Only the shards that the index names are fetched: a repository often also
    holds pickles, GGUF or `consolidated*` copies of the same weights.
    """
    if checkpoint.revision is None:
        return checkpoint
    folder = Path(_from_hub(checkpoint.name, SMALL_FILES, checkpoint.revision, token))
    if weights:
        index = folder / INDEX
        wanted = sorted(_shards(folder)) if index.is_file() else [SINGLE]
        folder = Path(_from_hub(checkpoint.name, wanted, checkpoint.revision, token))
    return Checkpoint(folder, checkpoint.name, checkpoint.revision, checkpoint.config)


def with_headers(checkpoint: Checkpoint, token: str | None = None) -> Checkpoint:
    """The checkpoint with its tensors' headers: read from disk, or of a Hub checkpoint fetched by range requests.

    Offline, a Hub checkpoint comes back without headers; they are read once its files are found in the cache.

    Raises:
        InputError: no safetensors, or files that are cut off.
    """
    if checkpoint.revision is None:
        checkpoint.read_headers()
        return checkpoint
    from huggingface_hub import constants, get_safetensors_metadata
    from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError

    if constants.HF_HUB_OFFLINE:
        return checkpoint
    try:
        found = get_safetensors_metadata(checkpoint.name, revision=checkpoint.revision, token=token)
    except NotASafetensorsRepoError as error:
        raise InputError(
            f"{checkpoint.name}: the repository has no {SINGLE} and no {INDEX}; expected safetensors"
        ) from error
    except SafetensorsParsingError as error:
        raise InputError(f"{checkpoint.name}: a safetensors file on the Hub is damaged ({error})") from error
    except (HfHubHTTPError, OSError) as error:
        raise InputError(f"{checkpoint.name}: the Hub answered with an error: {str(error).splitlines()[0]}") from error
    headers = {
        name: TensorHeader(file, tuple(info.shape), info.dtype)
        for file, metadata in found.files_metadata.items()
        for name, info in metadata.tensors.items()
    }
    return replace(checkpoint, headers=headers)


def _from_hub(name: str, patterns: list[str], revision: str | None, token: str | None) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return str(snapshot_download(name, revision=revision, token=token, allow_patterns=patterns))
    except GatedRepoError as error:
        raise InputError(
            f"{name}: gated; accept its terms on the Hub and log in (hf auth login) or pass --token"
        ) from error
    except RepositoryNotFoundError as error:
        raise InputError(
            f"{name}: no such folder here and no such repository on the Hub (or it is private: log in)"
        ) from error
    except RevisionNotFoundError as error:
        raise InputError(f"{name}: no revision {revision!r} on the Hub") from error
    except LocalEntryNotFoundError as error:
        raise InputError(f"{name}: not in the local cache and the Hub cannot be reached (offline?)") from error
    except HFValidationError as error:
        raise InputError(f"{name}: no such folder, and not a valid Hub id") from error
    except (HfHubHTTPError, OSError) as error:
        raise InputError(f"{name}: the Hub answered with an error: {str(error).splitlines()[0]}") from error
    except ValueError as error:  # such as a malformed HF_ENDPOINT
        raise InputError(f"{name}: the Hub cannot be asked: {str(error).splitlines()[0]}") from error
