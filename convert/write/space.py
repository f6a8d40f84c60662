"""Room on the disk: asked for beforehand, and named when there is none."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from latentfold.convert.errors import InputError
from latentfold.convert.formats import size

REASONS = {
    errno.ENOSPC: "it is full; make room and repeat the command: it continues",
    errno.EDQUOT: "your quota there is used up; make room and repeat the command: it continues",
    errno.EFBIG: "no file may grow as large there; lift the limit (ulimit -f) or pass a smaller max_shard_size",
}


def check_room(out: Path, nbytes: int, there: Iterable[Path]) -> None:
    """Refuse to begin what will not fit.

    Args:
        out: where it goes; it need not exist.
        nbytes: size of it all.
        there: files and folders of an earlier run, if they exist: what they take up counts as written.

    Raises:
        InputError: the file system has less room than is still missing.
    """
    held = sum(map(_allocated, there))
    total, free = _capacity(out)
    if total and nbytes - held > free:
        written = f", {size(held)} of it are there" if held else ""
        raise InputError(f"{_facts(out, nbytes)}{written}: it will not fit; make room or choose another folder")


@contextmanager
def room_needed(out: Path, nbytes: int) -> Iterator[None]:
    """Say what was to be written where, should it not fit.

    Raises:
        InputError: the disk is full, a quota used up, or a file would grow too large.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in REASONS:
            raise
        raise InputError(f"{_facts(out, nbytes)}: {REASONS[error.errno]}") from error


def reserve(path: Path, nbytes: int) -> None:
    """Let a file be `nbytes` long, and the disk be full now rather than hours later, where the system can tell."""
    with open(path, "r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        except AttributeError:  # macOS, Windows
            file.truncate(nbytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # some file systems
                raise
            file.truncate(nbytes)


def _facts(out: Path, nbytes: int) -> str:
    total, free = _capacity(out)
    has = f"has {size(free)} free" if total else "does not say what is free"
    return f"{out}: the checkpoint takes {size(nbytes)}, its file system ({_mount(out)}) {has}"


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path.resolve()


def _capacity(out: Path) -> tuple[int, int]:
    """Bytes of the file system, bytes free for this user; zeros where it does not tell."""
    usage = shutil.disk_usage(_existing(out))
    return usage.total, usage.free


def _mount(out: Path) -> Path:
    path = _existing(out)
    while not os.path.ismount(path):
        path = path.parent
    return path


def _allocated(path: Path) -> int:
    """Bytes on the disk of a file, or of everything in a folder: files that are sparse take up less than their size."""
    files = path.rglob("*") if path.is_dir() else (path,)
    stats = [file.stat() for file in files if file.is_file()]
    return sum(stat.st_blocks * 512 if hasattr(stat, "st_blocks") else stat.st_size for stat in stats)
