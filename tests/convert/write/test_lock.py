"""Two runs never write to one folder: whoever comes second is told who was first."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from latentfold.convert import InputError, convert_checkpoint
from latentfold.convert.cli import main
from latentfold.convert.write.lock import LOCK, OWNER, PARTIAL, check_free, held
from latentfold.convert.write.writer import CheckpointWriter
from tests.conftest import TINY_SIZES, MakeModel

SIZES = {"kv_rank": 8, "rope_dim": 4}

HOLD = """
import sys
from pathlib import Path
from latentfold.convert.write.lock import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""
TRY = """
import sys
from pathlib import Path
from latentfold.convert import InputError
from latentfold.convert.write.lock import held
try:
    with held(Path(sys.argv[1])):
        print("held")
except InputError as error:
    print(error)
"""


@contextmanager
def holder(out: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds `out`, until it is killed or told to end."""
    command = [sys.executable, "-c", HOLD, str(out)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def attempt(out: Path) -> str:
    """What another process is told that wants `out`."""
    return subprocess.run([sys.executable, "-c", TRY, str(out)], capture_output=True, text=True, check=True).stdout


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def convert(source: Path, out: Path, text: Path, *more: str) -> Result:
    return CliRunner().invoke(main, ["convert", str(source), str(out), *TINY_SIZES, "--calibration", str(text), *more])


def test_a_second_conversion_is_refused_and_the_first_undisturbed(
    make_model: MakeModel, tmp_path: Path, text_file: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = make_model(), tmp_path / "out"
    command = [sys.executable, "-m", "latentfold.convert.cli", "convert", str(source), str(out)]
    command += [*TINY_SIZES, "--calibration", str(text_file)]
    write = CheckpointWriter.write
    second: list[subprocess.CompletedProcess[str]] = []

    def meanwhile(self: CheckpointWriter, step: str, *args: Any) -> None:
        if step == "layer 1":
            before = tree(out)
            second.append(subprocess.run(command, capture_output=True, text=True, check=False))
            assert tree(out) == before
        write(self, step, *args)

    whole = convert_checkpoint(str(source), str(tmp_path / "whole"), **SIZES, **options).recipe
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "write", meanwhile)
        recipe = convert_checkpoint(str(source), str(out), **SIZES, **options).recipe
    assert recipe.files == whole.files
    assert not [path for path in tree(out) if "lock" in path or PARTIAL in path]
    [refused] = second
    assert refused.returncode == 2 and refused.stdout == "" and refused.stderr.count("\n") == 1
    assert re.match(rf"Error: .*out: another conversion .*\(process {os.getpid()} on .* since 20", refused.stderr)


def test_a_killed_run_locks_nothing(make_model: MakeModel, tmp_path: Path, text_file: Path) -> None:
    source, out = make_model(), tmp_path / "out"
    with holder(out) as process:
        before = tree(tmp_path)
        for more in ([], ["--overwrite"], ["--dry-run"]):
            refused = convert(source, out, text_file, *more)
            assert refused.exit_code == 2 and f"(process {process.pid} on " in refused.stderr
        assert tree(tmp_path) == before
        process.kill()
        process.wait()
        assert {path.name for path in (out / PARTIAL).iterdir()} == {LOCK, OWNER}
        with held(out):  # the killed one's name is not taken for ours
            assert f"process {os.getpid()} on" in attempt(out)
    assert not out.joinpath(PARTIAL, LOCK).exists()
    with holder(out) as process:
        process.kill()
        process.wait()
        done = convert(source, out, text_file)
    assert done.exit_code == 0, done.output
    assert (out / "config.json").exists() and not (out / PARTIAL).exists()


def test_a_run_that_finished_meanwhile_is_not_written_over(
    make_model: MakeModel, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """OUT was empty when the second run looked, before it had fetched its model."""
    source, out = make_model(), tmp_path / "out"

    def finished(path: Path) -> Any:
        out.mkdir()
        (out / "config.json").write_text("theirs")
        return held(path)

    monkeypatch.setattr("latentfold.convert.write.output.held", finished)
    with pytest.raises(InputError, match=r"not empty \(holds config\.json\)"):
        convert_checkpoint(str(source), str(out), **SIZES, **options)
    assert tree(out) == {"config.json": b"theirs"}


def test_it_leaves_what_it_found(tmp_path: Path) -> None:
    empty, new, parted = tmp_path / "empty", tmp_path / "a" / "new", tmp_path / "parted"
    empty.mkdir()
    (parted / PARTIAL).mkdir(parents=True)
    (parted / PARTIAL / "journal.json").write_text("{}")
    for out in (empty, new, parted):
        with pytest.raises(RuntimeError), held(out):
            assert attempt(out).startswith(f"{out}: another conversion")
            raise RuntimeError
        check_free(out)
    assert tree(tmp_path) == {
        "empty": None,
        "a": None,
        "parted": None,
        f"parted/{PARTIAL}": None,
        f"parted/{PARTIAL}/journal.json": b"{}",
    }
