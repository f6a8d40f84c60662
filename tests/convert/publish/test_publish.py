"""The whole way: from the Hub and back to it, by the command line and an unmodified client."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from latentfold.eval.records import EVALUATION
from tests.conftest import TINY_SIZES, MakeModel
from tests.hub_server import Fault, HubServer

pytestmark = pytest.mark.hub
SOURCE, TARGET = "org/tiny", "alice/tiny-mla"
TOKEN = "hf_alicealicealicealicealice"
CARD = b"---\nlicense: apache-2.0\nlanguage: en\n---\n# Tiny\n"

COMMANDS = """
import json, sys
from click.testing import CliRunner
from latentfold.convert.cli import main
results = [CliRunner().invoke(main, command) for command in json.loads(sys.argv[1])]
print(json.dumps([[result.exit_code, result.stdout, result.stderr] for result in results]))
"""
LOGITS = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
for name in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval()
    tokens = AutoTokenizer.from_pretrained(name)("Why keep them all?", return_tensors="pt").input_ids
    with torch.no_grad():
        torch.save(model(tokens).logits, name.replace("/", "-") + ".pt")
"""


def script(server: HubServer, folder: Path, home: str, code: str, *args: str, token: str | None = None) -> str:
    """Run a script in a process of its own; what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        env=server.env(folder / home, token=token),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_pull_convert_eval_card_push_pull_load(make_model: MakeModel, tmp_path: Path, text_file: Path) -> None:
    source, out = make_model(max_shard_size="20KB"), tmp_path / "out"
    push = ["push", "out", TARGET, "--quiet", "--tag", "v1"]
    commands: list[list[str]] = [
        ["convert", SOURCE, "out", *TINY_SIZES, "--calibration", str(text_file), "--max-shard-size", "60KB"],
        ["eval", SOURCE, "out", "--text", str(text_file), "--seq-len", "64", "--windows", "2", "--quiet"],
        ["card", "out"],
        push,
        push,
        push,
    ]
    with HubServer() as server:
        server.add_token(TOKEN, user="alice")
        files: dict[str, Any] = {path.name: path.read_bytes() for path in source.iterdir()}
        server.create_repo(SOURCE, files=files | {"README.md": CARD, "LICENSE": b"Apache"})
        fault = server.fail(Fault("PUT", "/lfs-upload/", status=403, after=1))
        printed = script(server, tmp_path, "home", COMMANDS, json.dumps(commands), token=TOKEN)
        results = json.loads(printed)
        assert TOKEN not in printed
        assert [status for status, _, _ in results] == [0, 0, 0, 2, 0, 0], results
        assert fault.hits == 1 and "no permission" in results[3][2]
        shards = len(list(out.glob("*.safetensors")))
        assert len(server.requests_for("PUT", "/lfs-upload/")) == shards + 1, "what had arrived was not sent again"

        repo = server.repo(TARGET)
        commit = repo.resolve("v1")
        assert results[4][1] == f"{server.url}/{TARGET}/commit/{commit.oid}\n"
        assert [each.title for each in repo.commits()] == ["Upload an MLA conversion", "initial commit"]
        found = {name: data for name, data in repo.files("v1").items() if name != ".gitattributes"}
        assert found == {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*.*")} | {
            "LICENSE": b"Apache"
        }
        script(server, tmp_path, "elsewhere", LOGITS, TARGET, "out")
    assert torch.equal(torch.load(tmp_path / "alice-tiny-mla.pt"), torch.load(tmp_path / "out.pt"))

    card = ModelCard(found["README.md"].decode())
    metadata = card.data.to_dict()
    assert [metadata[key] for key in ("base_model", "license", "language")] == [SOURCE, "apache-2.0", "en"]
    assert f"{json.loads(found[EVALUATION])['overall']['gap']:+.3f}" in card.text
    assert server.repo(SOURCE).resolve("main").oid in card.text
