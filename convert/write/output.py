"""Whether a folder may be written to, and by whom."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from latentfold.convert.config import ConversionConfig
from latentfold.convert.errors import InputError
from latentfold.convert.source.checkpoint import Checkpoint
from latentfold.convert.write.lock import PARTIAL, check_free, held
from latentfold.convert.write.space import check_room
from latentfold.convert.write.writer import CheckpointWriter


@contextmanager
def locked_output(config: ConversionConfig, checkpoint: Checkpoint) -> Iterator[None]:
    """Hold the output folder for as long as a run lasts.

    It is checked again: another run may have finished there since `check_output`.

    Raises:
        InputError: another run holds it, or see `check_output`.
    """
    with held(config.output_path):
        _check_output(config, checkpoint)
        yield


def check_output(config: ConversionConfig, checkpoint: Checkpoint) -> None:
    """Refuse an output folder that cannot or must not be written.

    Raises:
        InputError: OUT is not a folder, not empty, not writable, overlaps the source, or another run is writing to it.
    """
    if config.output is None:
        return
    if not config.output.strip():
        raise InputError("OUT is empty; expected a folder to write to")
    try:
        check_free(config.output_path)
        _check_output(config, checkpoint)
    except InputError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # names too long, link loops, NUL bytes
        raise InputError(f"{config.output}: not usable as a folder ({error})") from error


def check_space(config: ConversionConfig, nbytes: int) -> None:
    """Refuse a conversion of `nbytes` for which the output's file system has no room; an interrupted one counts.

    Raises:
        InputError: it will not fit.
    """
    if config.output is not None:
        out = config.output_path
        check_room(out, nbytes, [out / PARTIAL, *(out / name for name in CheckpointWriter.files_being_moved(out))])


def _check_output(config: ConversionConfig, checkpoint: Checkpoint) -> None:
    out = config.output_path.absolute()
    if out.is_symlink() and not out.exists():
        raise InputError(f"{config.output}: is a link to nothing; expected a folder to write to")
    if (out.exists() and not out.is_dir()) or ((out / PARTIAL).exists() and not (out / PARTIAL).is_dir()):
        raise InputError(f"{config.output}: is a file; expected a folder to write to")
    real_out, source = out.resolve(), checkpoint.folder.resolve()
    if real_out == source or source in real_out.parents:
        raise InputError(f"{config.output}: lies inside the source {config.source}; choose another folder")
    if config.overwrite:
        if real_out == Path.cwd() or real_out in Path.cwd().parents:
            raise InputError(f"{config.output}: is or holds the current folder; --overwrite would empty it")
        for path in (source, *source.iterdir(), *(Path(file) for file in config.calibration)):
            if real_out in path.resolve().parents:
                raise InputError(f"{config.output}: holds {path}, which is needed; --overwrite would delete it")
    elif out.is_dir():
        found = sorted(path.name for path in out.iterdir() if path.name != PARTIAL)
        if found and not set(found) <= CheckpointWriter.files_being_moved(out):
            raise InputError(
                f"{config.output}: not empty (holds {found[0]}); choose another folder or pass --overwrite"
            )
    parent = out
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"{config.output}: cannot be written ({parent} is not a writable folder)")
