"""Texts from files, from folders that `datasets` reads, and from a Hub on the loopback interface."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from latentfold.convert.errors import InputError
from latentfold.convert.text.datasets import open_texts
from tests.hub_server import HubServer

Rows = list[dict[str, Any]]
CHAT = [{"role": "user", "content": "What is cached?"}, {"role": "assistant", "content": "The latent."}]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever `datasets` leaves behind goes with the test."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def parquet(rows: Rows) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def jsonl(rows: Rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def save(folder: Path, files: dict[str, bytes]) -> str:
    """A folder of data files, as a spec."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return f"hf:{folder}"


def test_files_and_data_sets_in_the_order_given(tmp_path: Path) -> None:
    plain, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("plain")
    lines.write_bytes(jsonl([{"text": "one"}, {"text": "two"}]))
    folder = save(tmp_path / "data", {"test.parquet": parquet([{"text": "three"}, {"text": ""}, {"text": "four"}])})
    found = open_texts([str(lines), folder, str(plain)])
    assert [document.text for document in found] == ["one\n\ntwo", "three\n\n\n\nfour", "plain"]
    assert [document.name for document in found] == [str(lines), f"{folder}:default:test", str(plain)]
    assert open_texts([document.name for document in found]) == found


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([{"content": "no", "text": "yes", "id": 1}], "yes"),
        ([{"summary": "no", "content": "yes"}], "yes"),
        ([{"id": "no", "messages": CHAT}], "What is cached?\n\nThe latent."),
        ([{"id": 1, "sentence": "yes"}, {"id": 2, "sentence": "and"}], "yes\n\nand"),
        ([{"text": "one"}, {"text": None}, {"text": "two"}], "one\n\ntwo"),
    ],
)
@pytest.mark.parametrize(("name", "write"), [("train.parquet", parquet), ("train.jsonl", jsonl)])
def test_text_columns(tmp_path: Path, rows: Rows, text: str, name: str, write: Any) -> None:
    (found,) = open_texts([save(tmp_path / "data", {name: write(rows)})])
    assert found.text == text


@pytest.mark.parametrize(
    ("rows", "columns"),
    [([{"question": "a", "answer": "b"}], "question, answer"), ([{"text": 1, "id": 2}], "text, id")],
)
def test_columns_are_named_where_none_is_the_text(tmp_path: Path, rows: Rows, columns: str) -> None:
    with pytest.raises(InputError, match=f"found {columns}$"):
        open_texts([save(tmp_path / "data", {"train.jsonl": jsonl(rows)})])


def test_the_split_is_test_else_validation_else_train(tmp_path: Path) -> None:
    for name in ("train", "validation", "test"):
        folder = save(tmp_path / "data", {f"{name}.jsonl": jsonl([{"text": f"of {name}"}])})
        (found,) = open_texts([folder])
        assert found.text == f"of {name}" and found.name == f"{folder}:default:{name}"
    assert open_texts([f"{folder}::train"])[0].text == "of train"
    with pytest.raises(InputError, match="no split 'dev'; expected one of train, validation, test"):
        open_texts([f"{folder}::dev"])


def test_no_more_is_read_than_is_needed(tmp_path: Path) -> None:
    """The budget ends before the second file, which is damaged."""
    files = {"train-0.jsonl": jsonl([{"text": f"row {i}"} for i in range(9)]), "train-1.jsonl": b'{"text": damaged'}
    folder = save(tmp_path / "data", files)
    (found,) = open_texts([folder], characters=15)
    assert found.text == "row 0\n\nrow 1\n\nr"
    with pytest.raises(InputError, match="cannot be read"):
        open_texts([folder])


CONFIGS = (
    b"---\nconfigs:\n- config_name: one\n  data_files: one.jsonl\n- config_name: two\n  data_files: two.jsonl\n---\n"
)


def test_configs_are_chosen_by_name(tmp_path: Path) -> None:
    files = {"README.md": CONFIGS, "one.jsonl": jsonl([{"text": "1"}]), "two.jsonl": jsonl([{"text": "2"}])}
    folder = save(tmp_path / "data", files)
    assert open_texts([f"{folder}:two"])[0].text == "2"
    with pytest.raises(InputError, match=r"'three' not found. Available: \['one', 'two'\]"):
        open_texts([f"{folder}:three"])
    with pytest.raises(InputError, match=r"Config name is missing. .* \['one', 'two'\]\)$"):
        open_texts([folder])


@pytest.mark.parametrize("spec", ["hf:", "hf::config", "hf:a/b:c:d:e"])
def test_malformed_specs(spec: str) -> None:
    with pytest.raises(InputError, match="expected hf:DATASET, hf:DATASET:CONFIG or hf:DATASET:CONFIG:SPLIT"):
        open_texts([spec])


def test_folders_without_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no text"):
        open_texts([save(tmp_path / "blank", {"train.jsonl": jsonl([{"text": " "}])})])
    with pytest.raises(InputError, match="cannot be opened"):
        open_texts([save(tmp_path / "other", {"weights.bin": b"0"})])
    with pytest.raises(InputError, match="scripts are no longer supported"):
        open_texts([save(tmp_path / "script", {"script.py": b"raise SystemExit('ran')"})])


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install 'datasets"):
        open_texts(["hf:org/data"])


def test_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"the Hub cannot be asked.*offline mode.*expected a connection, or a folder"):
        open_texts(["hf:org/data"])


SCRIPT = """
import sys
from latentfold.convert.errors import InputError
from latentfold.convert.text.datasets import open_texts

for spec in sys.argv[1:]:
    spec, _, token = spec.partition(" with ")
    try:
        (document,) = open_texts([spec], token=token or None)
        print(document.name, repr(document.text))
    except InputError as error:
        print("refused", error)
"""


@pytest.mark.hub
def test_data_sets_of_the_hub(tmp_path: Path) -> None:
    with HubServer() as server:
        server.add_token("hf_secret", user="me", role="read", orgs=["org"])
        files = {"data/train.parquet": parquet([{"text": "a"}]), "data/test.parquet": parquet([{"text": "b"}])}
        first = server.create_repo("org/data", repo_type="dataset", files=files).resolve("main").oid
        last = server.repo("org/data", "dataset").commit({"data/test.parquet": parquet([{"text": "new"}])}).oid
        server.create_repo("org/gated", repo_type="dataset", gated=True, files={"train.jsonl": jsonl([{"text": "c"}])})
        named = f"hf:org/data@{last}:default:test"
        specs = ["hf:org/data", named, f"hf:org/data@{first}::train", "hf:org/data@none", "hf:org/none", "hf:org/gated"]
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *specs, "hf:org/gated with hf_secret"],
            # `datasets` counts downloads with a host of its own
            env={**os.environ, **server.env(tmp_path / "home"), "HF_UPDATE_DOWNLOAD_COUNTS": "0"},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    latest, again, earlier, no_revision, no_data, gated, allowed = done.stdout.splitlines()
    assert latest == again == f"{named} 'new'"
    assert earlier == f"hf:org/data@{first}:default:train 'a'"
    assert no_revision == "refused hf:org/data@none: no revision 'none' on the Hub"
    assert no_data.startswith("refused hf:org/none: no such folder here and no such data set on the Hub")
    assert gated.startswith("refused hf:org/gated: ") and "gated" in gated
    assert allowed.startswith("hf:org/gated@") and allowed.endswith(":default:train 'c'")
