"""What goes over from the source as it is: tokenizer, generation config, licence; and when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

from latentfold.convert import convert_checkpoint
from latentfold.convert.pipeline import small_files
from latentfold.convert.publish.files import check_files, files_to_push
from latentfold.convert.source.hub import SMALL_FILES
from latentfold.convert.source.tokenizer import TOKENIZER_FILES
from latentfold.convert.write.recipe import read_recipe
from latentfold.convert.write.writer import CheckpointWriter
from tests.conftest import MakeModel, save_tiny
from tests.families import save_family

SIZES = {"kv_rank": 8, "rope_dim": 4}

OWN_FILES = {
    "tokenizer.model": b"\x00\x01 sentencepiece",
    "special_tokens_map.json": b'{"eos_token":   "</s>"}',
    "added_tokens.json": b"{ }",
    "vocab.json": b"{}\n\n",
    "merges.txt": b"#version: 0.2\n",
    "chat_template.jinja": b"{{ messages[0].content }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "additional_chat_templates/rag.jinja": b"{{ documents }}",
    "generation_config.json": b'{"do_sample": false,   "temperature": 0.3, "eos_token_id": [1, 2]}',
    "LICENSE.txt": b"Apache",
    "NOTICE": b"of whom",
}


def put(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def reformat(path: Path, **changes: Any) -> bytes:
    """Rewrite a JSON file as nobody's library would."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=7))
    return path.read_bytes()


def test_files_are_the_source_s_own(make_model: MakeModel, tmp_path: Path, options: dict[str, Any]) -> None:
    source, out = make_model(), tmp_path / "out"
    put(source, OWN_FILES | {"README.md": b"# Tiny", "tokenization_x.py": b"raise", "training.log": b""})
    expected = OWN_FILES | {name: reformat(source / name) for name in ("tokenizer.json", "tokenizer_config.json")}
    recipe = convert_checkpoint(str(source), str(out), **SIZES, **options).recipe
    found = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert {name: found[name] for name in expected} == expected
    assert set(found) - set(expected) == {"config.json", "model.safetensors", "latentfold.json"}
    assert set(recipe.files) == set(found) - {"latentfold.json"}
    again = AutoTokenizer.from_pretrained(out)
    assert set(again.chat_template) == {"default", "tool_use", "rag"}
    assert again("keys") == AutoTokenizer.from_pretrained(source)("keys")

    check_files(out, read_recipe(out))
    assert set(files_to_push(out, read_recipe(out))) == set(found)
    convert_checkpoint(str(source), str(out), overwrite=True, **SIZES, **options)
    assert read_recipe(out).files == recipe.files
    (out / "additional_chat_templates" / "rag.jinja").write_text("{{ other }}")
    with pytest.raises(ValueError, match=r"additional_chat_templates/rag\.jinja is not what"):
        check_files(out, read_recipe(out))


def test_everything_copied_is_fetched_from_the_hub() -> None:
    assert set(TOKENIZER_FILES) <= set(SMALL_FILES)


def test_no_generation_config(make_model: MakeModel, tmp_path: Path, options: dict[str, Any]) -> None:
    source, out = make_model(), tmp_path / "out"
    (source / "generation_config.json").unlink()
    convert_checkpoint(str(source), str(out), **SIZES, **options)
    found = GenerationConfig.from_pretrained(out)
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (0, 1, 2)


def test_a_class_that_followed_from_the_model_type_is_named(tmp_path: Path, options: dict[str, Any]) -> None:
    """GPT-2's own files: no tokenizer.json, no settings; config.json alone says what they are."""
    source, out = save_family(tmp_path / "source", "gpt2"), tmp_path / "out"
    vocab = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    put(source, {"vocab.json": json.dumps(vocab).encode(), "merges.txt": b"#version: 0.2\n"})
    convert_checkpoint(str(source), str(out), cache_values=16, **options)
    sample = "Why keep them all?"
    assert AutoTokenizer.from_pretrained(out)(sample) == AutoTokenizer.from_pretrained(source)(sample)
    assert (out / "vocab.json").read_bytes() == (source / "vocab.json").read_bytes()


def test_code_that_is_not_needed_is_not_asked_for(tmp_path: Path, options: dict[str, Any]) -> None:
    """Whoever loads the result with `trust_remote_code` would look for it."""
    source, out = save_tiny(tmp_path / "source"), tmp_path / "out"
    settings = json.loads((source / "tokenizer_config.json").read_text())
    auto_map = {"AutoTokenizer": ["tokenization_gone.Gone", None]}
    reformat(source / "tokenizer_config.json", auto_map=auto_map, tokenizer_class="PreTrainedTokenizerFast")
    expected = AutoTokenizer.from_pretrained(source, trust_remote_code=False)("keys")
    convert_checkpoint(str(source), str(out), **SIZES, **options)
    found = json.loads((out / "tokenizer_config.json").read_text())
    assert "auto_map" not in found and found["eos_token"] == settings["eos_token"]
    assert AutoTokenizer.from_pretrained(out, trust_remote_code=True)("keys") == expected


def test_a_tokenizer_that_needs_code_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    source = save_tiny(tmp_path / "source")
    auto_map = {"AutoTokenizer": ["tokenization_gone.Gone", None]}
    reformat(source / "tokenizer_config.json", auto_map=auto_map, tokenizer_class="Gone")
    with pytest.raises(ValueError, match="expected a tokenizer beside the weights"):
        convert_checkpoint(str(source), str(tmp_path / "out"), **SIZES, **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("broken", ["tokenizer", "config"])
def test_what_cannot_be_written_shows_before_the_first_layer(
    broken: str, make_model: MakeModel, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write = CheckpointWriter.write

    def noting(self: CheckpointWriter, step: str, *args: Any) -> None:
        written.append(step)
        write(self, step, *args)

    put = CheckpointWriter.write_text

    def failing(self: CheckpointWriter, name: str, text: str) -> None:
        if name == "config.json":
            raise RuntimeError("cannot be written")
        put(self, name, text)

    monkeypatch.setattr(CheckpointWriter, "write", noting)
    if broken == "tokenizer":
        different = iter(range(9))
        monkeypatch.setattr(small_files, "_answers", lambda _: next(different))
    else:
        monkeypatch.setattr(CheckpointWriter, "write_text", failing)
    with pytest.raises(RuntimeError, match=r"does not survive|cannot be written"):
        convert_checkpoint(str(make_model()), str(tmp_path / "out"), **SIZES, **options)
    assert written == ([] if broken == "tokenizer" else ["ladder"])
