"""Several processes heal as one does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from latentfold.convert import heal_checkpoint, read_recipe
from tests import healing
from tests.conftest import MakeModel
from tests.healing import SHORT, converted


def launch(count: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in so many processes, as `torchrun` starts it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    return subprocess.run(
        [*command, "-m", "latentfold.convert.cli", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("cached", [False, True])
def test_two_processes_give_the_weights_of_one(
    make_model: MakeModel, tmp_path: Path, options: dict[str, Any], cached: bool
) -> None:
    """Of the same total batch, within rounding; and only one of the two speaks."""
    source, text = make_model(), healing.healing_text(tmp_path)
    out = converted(source, tmp_path / "out", options, dtype="float32")
    one = heal_checkpoint(
        str(out),
        str(tmp_path / "one"),
        teacher=str(source),
        steps=8,
        rate=0.01,
        text=[text],
        cache_teacher=cached,
        **SHORT,
    ).recipe.healing[0]
    command = ["heal", str(out), str(tmp_path / "two"), "--teacher", str(source), "--text", text, "--steps", "8"]
    command += ["--rate", "0.01", "--seq-len", "64", "--batch-tokens", "128", "--dtype", "float32"]
    done = launch(2, *command, *["--cache-teacher"] * cached)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("kept") == 1, done.stdout
    two = read_recipe(tmp_path / "two").healing[0]
    assert [p.divergence for p in two.curve] == pytest.approx([p.divergence for p in one.curve], rel=1e-3)
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=1e-3, atol=1e-4 * float(tensor.abs().max())), name


def test_a_batch_that_cannot_be_shared_is_refused(
    make_model: MakeModel, tmp_path: Path, options: dict[str, Any]
) -> None:
    source, text = make_model(), healing.healing_text(tmp_path)
    out = converted(source, tmp_path / "out", options)
    command = ["heal", str(out), str(tmp_path / "two"), "--teacher", str(source), "--text", text]
    done = launch(2, *command, "--seq-len", "64", "--batch-tokens", "64", "--steps", "2")
    assert done.returncode != 0
    assert "--batch-tokens 64: expected a multiple of 2 windows of 64 tokens" in done.stderr
    assert not (tmp_path / "two" / "config.json").exists()
