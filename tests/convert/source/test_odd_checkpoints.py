"""Checkpoints that hold something else than a whole model under its own names, as trainers and other tools leave them.

Each is read as transformers reads it, or refused in one line that says what it is and how to mend it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from latentfold.convert import plan_conversion
from latentfold.convert.errors import InputError
from latentfold.convert.source.opening import open_checkpoint
from latentfold.eval import EvaluationConfig, evaluate
from tests.conftest import MakeModel
from tests.hub_server import HubServer

ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "org/Base-7B", "r": 16, "target_modules": ["q_proj"]}


def adapter_files(base: str | None = "org/Base-7B") -> dict[str, bytes]:
    """What PEFT's save_pretrained writes."""
    config = json.dumps(ADAPTER | {"base_model_name_or_path": base}).encode()
    return {"adapter_config.json": config, "adapter_model.safetensors": b"\x02\0\0\0\0\0\0\0{}"}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("beside", [{}, {"config.json": b'{"model_type": "llama"}'}], ids=["alone", "with a config"])
def test_an_adapter_alone_is_named_with_its_base(beside: dict[str, bytes], tmp_path: Path) -> None:
    folder = write(tmp_path / "tuned", adapter_files() | beside)
    with pytest.raises(InputError, match=r"an adapter \(LORA\) for org/Base-7B.*merge.*merge_and_unload.*save_pretr"):
        plan_conversion(str(folder))


def test_an_adapter_without_a_base_is_still_called_one(tmp_path: Path) -> None:
    folder = write(tmp_path / "tuned", adapter_files(None))
    with pytest.raises(InputError, match=r"an adapter .*adapter_config.json does not name.*merge"):
        open_checkpoint(folder)


def test_an_adapter_is_refused_by_eval(make_model: MakeModel, tmp_path: Path) -> None:
    model, folder = str(make_model()), str(write(tmp_path / "tuned", adapter_files()))
    for pair in ((folder, model), (model, folder)):
        with pytest.raises(InputError, match=r"tuned: an adapter .*org/Base-7B"):
            evaluate(*pair, EvaluationConfig(), progress=False)


def test_a_merged_model_may_keep_its_adapters_config(make_model: MakeModel) -> None:
    """Its weights are whole."""
    source = write(make_model(), {"adapter_config.json": json.dumps(ADAPTER).encode()})
    assert plan_conversion(str(source), kv_rank=8, rope_dim=4).tensors


@pytest.mark.hub
def test_an_adapter_on_the_hub(tmp_path: Path) -> None:
    with HubServer() as server:
        server.create_repo("org/tuned", files=adapter_files())
        found = subprocess.run(
            [sys.executable, "-m", "latentfold.convert.cli", "inspect", "org/tuned"],
            env={**os.environ, **server.env(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert found.returncode == 2 and found.stderr.count("\n") == 1, found.stderr
    assert "org/tuned: an adapter (LORA) for org/Base-7B" in found.stderr and "merge_and_unload" in found.stderr
