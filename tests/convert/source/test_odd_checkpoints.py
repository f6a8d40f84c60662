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
from transformers import AutoTokenizer

from latentfold.convert import convert_checkpoint, estimate_sizes, plan_conversion
from latentfold.convert.errors import InputError
from latentfold.convert.source.checkpoint import INDEX, SINGLE
from latentfold.convert.source.opening import open_checkpoint
from latentfold.eval import EvaluationConfig, evaluate
from tests.conftest import TEXT, MakeModel, tiny_tokenizer
from tests.families import save_family
from tests.hub_server import HubServer

ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "org/Base-7B", "r": 16, "target_modules": ["q_proj"]}


def latentfold(server: HubServer, home: Path, *args: str) -> subprocess.CompletedProcess:
    """Run a command as a user of the Hub would."""
    return subprocess.run(
        [sys.executable, "-m", "latentfold.convert.cli", *args],
        env={**os.environ, **server.env(home)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def edit_names(source: Path, edit: Callable[[str], str]) -> None:
    """Rename the tensors of a checkpoint's only file."""
    tensors = {edit(name): tensor for name, tensor in load_file(source / SINGLE).items()}
    save_file(tensors, source / SINGLE, metadata={"format": "pt"})


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
        found = latentfold(server, tmp_path, "inspect", "org/tuned")
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


def everywhere(part: str) -> Callable[[str], str]:
    return lambda name: part + name


def within(part: str, after: str) -> Callable[[str], str]:
    return lambda name: re.sub(f"({after})", rf"\1{part}", name)


WRAPPED: dict[str, tuple[Callable[[str], str], str]] = {
    "torch.compile": (everywhere("_orig_mod."), r"_orig_mod\. \(torch\.compile\)"),
    "DDP": (everywhere("module."), r"module\. \(DataParallel, DistributedDataParallel or DeepSpeed\)"),
    "DDP twice": (everywhere("module.module."), r"module\. \(DataParallel"),
    "DDP of a compiled model": (everywhere("module._orig_mod."), r"module\. \(.*\) and _orig_mod\. \(torch"),
    "FSDP": (everywhere("_fsdp_wrapped_module."), r"_fsdp_wrapped_module\. \(FSDP\)"),
    "PEFT": (everywhere("base_model.model."), r"base_model\.model\. \(PEFT\)"),
    "compiled decoder": (within("_orig_mod.", r"^(?:model|transformer)\."), r"_orig_mod\. \(torch\.compile\)"),
    "compiled layers": (within("_orig_mod.", r"(?:layers|\bh)\.\d+\."), r"_orig_mod\. \(torch\.compile\)"),
    "compiled attention": (within("_orig_mod.", r"(?:layers|\bh)\.0\."), r"_orig_mod\. \(torch\.compile\)"),
    "FSDP layers": (
        lambda name: everywhere("_fsdp_wrapped_module.")(within("_fsdp_wrapped_module.", r"(?:s|\bh)\.\d\.")(name)),
        r"_fsdp_wrapped_module\. \(FSDP\)",
    ),
    "Lightning": (everywhere("model."), r"which left model\. at the start \(of a training program"),
    "distillation": (everywhere("student.net."), r"which left student\.net\. at the start"),
}
"""Whose wrapper, what it makes of names, and what is to be said of it."""


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("wrapper", WRAPPED)
def test_a_wrapper_in_the_names_is_called_by_name(wrapper: str, family: str, tmp_path: Path) -> None:
    """And the line of Python in the message mends the file."""
    source = save_family(tmp_path / "source", family)
    expected = (source / SINGLE).read_bytes()
    edit, said = WRAPPED[wrapper]
    edit_names(source, edit)
    with pytest.raises(InputError, match=r"tensor \S+: saved inside a wrapper, which left") as found:
        plan_conversion(str(source))
    message = str(found.value)
    assert re.search(said, message) and "\n" not in message, message
    line = re.search(r"save_file\(.*'pt'}\)", message)
    assert line is not None
    exec(line.group(), {"save_file": save_file, "load_file": load_file, "F": source / SINGLE})
    assert (source / SINGLE).read_bytes() == expected


def test_a_wrapper_is_found_by_every_command(make_model: MakeModel, text_file: Path) -> None:
    source, good = make_model(max_shard_size="20KB"), make_model()
    files = list(source.glob("*.safetensors"))
    for file in files:
        tensors = {f"module.{name}": tensor for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    index = json.loads((source / INDEX).read_text())
    index["weight_map"] = {f"module.{name}": file for name, file in index["weight_map"].items()}
    (source / INDEX).write_text(json.dumps(index))
    assert len(files) > 2
    message = r"tensor module\.\S+: saved inside a wrapper, which left module\."
    text = {"calibration": (str(text_file),), "calibration_tokens": 128, "seq_len": 64, "progress": False}
    with pytest.raises(InputError, match=message):
        estimate_sizes(str(source), **text)
    for pair in ((source, good), (good, source)):
        asked = EvaluationConfig(text=(str(text_file),), seq_len=64)
        with pytest.raises(InputError, match=message):
            evaluate(*map(str, pair), asked, progress=False)


def test_an_unmerged_adapter_in_the_names_is_to_be_merged(make_model: MakeModel) -> None:
    source = make_model()

    def adapted(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, tensor in tensors.items():
            module, leaf = name.rsplit(".", 1)
            if module.endswith("q_proj"):
                found[f"base_model.model.{module}.lora_A.default.weight"] = tensor[:2].clone()
                found[f"base_model.model.{module}.base_layer.{leaf}"] = tensor
            else:
                found[f"base_model.model.{name}"] = tensor
        return found

    save_file(adapted(load_file(source / SINGLE)), source / SINGLE, metadata={"format": "pt"})
    with pytest.raises(
        InputError, match=r"layers that were not merged.*base_model\.model\. \(PEFT\).*merge_and_unload"
    ):
        plan_conversion(str(source))


@pytest.mark.hub
def test_a_wrapper_is_found_on_the_hub_before_weights_are_fetched(make_model: MakeModel, tmp_path: Path) -> None:
    source = make_model()
    edit_names(source, everywhere("_orig_mod."))
    with HubServer() as server:
        server.create_repo("org/wrapped", files={path.name: path.read_bytes() for path in source.iterdir()})
        found = latentfold(server, tmp_path / "home", "convert", "org/wrapped", str(tmp_path / "out"))
        ranges = [request.headers.get("range") for request in server.requests_for("GET", r"\.safetensors$")]
    assert found.returncode == 2 and found.stderr.count("\n") == 1, found.stderr
    assert "_orig_mod. (torch.compile)" in found.stderr and all(ranges)
    assert not list((tmp_path / "home").rglob("*.safetensors"))


@pytest.mark.parametrize("said", [100, 300])
@pytest.mark.parametrize("family", ["llama", "llama, yarn, tied", "gpt_neox", "gpt2"])
def test_a_vocabulary_unlike_the_embeddings_rows(family: str, said: int, tmp_path: Path) -> None:
    """transformers does not load it either; what to set is said, and then it converts."""
    source = save_family(tmp_path / "source", family)
    edit_config(source, {"vocab_size": said})
    message = rf"tensor \S+ in {SINGLE}: expected .*{said}.*found .*259.*set vocab_size to 259 in config\.json"
    with pytest.raises(InputError, match=message):
        plan_conversion(str(source))
    if said > 259:  # else it is the text that is first seen not to fit
        with pytest.raises(InputError, match=message):
            evaluate(str(source), str(source), EvaluationConfig(text=(__file__,), seq_len=64), progress=False)
    edit_config(source, {"vocab_size": 259})
    assert plan_conversion(str(source)).tensors


def test_an_embedding_and_a_head_of_different_sizes(make_model: MakeModel) -> None:
    source = make_model()
    tensors = load_file(source / SINGLE)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:250].clone()
    save_file(tensors, source / SINGLE, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"found \[250, 32\]; the embedding and the output head have 250 and 259 rows"):
        plan_conversion(str(source))


@pytest.mark.parametrize("target", ["deepseek", "native"])
def test_an_embedding_with_more_rows_than_the_tokenizer_has_tokens(
    target: str, make_model: MakeModel, tmp_path: Path, text_file: Path, options: dict[str, Any]
) -> None:
    """Padded to a round number, as many are."""
    source, out = make_model(vocab_size=320), tmp_path / "out"
    convert_checkpoint(str(source), str(out), target=target, kv_rank=8, rope_dim=4, **options)
    assert json.loads((out / "config.json").read_text()).get("text_config", {}).get("vocab_size", 320) == 320
    asked = EvaluationConfig(text=(str(text_file),), seq_len=64, windows=1)
    assert evaluate(str(source), str(out), asked, progress=False).overall.predictions == 63


def test_a_tokenizer_with_more_tokens_than_the_embedding_has_rows(
    make_model: MakeModel, tmp_path: Path, text_file: Path, options: dict[str, Any]
) -> None:
    """Fine as long as no text has them."""
    source, out, tokenizer = make_model(), tmp_path / "out", tiny_tokenizer()
    tokenizer.add_tokens(["<extra>", "<more>"])
    tokenizer.save_pretrained(source)
    convert_checkpoint(str(source), str(out), kv_rank=8, rope_dim=4, **options)
    assert AutoTokenizer.from_pretrained(out).encode("<more>") == [260]
    text_file.write_text(TEXT.replace("one", "<more>") * 8)
    with pytest.raises(InputError, match="calibration text: the tokenizer gives token 260, the model has 259"):
        convert_checkpoint(str(source), str(tmp_path / "no"), kv_rank=8, rope_dim=4, **options)
    with pytest.raises(InputError, match="the tokenizer gives token 260, the model has 259"):
        evaluate(str(source), str(out), EvaluationConfig(text=options["calibration"], seq_len=64), progress=False)
