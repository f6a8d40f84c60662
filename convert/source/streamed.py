"""A Hub checkpoint larger than the disk: a shard is fetched when a tensor of it is wanted, and soon deleted.

Layer by layer is also shard by shard, nearly. Kept are as many shards as one layer's tensors lie in, and those with
tensors outside the layers, which a pass wants both first and last: so it fetches each shard once.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from latentfold.convert.errors import InputError
from latentfold.convert.source.checkpoint import Checkpoint
from latentfold.convert.source.hub import fetch, with_headers


def layer_of(name: str) -> int | None:
    """Number of the layer that a tensor belongs to, by its name (`<prefix>.<number>.`), or None."""
    found = re.match(r"(?:[^.]+\.)*?(\d+)\.", name)
    return int(found[1]) if found else None


@dataclass
class StreamedCheckpoint(Checkpoint):
    """A `Checkpoint` whose shards come and go, in a folder of their own under HF_HOME.

    Attributes:
        token: Hub token.
        here: the shards on disk.
    """

    token: str | None = None
    here: set[str] = field(default_factory=set)
    _folder: TemporaryDirectory | None = None

    def path(self, name: str) -> Path:
        """Where a tensor's shard lies, fetched if it is not there; the one that is wanted last makes room.

        Raises:
            InputError: the Hub does not give it.
        """
        if self._folder is None:
            from huggingface_hub import constants

            os.makedirs(constants.HF_HOME, exist_ok=True)
            self._folder = TemporaryDirectory(prefix="latentfold-shards-", dir=constants.HF_HOME)
        folder, file = Path(self._folder.name), self.headers[name].file
        if file in self.here:
            return folder / file
        now = layer_of(name) or 0
        while len(self.here) >= self.room:
            last = max(self.here, key=lambda shard: self._layers_until(shard, now))
            (folder / last).unlink()
            self.here.remove(last)
        assert self.revision is not None
        fetch(self.name, [file], self.revision, self.token, local_dir=folder)
        self.here.add(file)
        return folder / file

    @cached_property
    def _files(self) -> dict[int | None, set[str]]:
        """The shards in which each layer's tensors lie; None: those outside the layers."""
        found: dict[int | None, set[str]] = defaultdict(set)
        for name, header in self.headers.items():
            found[layer_of(name)].add(header.file)
        return found

    @property
    def room(self) -> int:
        """How many shards are kept."""
        return max(len(files | self._files[None]) for files in list(self._files.values()))

    def _layers_until(self, file: str, now: int) -> int:
        """How many layers after layer `now` a shard is wanted next; the first follows the last."""
        if file in self._files[None]:
            return 0
        layers = [layer for layer in self._files if layer is not None]
        return min((layer - now) % (max(layers) + 1) for layer in layers if file in self._files[layer])

    def stamps(self) -> dict[str, list[int]]:
        """Nothing: the commit says which files these are."""
        return {}


def stream(checkpoint: Checkpoint, token: str | None = None) -> StreamedCheckpoint:
    """The checkpoint with its headers, and shards that are fetched when they are needed.

    Raises:
        InputError: a local folder, or no connection to the Hub.
    """
    if checkpoint.revision is None:
        raise InputError(f"stream {checkpoint.name}: a folder on this disk; expected a Hub id")
    described = with_headers(checkpoint, token)
    if not described.headers:
        raise InputError(f"stream {checkpoint.name}: needs the Hub, but HF_HUB_OFFLINE is set")
    return StreamedCheckpoint(
        described.folder, described.name, described.revision, described.config, described.headers, token
    )
