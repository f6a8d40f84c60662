"""Checkpoints that hold something else than a whole model under its own names, as trainers and other tools leave them.

Each is read as transformers reads it, or refused in one line that says what it is and how to mend it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from latentfold.convert import convert_checkpoint, plan_conversion
from latentfold.convert.errors import InputError
from latentfold.convert.source.checkpoint import INDEX, SINGLE
from latentfold.convert.source.opening import open_checkpoint
from latentfold.eval import EvaluationConfig, evaluate
from tests.conftest import MakeModel
from tests.families import save_family
from tests.hub_server import HubServer

ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "org/Base-7B", "r": 16, "target_modules": ["q_proj"]}


def edit_config(folder: Path, changes: dict[str, Any]) -> None:
    """Change a checkpoint's config.json behind transformers' back."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


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


TIED = {
    "llama": {"model.embed_tokens.weight": "lm_head.weight"},
    "granite": {"model.embed_tokens.weight": "lm_head.weight"},
    "gpt_neox": {"gpt_neox.embed_in.weight": "embed_out.weight"},
    "opt": {"model.decoder.embed_tokens.weight": "lm_head.weight"},
    "gpt2": {"transformer.wte.weight": "lm_head.weight"},
    "gpt2, no prefix": {"transformer.wte.weight": "lm_head.weight"},
    "llama, no prefix": {"model.embed_tokens.weight": "lm_head.weight"},
}
"""Families whose models tie, and the two names that their files may have for the one tensor."""


def stored_as(source: Path, folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """A copy of a checkpoint whose file holds other names."""
    shutil.copytree(source, folder)
    save_file(change(load_file(source / SINGLE)), folder / SINGLE, metadata={"format": "pt"})
    return folder


def same_weights(a: Path, b: Path) -> bool:
    return (a / SINGLE).read_bytes() == (b / SINGLE).read_bytes()


STOCK = [name for name in TIED if name.startswith("llama")]


@pytest.mark.parametrize(
    ("name", "target"), [*((name, "native") for name in TIED), *((name, "deepseek") for name in STOCK)]
)
def test_tied_tensors_under_either_name_or_both(
    name: str, target: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    family, _, bare = name.partition(", ")
    source = save_family(tmp_path / "source", family, tie_word_embeddings=True)
    options |= {"target": target, "calibration_tokens": 128, "kv_rank": 10}
    convert_checkpoint(str(source), str(tmp_path / "expected"), **options)

    def stored(names: Callable[[str, str], list[str]]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
        def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            found = {
                new: tensor.clone()
                for old, tensor in tensors.items()
                for new in (names(old, TIED[name][old]) if old in TIED[name] else [old])
            }
            return {re.sub(r"^(transformer|model)\.", "", key) if bare else key: t for key, t in found.items()}

        return change

    forms: dict[str, Callable[[str, str], list[str]]] = {
        "embedding": lambda own, twin: [own],
        "head": lambda own, twin: [twin],
        "both": lambda own, twin: [own, twin],
    }
    for form, names in forms.items():
        other = stored_as(source, tmp_path / form, stored(names))
        convert_checkpoint(str(other), str(tmp_path / f"{form} out"), **options)
        assert same_weights(tmp_path / "expected", tmp_path / f"{form} out"), form


def test_a_head_alone_is_evaluated(tmp_path: Path, text_file: Path, options: dict[str, Any]) -> None:
    source, out = save_family(tmp_path / "source", "llama", tie_word_embeddings=True), tmp_path / "out"
    convert_checkpoint(str(source), str(out), kv_rank=8, rope_dim=4, **options)
    head = stored_as(source, tmp_path / "head", lambda t: {re.sub(".*embed_tokens", "lm_head", n): t[n] for n in t})
    asked = EvaluationConfig(text=(str(text_file),), seq_len=64, windows=1)
    expected, found = (evaluate(str(one), str(out), asked, progress=False) for one in (source, head))
    assert found.overall == expected.overall


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight"])
def test_an_index_may_name_a_twin_that_no_file_holds(kept: str, tmp_path: Path, options: dict[str, Any]) -> None:
    source = save_family(tmp_path / "source", "llama", tie_word_embeddings=True)
    embedding, options = "model.embed_tokens.weight", options | {"calibration_tokens": 128, "kv_rank": 8}
    other = stored_as(source, tmp_path / "other", lambda t: {kept if n == embedding else n: t[n] for n in t})
    names = {*load_file(source / SINGLE), embedding, "lm_head.weight"}
    (other / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(sorted(names), SINGLE)}))
    for folder in (source, other):
        convert_checkpoint(str(folder), str(tmp_path / f"{folder.name} out"), **options)
    assert same_weights(tmp_path / "source out", tmp_path / "other out")


def test_twins_that_differ_are_refused(make_model: MakeModel, tmp_path: Path, options: dict[str, Any]) -> None:
    """transformers loads them as two; leaving one out would change the model."""
    source, whole = make_model(), make_model(tie_word_embeddings=True)
    edit_config(source, {"tie_word_embeddings": True})
    message = r"model\.embed_tokens\.weight and lm_head\.weight: .*differ.*set tie_word_embeddings to false"
    with pytest.raises(InputError, match=message):
        convert_checkpoint(str(source), str(tmp_path / "out"), kv_rank=8, **options)
    with pytest.raises(InputError, match=message):
        evaluate(str(source), str(whole), EvaluationConfig(text=options["calibration"], seq_len=64), progress=False)
    assert not (tmp_path / "out").exists()
    edit_config(source, {"tie_word_embeddings": False})
    convert_checkpoint(str(source), str(tmp_path / "out"), kv_rank=8, **options)
