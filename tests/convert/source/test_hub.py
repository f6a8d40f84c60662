"""The real Hub path: unmodified huggingface_hub, in a process of its own, against a loopback server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from latentfold.convert.write.writer import PARTIAL
from tests.conftest import TINY_SIZES, MakeModel
from tests.hub_server import Fault, HubServer

pytestmark = pytest.mark.hub
REPO = "org/tiny"


def run(server: HubServer, home: Path, *args: str, token: str | None = None, **env: str) -> subprocess.CompletedProcess:
    """Run a latentfold command as a user would."""
    return subprocess.run(
        [sys.executable, "-m", "latentfold.convert.cli", *args],
        env={**os.environ, **server.env(home, token=token), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def publish(server: HubServer, folder: Path, *, private: bool = False) -> None:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    # copies of the same weights that a repository may also hold, and that must not be downloaded
    files |= {"consolidated.safetensors": b"x" * 1000, "pytorch_model.bin": b"x" * 1000, "model.gguf": b"x" * 1000}
    server.create_repo(REPO, private=private, files=files)


def test_convert_from_the_hub_then_offline(make_model: MakeModel, tmp_path: Path, text_file: Path) -> None:
    source = make_model(max_shard_size="20KB")
    with HubServer() as server:
        publish(server, source)
        commit = server.repo(REPO).resolve("main").oid
        described = run(server, tmp_path / "home", "inspect", REPO)
        assert described.returncode == 0 and commit in described.stdout
        assert not server.requests_for("GET", r"\.safetensors$")  # inspect needs config.json alone
        planned = run(server, tmp_path / "home", "convert", REPO, str(tmp_path / "a"), "--dry-run")
        assert planned.returncode == 0, planned.stderr
        assert not (tmp_path / "a").exists()
        command = ["convert", REPO, str(tmp_path / "a"), *TINY_SIZES, "--calibration", str(text_file)]
        done = run(server, tmp_path / "home", *command, "--revision", "main")
        assert done.returncode == 0, done.stderr
        assert commit in (tmp_path / "a" / "latentfold.json").read_text()
        assert not server.requests_for("GET", r"consolidated|\.bin$|\.gguf$")
        command[2] = str(tmp_path / "b")
        before = len(server.requests)
        offline = run(server, tmp_path / "home", *command, HF_HUB_OFFLINE="1")
        assert offline.returncode == 0, offline.stderr
        assert len(server.requests) == before
    weights = "model.safetensors"
    assert (tmp_path / "a" / weights).read_bytes() == (tmp_path / "b" / weights).read_bytes()


def test_private_repository_needs_the_token(make_model: MakeModel, tmp_path: Path) -> None:
    with HubServer() as server:
        publish(server, make_model(), private=True)
        server.add_token("hf_secret", user="me", role="read", orgs=["org"])
        refused = run(server, tmp_path / "one", "inspect", REPO)
        assert refused.returncode == 2
        assert refused.stderr.startswith("Error: ") and "private" in refused.stderr and refused.stderr.count("\n") == 1
        for accepted in (
            run(server, tmp_path / "two", "inspect", REPO, "--token", "hf_secret"),
            run(server, tmp_path / "three", "inspect", REPO, token="hf_secret"),
        ):
            assert accepted.returncode == 0, accepted.stderr
            assert "hf_secret" not in accepted.stdout + accepted.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["inspect", "org/nothing"], "no such repository"),
        (["inspect", REPO, "--revision", "nope"], "no revision 'nope'"),
    ],
)
def test_what_is_not_there(args: list[str], message: str, make_model: MakeModel, tmp_path: Path) -> None:
    with HubServer() as server:
        publish(server, make_model())
        found = run(server, tmp_path / "home", *args)
    assert found.returncode == 2 and message in found.stderr and found.stderr.count("\n") == 1


def test_a_failed_download_writes_nothing_and_the_next_run_succeeds(
    make_model: MakeModel, tmp_path: Path, text_file: Path
) -> None:
    out = tmp_path / "out"
    with HubServer() as server:
        publish(server, make_model())
        fault = server.fail(Fault(method="GET", path=r"/resolve/.*/model\.safetensors$", status=500, times=20))
        command = ["convert", REPO, str(out), *TINY_SIZES, "--calibration", str(text_file)]
        failed = run(server, tmp_path / "home", *command)
        assert fault.hits and failed.returncode == 2, failed.stderr
        assert failed.stderr.count("\n") == 1 and "Traceback" not in failed.stderr
        assert not out.exists() and not (out / PARTIAL).exists()
        server.faults.clear()
        done = run(server, tmp_path / "home", *command)
        assert done.returncode == 0, done.stderr


def test_streamed_source_leaves_no_copy_and_gives_the_same_weights(
    make_model: MakeModel, tmp_path: Path, text_file: Path
) -> None:
    whole, streamed, home = tmp_path / "whole", tmp_path / "streamed", tmp_path / "home"
    options = [*TINY_SIZES, "--calibration", str(text_file)]
    with HubServer() as server:
        publish(server, make_model(max_shard_size="20KB"))
        assert run(server, tmp_path / "other", "convert", REPO, str(whole), *options).returncode == 0
        before = len(server.requests)
        done = run(server, home, "convert", REPO, str(streamed), "--stream", *options)
        assert done.returncode == 0, done.stderr
        fetched = [r.path.rsplit("/", 1)[1] for r in server.requests[before:] if r.path.endswith(".safetensors")]
        assert len(set(fetched)) > 2 and not list(home.rglob("*.safetensors"))
        offline = run(server, home, "convert", REPO, str(tmp_path / "no"), "--stream", *options, HF_HUB_OFFLINE="1")
        assert offline.returncode == 2 and "HF_HUB_OFFLINE" in offline.stderr
    assert (whole / "model.safetensors").read_bytes() == (streamed / "model.safetensors").read_bytes()


def test_convert_evaluates_and_publishes(make_model: MakeModel, tmp_path: Path, text_file: Path) -> None:
    out, home = tmp_path / "out", tmp_path / "home"
    command = [
        "convert",
        REPO,
        str(out),
        "--stream",
        "--push",
        "me/tiny-mla",
        *TINY_SIZES,
        "--calibration",
        str(text_file),
    ]
    with HubServer() as server:
        publish(server, make_model(max_shard_size="20KB"))
        refused = run(server, home, *command)
        assert refused.returncode == 2 and "not logged in" in refused.stderr and not out.exists()
        server.add_token("hf_me", user="me")
        done = run(server, home, *command, token="hf_me")
        assert done.returncode == 0, done.stderr
        repo = server.repo("me/tiny-mla")
        files = repo.files("main")
        assert files["model.safetensors"] == (out / "model.safetensors").read_bytes()
        assert {"README.md", "evaluation.json", "latentfold.json"} <= set(files)
        assert (
            "hf_me" not in done.stdout + done.stderr + files["README.md"].decode() + files["evaluation.json"].decode()
        )
