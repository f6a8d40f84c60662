"""Whether a folder may be written to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from latentfold.convert.errors import InputError
from latentfold.convert.write.writer import PARTIAL, CheckpointWriter


def check_output(output: str, source: Path, *, overwrite: bool, needed: Sequence[Path] = ()) -> None:
    """Refuse an output folder that cannot or must not be written.

    Args:
        source: folder of the model.  overwrite: what the folder holds may go.  needed: other files that must stay.

    Raises:
        InputError: OUT is not a folder, not empty, not writable, or overlaps the source.
    """
    if not output.strip():
        raise InputError("OUT is empty; expected a folder to write to")
    try:
        _check_output(output, source, overwrite, needed)
    except InputError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # names too long, link loops, NUL bytes
        raise InputError(f"{output}: not usable as a folder ({error})") from error


def _check_output(output: str, source: Path, overwrite: bool, needed: Sequence[Path]) -> None:
    out = Path(output).absolute()
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
