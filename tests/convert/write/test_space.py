"""No room: refused beforehand where it shows, named when it comes, and the repeated command continues."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from latentfold.convert import InputError
from latentfold.convert.cli import main
from latentfold.convert.write import writer as writing
from latentfold.convert.write.lock import PARTIAL
from latentfold.convert.write.recipe import read_recipe
from latentfold.convert.write.space import check_room
from latentfold.convert.write.writer import CheckpointWriter
from tests.conftest import TINY_SIZES, save_tiny

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of some 450 KB, several shards when converted."""
    return save_tiny(tmp_path_factory.mktemp("space") / "source", hidden_size=64, intermediate_size=192)


def convert(source: Path, out: Path, text: Path, *more: str) -> Result:
    options = [*TINY_SIZES, "--calibration", str(text), "--max-shard-size", "200KB"]
    return CliRunner().invoke(main, ["convert", str(source), str(out), *options, *more])


def refusal(result: Result) -> str:
    """The one line of a refused command."""
    assert result.exit_code == 2 and result.stdout == "" and result.stderr.count("\n") == 1, result.output
    return result.stderr


def hashes(out: Path) -> dict[str, str]:
    return dict(read_recipe(out).files)


@pytest.fixture
def whole(source: Path, text_file: Path, tmp_path: Path) -> dict[str, str]:
    """Hashes of the files that have to come out."""
    assert convert(source, tmp_path / "whole", text_file).exit_code == 0
    return hashes(tmp_path / "whole")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path, leave: int = 0) -> Path:
    """Use up a file system but for so many bytes."""
    path = disk / "filler"
    path.write_bytes(bytes(shutil.disk_usage(disk).free - leave))
    return path


@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--overwrite"]])
def test_too_little_room_is_refused_beforehand(more: list[str], source: Path, text_file: Path, disk: Path) -> None:
    fill(disk, leave=100 * 1024)
    out = disk / "out"
    line = refusal(convert(source, out, text_file, *more))
    assert f"Error: {out}: the checkpoint takes " in line and f"its file system ({disk}) has 100.0 KiB free: it" in line
    assert [path.name for path in disk.iterdir()] == ["filler"]


@pytest.mark.parametrize("reserving", [True, False])
def test_a_disk_that_fills_up(
    reserving: bool,
    source: Path,
    text_file: Path,
    disk: Path,
    whole: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With what is written reserved, small files alone can fail; without, a layer."""
    out = disk / "out"
    write, copy = CheckpointWriter.write, CheckpointWriter.copy

    def filling(self: CheckpointWriter, step: str, *args: Any) -> None:
        if step == "layer 1":
            fill(disk)
        write(self, step, *args)

    def filling_first(self: CheckpointWriter, files: Any) -> None:
        if files:
            fill(disk)
        copy(self, files)

    with monkeypatch.context() as patch:
        if reserving:
            patch.setattr(CheckpointWriter, "copy", filling_first)
        else:
            patch.delattr(os, "posix_fallocate")
            patch.setattr(CheckpointWriter, "write", filling)
        line = refusal(convert(source, out, text_file))
    assert (
        f"{out}: the checkpoint takes " in line
        and f"({disk}) has 0 bytes free: it is full; make room and repeat" in line
    )
    assert not (out / "config.json").exists()
    (disk / "filler").unlink()
    written: list[str] = []

    def noting(self: CheckpointWriter, step: str, *args: Any) -> None:
        written.append(step)
        write(self, step, *args)

    monkeypatch.setattr(CheckpointWriter, "write", noting)
    done = convert(source, out, text_file)
    assert done.exit_code == 0, done.output
    assert hashes(out) == whole and not (out / PARTIAL).exists()
    assert written == (["ladder", "outer", "layer 0", "layer 1"] if reserving else ["layer 1"])


def test_a_file_size_limit(source: Path, text_file: Path, tmp_path: Path, whole: dict[str, str]) -> None:
    out = tmp_path / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150 * 1024, hard))
    try:
        line = refusal(convert(source, out, text_file))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "no file may grow as large there; lift the limit (ulimit -f) or pass a smaller --max-shard-size" in line
    assert not out.exists()
    assert convert(source, out, text_file).exit_code == 0
    assert hashes(out) == whole


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, r"it is full; make room"),
        (errno.EDQUOT, r"your quota there is used up; make room and repeat the command: it continues"),
        (errno.EFBIG, r"lift the limit"),
        (errno.EIO, None),
    ],
)
@pytest.mark.parametrize("place", ["replace_text", "reserve", "copyfile", "fsync"])
def test_wherever_it_comes(
    place: str, number: int, message: str | None, source: Path, text_file: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    def fail(*_: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number))

    owner = {"copyfile": shutil, "fsync": os}.get(place, writing)
    monkeypatch.setattr(owner, place, fail)
    line = refusal(convert(source, tmp_path / "out", text_file))
    assert os.strerror(number) in line if message is None else message in line
    assert (message is None) is ("the checkpoint takes" not in line)


def test_what_an_interrupted_run_holds_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the disk sees it: a file that is reserved counts whole, a sparse one does not."""
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "written").write_bytes(b"x" * 400_000)
    with open(tmp_path / "part" / "sparse", "wb") as file:
        file.truncate(10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, 700_000))
    check_room(tmp_path, 1_000_000, [tmp_path / "part", tmp_path / "gone"])
    with pytest.raises(InputError, match=r"takes 976\.6 KiB.*has 683\.6 KiB free: it will not fit"):
        check_room(tmp_path, 1_000_000, [])
    with pytest.raises(InputError, match=r"has 683\.6 KiB free, 39\d\.\d KiB of it are there: it will not fit"):
        check_room(tmp_path, 2_000_000, [tmp_path / "part"])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 0))  # some network file systems
    check_room(tmp_path, 10**15, [])
