"""One run at a time in one output folder."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from latentfold.convert.errors import InputError
from latentfold.convert.files import replace_text

PARTIAL = ".latentfold-partial"
"""Subfolder of the output that holds everything until the end."""

LOCK, OWNER = "lock", "lock.owner"
"""Files in it: what the system locks, and who did. What a killed process leaves of them locks nothing."""

PATIENCE = 0.5
"""Seconds to wait: a run that is just ending lets go, one that has just begun gives its name."""


@contextmanager
def held(out: Path) -> Iterator[None]:
    """Keep other runs out of `out`, on this machine and on those that share the file system.

    `out` is made where it is missing, and removed again where nothing was written to it.

    Raises:
        InputError: another run holds it; the message says who.
    """
    folder, made = out / PARTIAL, not out.exists()
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=PATIENCE)
    except Timeout:
        raise InputError(
            f"{out}: another conversion is writing to it ({_owner(folder)}); "
            "wait for it or end it, or choose another folder"
        ) from None
    try:
        (folder / OWNER).unlink(missing_ok=True)  # of a killed process
        since = datetime.now(UTC).isoformat(" ", timespec="seconds")
        with suppress(OSError):  # on a full disk, of which the writer has more to say
            replace_text(folder / OWNER, f"process {os.getpid()} on {platform.node()} since {since}")
        yield
    finally:
        (folder / OWNER).unlink(missing_ok=True)
        with suppress(PermissionError):  # Windows, where letting go removes it
            # while it is held: who has it open already sees that it is gone
            (folder / LOCK).unlink(missing_ok=True)
        lock.release()
        with suppress(OSError):  # not empty: the run goes on another time
            folder.rmdir()
            if made:
                out.rmdir()


def check_free(out: Path) -> None:
    """Refuse a folder that another run holds; what a killed one left of its lock goes.

    Raises:
        InputError: see `held`.
    """
    if (out / PARTIAL / LOCK).exists():
        with held(out):
            pass


def _owner(folder: Path) -> str:
    try:
        return (folder / OWNER).read_text(encoding="utf-8")
    except OSError:
        return "which one is not known"
