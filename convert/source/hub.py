"""Files of the Hub, compared with its hashes."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from latentfold.convert.errors import InputError
from latentfold.convert.files import sha256
from latentfold.convert.source.checkpoint import INDEX, SINGLE, Checkpoint, TensorHeader, _shards
from latentfold.convert.source.hub_errors import Unreachable, hub_errors
from latentfold.convert.source.licence import LEGAL_FILES
from latentfold.convert.source.tokenizer import TOKENIZER_FILES

if TYPE_CHECKING:
    from huggingface_hub import RepoFile


SMALL_FILES = ["*.json", "*.txt", *TOKENIZER_FILES, "README.md", *LEGAL_FILES]
"""Everything but weights: config, generation config, tokenizer of any kind, chat template, licence, model card."""


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


UNCHECKED = ".latentfold-unchecked"
"""Beside a repository's files while some of them may not have been compared with the Hub's hashes."""


def with_headers(checkpoint: Checkpoint, token: str | None = None) -> Checkpoint:
    """The checkpoint with its tensors' headers: read from disk, or of a Hub checkpoint fetched by range requests.

    Offline, a Hub checkpoint comes back without headers; they are read once its files are found in the cache.

    Raises:
        InputError: no safetensors, files that are cut off, or the Hub refuses.
    """
    if checkpoint.revision is None:
        checkpoint.read_headers()
        return checkpoint
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    if constants.HF_HUB_OFFLINE:
        return checkpoint
    try:
        with hub_errors(checkpoint.name, checkpoint.revision):
            found = HfApi(token=token).get_safetensors_metadata(checkpoint.name, revision=checkpoint.revision)
    except NotASafetensorsRepoError as error:
        raise InputError(
            f"{checkpoint.name}: the repository has no {SINGLE} and no {INDEX}; expected safetensors"
        ) from error
    except SafetensorsParsingError as error:
        raise InputError(f"{checkpoint.name}: a safetensors file on the Hub is damaged ({error})") from error
    headers = {
        name: TensorHeader(file, tuple(info.shape), info.dtype, info.data_offsets[0])
        for file, metadata in found.files_metadata.items()
        for name, info in metadata.tensors.items()
    }
    return replace(checkpoint, headers=headers)


def fetch(
    name: str, patterns: list[str], revision: str | None, token: str | None, local_dir: Path | None = None
) -> Path:
    """Bring files of a Hub repository to its place in the cache, or to `local_dir`; the folder they are in.

    All sizes are compared with the Hub's, and the hashes of what this call brought: huggingface_hub notices a body that
    is too short, but not one that is wrong. Offline, files from the cache are taken as they are.

    Raises:
        InputError: the Hub refuses or cannot be reached, or a file differs; that one is deleted.
    """
    from huggingface_hub import HfApi, RepoFile, constants, snapshot_download
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import filter_repo_objects

    with hub_errors(name, revision):
        place = local_dir or Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")
        before = {path.resolve() for path in place.rglob("*") if path.is_file()}
        unchecked = place / UNCHECKED
        if unchecked.exists():  # a call was killed between bringing files and looking at them
            before = set()
        place.mkdir(parents=True, exist_ok=True)
        unchecked.touch()
        try:
            folder = Path(
                snapshot_download(name, revision=revision, token=token, allow_patterns=patterns, local_dir=local_dir)
            )
        except BaseException:
            if [*place.iterdir()] == [unchecked]:  # nothing came
                shutil.rmtree(place)
            raise
    commit = revision if local_dir else folder.name
    try:
        with hub_errors(name, revision):
            entries = list(HfApi(token=token).list_repo_tree(name, recursive=True, revision=commit))
    except Unreachable:
        return folder
    files = [entry for entry in entries if isinstance(entry, RepoFile)]
    damaged = []
    for file in filter_repo_objects(files, allow_patterns=patterns, key=lambda file: file.path):
        path = folder / file.path
        same = path.stat().st_size == file.size if path.resolve() in before else same_content(path, file)
        if not same:
            path.resolve().unlink(missing_ok=True)
            damaged.append(file.path)
    unchecked.unlink(missing_ok=True)
    if damaged:
        raise InputError(
            f"{name}: {', '.join(damaged)} is not what the Hub's hash says (a damaged download, now deleted); "
            "repeat the command to fetch it again"
        )
    return folder
