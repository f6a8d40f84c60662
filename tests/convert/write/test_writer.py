"""Files of a checkpoint that is being written, and what a kill at any moment leaves of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import load_file

from latentfold.convert.files import sha256
from latentfold.convert.write import writer as writing
from latentfold.convert.write.tensors import TensorPlan
from latentfold.convert.write.writer import CheckpointWriter
from tests.conftest import MakeModel

PLANS = {f"layers.{i}.{name}": TensorPlan((4, 3), torch.float32) for i in range(2) for name in ("a", "b")}


def new_writer(out: Path, **options: Any) -> CheckpointWriter:
    shards = split_state_dict_into_shards_factory(
        PLANS,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=150,
    )
    return CheckpointWriter(out, PLANS, shards, {"key": 1}, **options)


def values(index: int) -> dict[str, torch.Tensor]:
    """The tensors of a layer."""
    names = [name for name in PLANS if name.startswith(f"layers.{index}.")]
    return {name: torch.full((4, 3), float(index) + 0.5 * i) for i, name in enumerate(names)}


def test_reading_opens_each_shard_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = new_writer(tmp_path / "out")
    for i in range(2):
        writer.write(f"layer {i}", values(i))
    opened: list[Path] = []
    safe_open = writing.safe_open

    def noting(path: Path, **options: Any) -> Any:
        opened.append(path)
        return safe_open(path, **options)

    monkeypatch.setattr(writing, "safe_open", noting)
    found = writer.read("layers.")
    assert list(found) == list(PLANS) and len(opened) == len(set(opened)) == 2
    assert all(torch.equal(found[name], tensor) for i in range(2) for name, tensor in values(i).items())
    opened.clear()
    assert list(writer.read("layers.1.")) == ["layers.1.a", "layers.1.b"] and len(opened) <= 2


def test_sub_folders(tmp_path: Path) -> None:
    """Hashed under their posix path, moved, and replaced with what they held before."""
    out = tmp_path / "out"
    (out / "templates").mkdir(parents=True)
    (out / "templates" / "old.jinja").write_text("old")
    (tmp_path / "new.jinja").write_text("new")
    writer = new_writer(out, overwrite=True)
    for i in range(2):
        writer.write(f"layer {i}", values(i))
    writer.copy({"templates/new.jinja": tmp_path / "new.jinja", "templates/deep/er.jinja": tmp_path / "new.jinja"})
    writer.write_index()
    found = writer.hashes()
    writer.finish()
    files = {path.relative_to(out).as_posix(): path for path in out.rglob("*") if path.is_file()}
    assert found == {name: sha256(files[name]) for name in sorted(files)}
    assert {"templates/new.jinja", "templates/deep/er.jinja"} < set(found) and len(found) == 5
    assert load_file(out / "model-00001-of-00002.safetensors")["layers.0.b"][0, 0] == 0.5


# A process that kills itself before the n-th thing it does to a file below OUT, and then another that repeats all.
KILL = """
import json, os, signal, sys

def kill_before(count, out):
    \"\"\"From now on: SIGKILL before the `count`-th change of a file below `out`; the number of changes so far.\"\"\"
    done = [0]
    changes = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}

    def hook(event, arguments):
        if event == "open" and isinstance(arguments[2], int) and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if (event == "open" or event in changes) and str(out) in str(arguments):
            if done[0] == count:
                os.kill(os.getpid(), signal.SIGKILL)
            done[0] += 1

    sys.addaudithook(hook)
    return done

def child(work):
    \"\"\"Whether a process of its own came to the end of `work`.\"\"\"
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL), status
    return status == 0
"""

WRITER = (
    KILL
    + """
from pathlib import Path
from shutil import rmtree
from latentfold.convert.write.lock import check_free, held
from tests.convert.write.test_writer import new_writer, values

def run(out, overwrite):
    check_free(out)
    left = out / ".latentfold-partial"
    if left.is_dir() and not any(left.iterdir()):
        left.rmdir()  # the one step after the last file
    if (out / "config.json").exists() and not overwrite and not left.exists():
        return  # as a command that is repeated after its end finds OUT not empty
    with held(out):
        writer = new_writer(out, overwrite=overwrite)
        if not writer.moving:
            writer.copy({"templates/a.jinja": Path(__file__), "tokenizer.json": Path(__file__)})
            writer.write_text("config.json", "{}")
            for i in range(2):
                if not writer.done(f"layer {i}"):
                    writer.write(f"layer {i}", values(i), i)
            writer.write_index()
            writer.write_text("latentfold.json", json.dumps(writer.hashes()))
        writer.finish()

def tree(out):
    return {str(path.relative_to(out)): path.read_bytes().hex() if path.is_file() else None for path in out.rglob("*")}

def fresh(name, overwrite):
    out = folder / name
    rmtree(out, ignore_errors=True)
    if overwrite:
        (out / "templates").mkdir(parents=True)
        for old in ("config.json", "stray.txt", "templates/old.jinja"):
            (out / old).write_text("old")
    return out

folder = Path(sys.argv[1])
for overwrite in (False, True):
    whole = fresh("whole", overwrite)
    assert child(lambda: run(whole, overwrite))
    expected, killed = tree(whole), 0
    while True:
        out = fresh("out", overwrite)
        if child(lambda: (kill_before(killed, out), run(out, overwrite))):
            break
        assert child(lambda: run(out, overwrite)), killed
        assert tree(out) == expected, (killed, set(tree(out)) ^ set(expected))
        killed += 1
    print(killed)
"""
)

CONVERSION = (
    KILL
    + """
from pathlib import Path
from latentfold.convert import convert_checkpoint
from latentfold.convert.write.writer import CheckpointWriter

folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])

def convert(out):
    convert_checkpoint(str(folder / "source1"), str(out), **options)

def dying(place, when):
    \"\"\"Kill where a method of the writer is called for the n-th time, or half way through `finish`.\"\"\"
    original, calls = getattr(CheckpointWriter, place), []

    def method(self, *arguments):
        calls.append(1)
        if len(calls) == when:
            kill_before(3 if place == "finish" else 0, self.out)
        return original(self, *arguments)

    setattr(CheckpointWriter, place, method)

def hashes(out):
    return json.loads((out / "latentfold.json").read_text())["files"]

assert child(lambda: convert(folder / "whole"))
for number, (place, when) in enumerate(json.loads(sys.argv[3])):
    out = folder / f"out{number}"
    assert not child(lambda: (dying(place, when), convert(out))), (place, when)
    assert not (out / "config.json").exists(), (place, when)
    assert child(lambda: convert(out))
    assert hashes(out) == hashes(folder / "whole"), (place, when)
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in (folder / "whole").iterdir())
"""
)


def script(code: str, folder: Path, *arguments: str) -> str:
    """Run a script in a process of its own: it forks, which a process of pytest's should not."""
    path = folder / "script.py"
    path.write_text(code)
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r}); __file__ = {str(path)!r}\n{code}"]
    done = subprocess.run([*command, str(folder), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_killed_at_any_moment_the_writer_continues_to_the_same_files(tmp_path: Path) -> None:
    """Into an empty folder, and over an old one."""
    into_empty, over_old = map(int, script(WRITER, tmp_path).split())
    assert into_empty > 30 and over_old > 30


def test_killed_conversions_continue_to_the_same_hashes(
    make_model: MakeModel, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Before the first layer, between layers, while the end is written and while it is moved to its place."""
    source = make_model()
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    points = [("copy", 2), ("write", 4), ("hashes", 1), ("finish", 1)]
    script(CONVERSION, tmp_path, json.dumps({"kv_rank": 8, "rope_dim": 4, **options}), json.dumps(points))
