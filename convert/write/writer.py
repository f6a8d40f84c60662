"""Writing a sharded checkpoint in place, tensor by tensor, resumably.

All names, shapes and dtypes are known beforehand, so each shard's header is written first and every tensor goes
straight to its offset: no more than one layer is held in memory, and an interrupted run keeps what it has. Until
the end everything lies in a subfolder that no loader looks into; `config.json`, without which nothing loads, is moved
last. A run that died at any moment is continued to the same bytes: the journal is replaced whole, shards are filled
in place, and what else lies in the subfolder is written anew.

Safetensors format: 8 bytes little-endian header length, JSON header, tensor bytes
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from latentfold.convert.dtypes import stored_name
from latentfold.convert.errors import InputError
from latentfold.convert.files import replace_text, sha256
from latentfold.convert.write.lock import LOCK, OWNER, PARTIAL
from latentfold.convert.write.space import reserve, room_needed

if TYPE_CHECKING:
    from huggingface_hub import StateDictSplit

    from latentfold.convert.write.tensors import TensorPlan


JOURNAL = "journal.json"

STATE = "state"
"""Folder in the subfolder for what an interrupted run needs besides its tensors."""

STAYS = {JOURNAL, LOCK, OWNER, STATE}
"""What never leaves the subfolder."""


class CheckpointWriter:
    """Writes a planned set of tensors to `out`, or continues an interrupted run with the same `key`.

    Args:
        out: the output folder.
        tensors: every tensor's plan.
        shards: which file holds which tensor.
        key: everything the tensors depend on; an interrupted run is continued only if it is equal.
        overwrite: replace what `out` holds when finishing, and discard an interrupted run with another key.

    Attributes:
        records: what was noted of each step done.
        moving: an earlier run was interrupted after everything was written, while moving it to its place.

    Raises:
        InputError: `out` holds an interrupted run with another key; here and when anything is written: no room.
    """

    def __init__(
        self,
        out: Path,
        tensors: Mapping[str, TensorPlan],
        shards: StateDictSplit,
        key: Mapping[str, Any],
        *,
        overwrite: bool = False,
    ) -> None:
        self.out, self.tensors, self.shards = out, tensors, shards
        self.folder = out / PARTIAL
        self.key = json.loads(json.dumps(key))
        self.overwrite = overwrite
        self.records: dict[str, Any] = {}
        self.moving: list[str] = []
        self._offsets: dict[str, tuple[Path, int]] = {}
        layouts = {self.folder / file: self._layout(file, names) for file, names in shards.filename_to_tensors.items()}
        previous, continued = _read_journal(out), False
        if previous is not None and previous.get("key") == self.key:
            self.moving = previous["moving"]
            self.overwrite |= previous["overwrite"]
            continued = all(path.is_file() and path.stat().st_size == size for path, (_, size) in layouts.items())
            self.records = previous["records"] if continued or self.moving else {}
        elif previous is not None and not overwrite:
            raise InputError(
                f"{out}: holds an interrupted conversion with other options; "
                "repeat those, choose another folder or pass overwrite"
            )
        with self._room():
            if not self.moving:
                self._start(layouts, continued)
            self._write_journal()

    def _start(self, layouts: Mapping[Path, tuple[bytes, int]], continued: bool) -> None:
        """Throw away whatever is not to be continued, and make the shards where that is everything."""
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = {path.name for path in layouts} | STAYS if continued else {LOCK, OWNER}
        for path in self.folder.iterdir():
            if path.name not in kept:
                _delete(path)
        if continued:
            return
        try:
            for path, (header, size) in layouts.items():
                path.write_bytes(header)
                reserve(path, size)
        except OSError:
            for path in layouts:
                path.unlink(missing_ok=True)
            raise

    def _room(self) -> AbstractContextManager[None]:
        return room_needed(self.out, sum(plan.nbytes for plan in self.tensors.values()))

    @staticmethod
    def files_being_moved(out: Path) -> set[str]:
        """Names that a run interrupted while finishing may already have moved to `out`."""
        return set((_read_journal(out) or {}).get("moving", []))

    @staticmethod
    def is_interrupted(out: Path) -> bool:
        """Whether `out` holds a run that has not finished."""
        return (out / PARTIAL / JOURNAL).exists()

    @staticmethod
    def continues(out: Path, key: Mapping[str, Any]) -> bool:
        """Whether `out` holds a run of this key that has not finished."""
        return CheckpointWriter.interrupted_key(out) == json.loads(json.dumps(key))

    @staticmethod
    def interrupted_key(out: Path) -> dict[str, Any] | None:
        """The key of an interrupted run in `out`, if there is one."""
        return (_read_journal(out) or {}).get("key")

    def _write_journal(self) -> None:
        state = {
            "key": self.key,
            "records": self.records,
            "moving": self.moving,
            "overwrite": self.overwrite,
        }
        replace_text(self.folder / JOURNAL, json.dumps(state))

    def _layout(self, file: str, names: Iterable[str]) -> tuple[bytes, int]:
        """A shard's header and size; notes where each tensor goes."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            plan = self.tensors[name]
            header[name] = {
                "dtype": stored_name(plan.dtype),
                "shape": list(plan.shape),
                "data_offsets": [end, end + plan.nbytes],
            }
            end += plan.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        for name in names:
            self._offsets[name] = (self.folder / file, start + header[name]["data_offsets"][0])
        return len(text).to_bytes(8, "little") + text, start + end

    def done(self, step: str) -> bool:
        """Whether `step` was completed, now or in an interrupted run."""
        return step in self.records

    def write(self, step: str, tensors: Mapping[str, Tensor], record: Any = None) -> None:
        """Write the tensors of one step, then note it as done together with a JSON-able `record`."""
        touched: set[Path] = set()
        for name, tensor in tensors.items():
            plan = self.tensors[name]
            if tuple(tensor.shape) != plan.shape:
                raise RuntimeError(f"{name}: planned {plan.shape}, got {tuple(tensor.shape)}")
            stored = tensor.detach().to("cpu", plan.dtype).contiguous()
            if not torch.isfinite(stored).all():
                raise RuntimeError(f"{name}: holds infinite or undefined values; nothing was finished")
            path, offset = self._offsets[name]
            with self._room(), open(path, "r+b") as file:
                file.seek(offset)
                file.write(stored.view(torch.uint8).numpy().data)
            touched.add(path)
        with self._room():
            for path in touched:
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            self.records[step] = record
            self._write_journal()

    def read(self, prefix: str) -> dict[str, Tensor]:
        """The tensors already written whose names start with `prefix`."""
        shards: dict[Path, list[str]] = {}
        for name, (path, _) in self._offsets.items():
            if name.startswith(prefix):
                shards.setdefault(path, []).append(name)
        found: dict[str, Tensor] = {}
        for path, names in shards.items():
            with safe_open(path, framework="pt") as shard:
                found |= {name: shard.get_tensor(name) for name in names}
        return found

    def write_text(self, name: str, text: str) -> None:
        """Put a text file into the checkpoint."""
        with self._room():
            replace_text(self.folder / name, text)

    def copy(self, files: Mapping[str, Path]) -> None:
        """Put copies of files into the checkpoint, each under its name there: `folder/file` for one in a sub-folder."""
        with self._room():
            for name, path in files.items():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, self.folder / name)

    def state(self) -> Path:
        """A folder that an interrupted run finds again as it left it, and that goes with the end."""
        (self.folder / STATE).mkdir(exist_ok=True)
        return self.folder / STATE

    def write_index(self) -> None:
        """Write the index of a checkpoint of several shards."""
        if len(self.shards.filename_to_tensors) > 1:
            index = {"metadata": self.shards.metadata, "weight_map": self.shards.tensor_to_filename}
            self.write_text("model.safetensors.index.json", json.dumps(index, indent=2) + "\n")

    def hashes(self) -> dict[str, str]:
        """SHA-256 of every file that will be in the output, but for the one that holds the hashes.

        Files in sub-folders are named `folder/file`.
        """
        files = {path.relative_to(self.folder).as_posix(): path for path in self.folder.rglob("*") if path.is_file()}
        return {name: sha256(files[name]) for name in sorted(files) if name.split("/")[0] not in STAYS}

    def finish(self) -> None:
        """Move everything to its final place, config.json last; interrupted, it is taken up again."""
        if not self.moving:
            self.moving = sorted(self._waiting())
            with self._room():
                self._write_journal()
        waiting = self._waiting()
        for path in self.out.iterdir() if self.overwrite else ():
            old = path.name not in self.moving or path.name in waiting
            if old and path.name != PARTIAL:
                _delete(path)
        for name in sorted(waiting, key=lambda name: name == "config.json"):
            os.replace(self.folder / name, self.out / name)
        shutil.rmtree(self.folder / STATE, ignore_errors=True)
        (self.folder / JOURNAL).unlink()
        with suppress(OSError):  # the lock goes with whoever holds it
            self.folder.rmdir()

    def _waiting(self) -> set[str]:
        """Files and folders that are to be moved."""
        return {path.name for path in self.folder.iterdir()} - STAYS


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _read_journal(out: Path) -> dict[str, Any] | None:
    try:
        data = json.loads((out / PARTIAL / JOURNAL).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None
