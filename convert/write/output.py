"""Whether a folder may be written to, and by whom."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from latentfold.convert.errors import InputError
from latentfold.convert.write.lock import PARTIAL, check_free, held
from latentfold.convert.write.space import check_room
from latentfold.convert.write.writer import CheckpointWriter


@contextmanager
def locked_output(out: Path, source: Path, *, overwrite: bool, needed: Sequence[Path] = ()) -> Iterator[None]:
    """Hold the output folder for as long as a run lasts.

    It is checked again: another run may have finished there since `check_output`.

    Raises:
        InputError: another run holds it, or see `check_output`.
    """
    with held(out):
        _check_output(out, source, overwrite, needed)
        yield


def check_output(output: str, source: Path, *, overwrite: bool, needed: Sequence[Path] = ()) -> None:
    """Refuse an output folder that cannot or must not be written.

    Args:
        source: folder of the model.  overwrite: what the folder holds may go.  needed: other files that must stay.

    Raises:
        InputError: OUT is not a folder, not empty, not writable, overlaps the source, or another run is writing to it.
    """
    if not output.strip():
        raise InputError("OUT is empty; expected a folder to write to")
    try:
        check_free(Path(output))
        _check_output(Path(output), source, overwrite, needed)
    except InputError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # names too long, link loops, NUL bytes
        raise InputError(f"{output}: not usable as a folder ({error})") from error


def check_space(out: Path, nbytes: int) -> None:
    """Refuse a conversion of `nbytes` for which the output's file system has no room; an interrupted one counts.

    Raises:
        InputError: it will not fit.
    """
    check_room(out, nbytes, [out / PARTIAL, *(out / name for name in CheckpointWriter.files_being_moved(out))])


def _check_output(output: Path, source: Path, overwrite: bool, needed: Sequence[Path]) -> None:
    out = output.absolute()
    if out.is_symlink() and not out.exists():
        raise InputError(f"{output}: is a link to nothing; expected a folder to write to")
    if (out.exists() and not out.is_dir()) or ((out / PARTIAL).exists() and not (out / PARTIAL).is_dir()):
        raise InputError(f"{output}: is a file; expected a folder to write to")
    real_out, real_source = out.resolve(), source.resolve()
    if real_out == real_source or real_source in real_out.parents:
        raise InputError(f"{output}: lies inside the source {source}; choose another folder")
    if overwrite:
        if real_out == Path.cwd() or real_out in Path.cwd().parents:
            raise InputError(f"{output}: is or holds the current folder; `overwrite` would empty it")
        for path in (real_source, *real_source.iterdir(), *needed):
            if real_out in path.resolve().parents:
                raise InputError(f"{output}: holds {path}, which is needed; `overwrite` would delete it")
    elif out.is_dir():
        found = sorted(path.name for path in out.iterdir() if path.name != PARTIAL)
        if found and not set(found) <= CheckpointWriter.files_being_moved(out):
            raise InputError(f"{output}: not empty (holds {found[0]}); choose another folder or pass overwrite")
    parent = out
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"{output}: cannot be written ({parent} is not a writable folder)")
