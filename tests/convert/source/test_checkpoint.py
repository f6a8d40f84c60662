"""Tensors one at a time: as safetensors reads them, checked once, and nothing of them stays in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from latentfold.convert import InputError, convert_checkpoint
from latentfold.convert.dtypes import STORED
from latentfold.convert.source.checkpoint import Checkpoint
from latentfold.convert.source.opening import open_checkpoint
from latentfold.convert.write.lock import PARTIAL
from tests.conftest import MakeModel


def checkpoint_of(folder: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found = Checkpoint(folder, "here", None, {})
    found.read_headers()
    return found


def test_tensors_of_every_dtype_and_shape(tmp_path: Path) -> None:
    shapes: list[tuple[int, ...]] = [(), (1,), (0, 4), (3, 5), (2, 3, 4)]
    tensors = {f"{name}{shape}": torch.randn(shape).to(STORED[name]) for name in STORED for shape in shapes}
    found = checkpoint_of(tmp_path, tensors)
    for name, expected in tensors.items():
        read = found.tensor(name)
        assert read.dtype == expected.dtype and torch.equal(read, expected)


def test_every_shard_of_a_model_gives_what_safetensors_gives(make_model: MakeModel) -> None:
    source = make_model(max_shard_size="20KB", dtype=torch.bfloat16)
    found = open_checkpoint(source)
    found.read_headers()
    files = list(source.glob("*.safetensors"))
    expected = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(files) > 2 and set(found.headers) == set(expected)
    assert all(torch.equal(found.tensor(name), tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 517, 999])
def test_infinite_and_undefined_values_are_refused_by_name(tmp_path: Path, dtype: str, bad: float, place: int) -> None:
    weight = torch.randn(10, 100).to(STORED[dtype])
    weight.view(-1)[place] = bad
    found = checkpoint_of(tmp_path, {"good": torch.zeros(3), "a.weight": weight})
    found.tensor("good")
    for _ in range(2):
        with pytest.raises(InputError, match=r"tensor a\.weight in model\.safetensors: holds infinite or undefined"):
            found.tensor("a.weight")


def test_values_are_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checkpoint_of(tmp_path, {"a": torch.zeros(3), "b": torch.ones(2)})
    checked: list[int] = []
    aminmax = torch.aminmax

    def counted(tensor: torch.Tensor) -> Any:
        checked.append(len(tensor))
        return aminmax(tensor)

    monkeypatch.setattr(torch, "aminmax", counted)
    for name in "abab":
        found.tensor(name)
    assert checked == [3, 2]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    found = checkpoint_of(tmp_path, {"mask": torch.ones(2, dtype=torch.bool), "weight": torch.zeros(100)})
    with pytest.raises(InputError, match=r"tensor mask in model\.safetensors: expected BF16.*found BOOL"):
        found.tensor("mask")
    with pytest.raises(InputError, match="tensor other is missing from here"):
        found.tensor("other")
    os.truncate(tmp_path / "model.safetensors", (tmp_path / "model.safetensors").stat().st_size - 4)
    with pytest.raises(InputError, match="the file ends within it"):
        found.tensor("weight")


PEAK = """
import resource, sys
from latentfold.convert.source.opening import open_checkpoint
checkpoint = open_checkpoint(sys.argv[1])
checkpoint.read_headers()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name in checkpoint.headers:
    checkpoint.tensor(name)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB there")
def test_a_file_is_not_held_in_memory(tmp_path: Path) -> None:
    """Eight tensors of 16 MiB, one after the other: the peak is one's, not the file's."""
    tensors = {f"model.layers.{i}.weight": torch.ones(4, 2**20) for i in range(8)}
    checkpoint_of(tmp_path, tensors)
    (tmp_path / "config.json").write_text("{}")
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout)
    assert grown < 3 * 16 * 1024, f"{grown} KiB for tensors of 16 MiB"


LATE = ["lm_head.weight", "model.norm.weight", "model.layers.1.mlp.down_proj.weight", "model.layers.1.self_attn.k_proj"]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", LATE)
def test_a_conversion_of_damaged_weights_writes_nothing(
    name: str, sharded: bool, make_model: MakeModel, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Whichever tensor it is: also what is only copied, at the very end."""
    source, out = make_model(max_shard_size="20KB" if sharded else "5GB"), tmp_path / "out"
    file = next(path for path in source.glob("*.safetensors") if any(key.startswith(name) for key in load_file(path)))
    tensors = load_file(file)
    next(tensor for key, tensor in tensors.items() if key.startswith(name)).view(-1)[-1] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=rf"tensor {name}\S* in {file.name}: holds infinite or undefined values"):
        convert_checkpoint(str(source), str(out), kv_rank=8, rope_dim=4, **options)
    assert not out.exists()


def test_damage_is_found_on_continuing_too(make_model: MakeModel, tmp_path: Path, options: dict[str, Any]) -> None:
    """A run that was killed has an output already; it stays as unfinished as it was."""
    source, out = make_model(), tmp_path / "out"

    def stop(stage: str, done: int, total: int, detail: str = "") -> None:
        if stage.startswith("2/2"):
            raise KeyboardInterrupt

    changed = options | {"progress": stop}
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(str(source), str(out), kv_rank=8, rope_dim=4, **changed)
    stat = os.stat(source / "model.safetensors")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = torch.inf
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    os.utime(source / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(InputError, match=r"model\.layers\.0\.mlp\.up_proj\.weight in .* infinite or undefined"):
        convert_checkpoint(str(source), str(out), kv_rank=8, rope_dim=4, **options)
    assert [path.name for path in out.iterdir()] == [PARTIAL]
    assert json.loads((out / PARTIAL / "journal.json").read_text())["moving"] == []
