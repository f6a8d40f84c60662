"""A source checkpoint: a local folder or a Hub id, its config, and its tensors one at a time.

Safetensors format: 8 bytes little-endian header length, JSON header, tensor bytes
(https://github.com/huggingface/safetensors#format). Tensors are read from where their header says and not through a
map of the file, whose every page that was once read would count as held.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from latentfold.convert.dtypes import STORED
from latentfold.convert.errors import InputError
from latentfold.convert.files import read_json

INDEX = "model.safetensors.index.json"

SINGLE = "model.safetensors"


@dataclass(frozen=True)
class TensorHeader:
    """Where a tensor lies and what its file's header says of it.

    Attributes:
        offset: of its first byte among the bytes of all the file's tensors.
    """

    file: str
    shape: tuple[int, ...]
    dtype: str
    offset: int


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
    _sound: set[str] = field(init=False, repr=False, compare=False, default_factory=set)

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
                with safe_open(path, framework="pt"):  # it is complete and its header sound
                    found = _header(path)
            except (SafetensorError, OSError) as error:
                raise InputError(f"{path}: not a complete safetensors file ({error}); download it again") from error
            for name, info in found.items():
                if expected is None or name in expected:
                    offset = info["data_offsets"][0]
                    self.headers[name] = TensorHeader(file, tuple(info["shape"]), info["dtype"], offset)
        if not self.headers:
            raise InputError(f"{self.name}: its safetensors hold no tensors; download the checkpoint again")

    def tensor(self, name: str) -> Tensor:
        """One tensor as stored; its values are checked when it is first read.

        Raises:
            InputError: the checkpoint has no tensor of that name, its file has changed, or it holds infinite or
                undefined values.
        """
        if name not in self.headers:
            raise InputError(f"tensor {name} is missing from {self.name}")
        header = self.headers[name]
        if header.dtype not in STORED:
            raise InputError(f"tensor {name} in {header.file}: expected {', '.join(STORED)}, found {header.dtype}")
        tensor = torch.empty(header.shape, dtype=STORED[header.dtype])
        with open(self.path(name), "rb") as file:
            file.seek(_start(file) + header.offset)
            if file.readinto(tensor.reshape(-1).view(torch.uint8).numpy().data) != tensor.nbytes:
                raise InputError(f"tensor {name} in {header.file}: the file ends within it; download it again")
        if name not in self._sound:
            if tensor.numel() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
                raise InputError(f"tensor {name} in {header.file}: holds infinite or undefined values")
            self._sound.add(name)
        return tensor

    def path(self, name: str) -> Path:
        """Where a tensor's shard lies."""
        return self.folder / self.headers[name].file

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


def _start(file: BinaryIO) -> int:
    """Where the header of a safetensors file ends and the tensors begin."""
    return 8 + int.from_bytes(file.read(8), "little")


def _header(path: Path) -> dict[str, Any]:
    """What a safetensors file says of each of its tensors."""
    with open(path, "rb") as file:
        found: dict[str, Any] = json.loads(file.read(_start(file) - 8))
    found.pop("__metadata__", None)
    return found


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
