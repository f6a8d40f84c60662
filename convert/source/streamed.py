"""A Hub checkpoint larger than the disk: a shard is fetched when a tensor of it is wanted, and soon deleted.

Layer by layer is also shard by shard, nearly: two shards are kept, because one layer's tensors may lie in two. Every
pass over the model fetches it again.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from latentfold.convert.errors import InputError
from latentfold.convert.source.checkpoint import Checkpoint
from latentfold.convert.source.hub import fetch, with_headers

KEPT_SHARDS = 2


@dataclass
class StreamedCheckpoint(Checkpoint):
    """A `Checkpoint` whose shards come and go, in a folder of their own under HF_HOME.

    Attributes:
        token: Hub token.
        here: the shards on disk, least recently used first.
        needed: tensors to be checked when their shard comes.
    """

    token: str | None = None
    here: list[str] = field(default_factory=list)
    needed: Collection[str] = ()
    _shards: TemporaryDirectory | None = None

    def path(self, file: str) -> Path:
        """A shard on disk, fetched if it is not there; the least recently used one makes room.

        Raises:
            InputError: the Hub does not give it, or it holds infinite or undefined values.
        """
        if self._shards is None:
            from huggingface_hub import constants

            os.makedirs(constants.HF_HOME, exist_ok=True)
            self._shards = TemporaryDirectory(prefix="latentfold-shards-", dir=constants.HF_HOME)
        folder = Path(self._shards.name)
        if file in self.here:
            self.here.remove(file)
            self.here.append(file)
            return folder / file
        while len(self.here) >= KEPT_SHARDS:
            (folder / self.here.pop(0)).unlink()
        assert self.revision is not None
        fetch(self.name, [file], self.revision, self.token, local_dir=folder)
        self.here.append(file)
        super().check_values([name for name in self.needed if self.headers[name].file == file])
        return folder / file

    def check_values(self, names: Collection[str]) -> None:
        """Nothing yet: every shard is checked when it comes."""
        self.needed = names

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
