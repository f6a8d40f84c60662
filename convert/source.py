"""A source checkpoint: a local folder or a Hub id, its config, and its tensors one at a time."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from latentfold.convert.checkpoint import sha256
from latentfold.convert.errors import InputError

if TYPE_CHECKING:
    from huggingface_hub import RepoFile

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LEGAL_FILES = ["LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*"]
"""What a licence usually demands to go with every copy."""
SMALL_FILES = ["*.json", "*.jinja", "*.model", "tokenizer*", "*.txt", "README.md", *LEGAL_FILES]
"""Everything but weights: config, generation config, tokenizer of any kind, chat template, licence, model card."""


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
        with safe_open(self.path(self.headers[name].file), framework="pt") as shard:
            return shard.get_tensor(name)

    def path(self, file: str) -> Path:
        """Where a shard lies."""
        return self.folder / file

    def check_values(self, names: Collection[str]) -> None:
        """Read tensors once, file by file, so that damage shows before anything is written.

        Raises:
            InputError: one holds infinite or undefined values.
        """
        for name in sorted(names, key=lambda name: self.headers[name].file):  # a shard at a time
            if not torch.isfinite(self.tensor(name)).all():
                raise InputError(f"tensor {name} in {self.headers[name].file}: holds infinite or undefined values")

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
        known = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
        floats = [name for name in sizes if name in known]  # old checkpoints hold masks too
        if not floats:
            found = ", ".join(sorted(sizes))
            raise InputError(f"{self.name}: weights are stored as {found}; expected F16, BF16 or F32 safetensors")
        return known[max(floats, key=lambda name: sizes[name])]


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


def public_name(name: str) -> str:
    """What a record that may be published calls a model, a file or a data set: an absolute path by its last part."""
    scheme = "hf:" if name.startswith("hf:") else ""
    path = name.removeprefix(scheme)
    return scheme + (Path(path).name if os.path.isabs(path) else path)


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
            raise InputError(f"--revision {revision}: {name} is a folder on this disk; expected a Hub id")
        return Checkpoint(folder, name, None, read_json(folder / "config.json"))
    config = fetch(name, ["config.json"], revision, token) / "config.json"
    if not config.is_file():
        raise InputError(f"{name}: no config.json on the Hub (or in the local cache); expected a transformers model")
    return Checkpoint(config.parent, name, config.parent.name, read_json(config))


def download(checkpoint: Checkpoint, *, token: str | None = None, weights: bool = True) -> Checkpoint:
    """Bring tokenizer, generation config and (if `weights`) safetensors of a Hub checkpoint to disk.

    A local checkpoint is returned unchanged. Only the shards that the index names are fetched: a repository often also
    holds pickles, GGUF or `consolidated*` copies of the same weights.

    Raises:
        InputError: see `fetch`.
    """
    if checkpoint.revision is None:
        return checkpoint
    folder = fetch(checkpoint.name, SMALL_FILES, checkpoint.revision, token)
    if weights:
        index = folder / INDEX
        wanted = sorted(_shards(folder)) if index.is_file() else [SINGLE]
        folder = fetch(checkpoint.name, wanted, checkpoint.revision, token)
    return Checkpoint(folder, checkpoint.name, checkpoint.revision, checkpoint.config)


def same_content(path: Path, remote: RepoFile) -> bool:
    """Whether a file is, by size and hash, the one that the Hub describes."""
    if not path.is_file() or path.stat().st_size != remote.size:
        return False
    if remote.lfs is not None:
        return sha256(path) == remote.lfs.sha256
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == remote.blob_id


def card_metadata(folder: Path) -> dict[str, Any]:
    """The metadata at the head of a folder's README.md; empty where there is none that can be read."""
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    try:
        return ModelCard.load(folder / "README.md", ignore_metadata_errors=True).data.to_dict()
    except (OSError, ValueError, TypeError, YAMLError):
        return {}


def copy_legal_files(source: Path, target: Path) -> None:
    """Take along what the source's licence wants in every copy."""
    for pattern in LEGAL_FILES:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, target / path.name)


def with_headers(checkpoint: Checkpoint, token: str | None = None) -> Checkpoint:
    """The checkpoint with its tensors' headers: read from disk, or of a Hub checkpoint fetched by range requests.

    Offline, a Hub checkpoint comes back without headers; they are read once its files are found in the cache.

    Raises:
        InputError: no safetensors, files that are cut off, or the Hub refuses.
    """
    if checkpoint.revision is None:
        checkpoint.read_headers()
        return checkpoint
    from huggingface_hub import constants, get_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    if constants.HF_HUB_OFFLINE:
        return checkpoint
    try:
        with hub_errors(checkpoint.name, checkpoint.revision):
            found = get_safetensors_metadata(checkpoint.name, revision=checkpoint.revision, token=token)
    except NotASafetensorsRepoError as error:
        raise InputError(
            f"{checkpoint.name}: the repository has no {SINGLE} and no {INDEX}; expected safetensors"
        ) from error
    except SafetensorsParsingError as error:
        raise InputError(f"{checkpoint.name}: a safetensors file on the Hub is damaged ({error})") from error
    headers = {
        name: TensorHeader(file, tuple(info.shape), info.dtype)
        for file, metadata in found.files_metadata.items()
        for name, info in metadata.tensors.items()
    }
    return replace(checkpoint, headers=headers)


def fetch(
    name: str, patterns: list[str], revision: str | None, token: str | None, local_dir: Path | None = None
) -> Path:
    """Bring files of a Hub repository to its place in the cache, or to `local_dir`; the folder they are in.

    They are compared with the Hub's hashes: huggingface_hub notices a body that is too short, but not one that is
    wrong. Offline, files from the cache are taken as they are.

    Raises:
        InputError: the Hub refuses or cannot be reached, or a file differs.
    """
    from huggingface_hub import HfApi, RepoFile, snapshot_download
    from huggingface_hub.utils import filter_repo_objects

    with hub_errors(name, revision):
        folder = Path(
            snapshot_download(name, revision=revision, token=token, allow_patterns=patterns, local_dir=local_dir)
        )
    commit = revision if local_dir else folder.name
    try:
        with hub_errors(name, revision):
            entries = list(HfApi(token=token).list_repo_tree(name, recursive=True, revision=commit))
    except Unreachable:
        return folder
    files = [entry for entry in entries if isinstance(entry, RepoFile)]
    for file in filter_repo_objects(files, allow_patterns=patterns, key=lambda file: file.path):
        path = folder / file.path
        if not same_content(path, file):
            raise InputError(
                f"{name}: {file.path} is not what the Hub's hash says (a damaged download); "
                f"delete {path.resolve()} and repeat the command"
            )
    return folder


class Unreachable(InputError):
    """The Hub did not answer at all."""


@contextmanager
def hub_errors(repo: str, revision: str | None = None) -> Iterator[None]:
    """Turn what huggingface_hub raises in the block into one line that says what to do.

    Raises:
        InputError: the Hub refused or failed.
        Unreachable: no answer: offline, no network, or the connection broke.
    """
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # of httpx or httpx2: what this huggingface_hub uses

    try:
        yield
    except InputError:
        raise
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        # upload threads, and downloads that then looked into the cache, wrap what really happened
        cause = error.__cause__
        wrapped = isinstance(cause, HfHubHTTPError) or isinstance(error, RuntimeError)
        kind, reason = _hub_failure((wrapped and cause) or error, revision)
        raise kind(f"{repo}: {reason}") from error


def _hub_failure(error: BaseException, revision: str | None) -> tuple[type[InputError], str]:
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    said = re.sub(r"(hf_|Bearer )\S+", r"\1...", (str(error).strip().splitlines() or [type(error).__name__])[0])
    if isinstance(error, GatedRepoError):
        return InputError, "gated; accept its terms on the Hub and log in (hf auth login) or pass --token"
    if isinstance(error, RepositoryNotFoundError):
        return InputError, "no such repository on the Hub, or it is private; check the name, log in or pass --token"
    if isinstance(error, RevisionNotFoundError):
        return InputError, f"no revision {revision!r} on the Hub"
    if isinstance(error, HfHubHTTPError):
        return InputError, _status_failure(error, said)
    if isinstance(error, LocalTokenNotFoundError):
        return InputError, "not logged in; run hf auth login or pass --token"
    if isinstance(error, HFValidationError):
        return InputError, "not a Hub id; expected namespace/name"
    if isinstance(error, LocalEntryNotFoundError):
        return Unreachable, "not in the local cache, and the Hub cannot be reached (offline?)"
    if isinstance(error, OfflineModeIsEnabled):
        return Unreachable, "the Hub may not be asked while HF_HUB_OFFLINE is set"
    if isinstance(error, HTTPError):
        return Unreachable, f"the connection to the Hub failed ({said}); repeat the command to continue"
    return InputError, f"the Hub could not be used ({said})"


def _status_failure(error: Any, said: str) -> str:
    """What an HTTP error status means for who reads it."""
    status = error.response.status_code
    said = error.server_message or said
    if status == 401:
        return "the Hub does not accept the token; log in again (hf auth login) or pass another --token"
    if status == 403:
        return f"the token has no permission for this ({said}); use one with the right role, of a member"
    if status == 404:
        return f"not found on the Hub ({said}); check the name"
    if status == 412:
        return "has changed on the Hub meanwhile; nothing was overwritten, look at it and repeat the command"
    if status == 429:
        wait = error.response.headers.get("Retry-After")
        return f"too many requests; repeat the command in {f'{wait} seconds' if wait else 'a few minutes'}"
    if status >= 500:
        return f"the Hub has a problem of its own (status {status}); repeat the command later to continue"
    return f"the Hub refused (status {status}: {said})"
