"""Downloads against the Hub's sizes and hashes: each file is hashed once, and a damaged one fetched again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import RepoFile, constants

from latentfold.convert import InputError, convert_checkpoint
from latentfold.convert.source import hub
from latentfold.convert.source.hub import fetch, same_content
from tests.conftest import MakeModel
from tests.hub_server import Fault, HubServer

pytestmark = pytest.mark.hub
REPO = "org/tiny"
FILES = {"config.json": b'{"a": 1}', "a.safetensors": b"a" * 100, "b.safetensors": b"b" * 100}


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Which files were hashed, and how often."""
    found: Counter[str] = Counter()

    def counted(path: Path, remote: RepoFile) -> bool:
        found[remote.path] += 1
        return same_content(path, remote)

    monkeypatch.setattr(hub, "same_content", counted)
    return found


def test_a_conversion_hashes_each_file_once_and_the_next_none(
    make_model: MakeModel, server: HubServer, hashed: Counter[str], tmp_path: Path, options: dict[str, Any]
) -> None:
    source = make_model(max_shard_size="20KB")
    shards = [path.name for path in source.glob("*.safetensors")]
    server.create_repo(REPO, files={path.name: path.read_bytes() for path in source.iterdir()})
    convert_checkpoint(REPO, str(tmp_path / "first"), kv_rank=8, rope_dim=4, **options)
    assert set(hashed) >= {"config.json", "tokenizer.json", *shards} and len(shards) > 2
    assert set(hashed.values()) == {1}
    hashed.clear()
    convert_checkpoint(REPO, str(tmp_path / "second"), kv_rank=8, rope_dim=4, **options)
    assert not hashed


def test_a_new_commit_has_only_its_new_files_hashed(server: HubServer, hashed: Counter[str]) -> None:
    server.create_repo(REPO, files=FILES)
    fetch(REPO, ["*"], None, None)
    hashed.clear()
    server.repo(REPO).commit({"a.safetensors": b"c" * 100})
    folder = fetch(REPO, ["*"], None, None)
    assert list(hashed) == ["a.safetensors"] and (folder / "a.safetensors").read_bytes() == b"c" * 100


@pytest.mark.parametrize("local", [False, True], ids=["cache", "folder"])
@pytest.mark.parametrize(
    "damaged", [["a.safetensors"], ["config.json"], list(FILES)], ids=lambda names: "+".join(names)
)
def test_damaged_downloads_heal_on_repeating(
    damaged: list[str], local: bool, server: HubServer, hashed: Counter[str], tmp_path: Path
) -> None:
    """Every one at once: a file that stayed in the cache would not be hashed again."""
    commit = server.create_repo(REPO, files=FILES).resolve("main").oid
    target = tmp_path / "here" if local else None
    for name in damaged:
        server.fail(Fault("GET", f"/resolve/.*{name}", corrupt=True))
    with pytest.raises(InputError, match=r"damaged download, now deleted.*; repeat") as raised:
        fetch(REPO, ["*"], commit, None, target)
    assert all(name in str(raised.value) for name in damaged)
    hashed.clear()
    folder = fetch(REPO, ["*"], commit, None, target)
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    assert sorted(hashed) == sorted(damaged)


def test_a_cached_file_of_another_size_is_noticed_and_heals(server: HubServer) -> None:
    server.create_repo(REPO, files=FILES)
    folder = fetch(REPO, ["*"], None, None)
    (folder / "a.safetensors").resolve().write_bytes(b"a")
    with pytest.raises(InputError, match=r"a\.safetensors is not what.*now deleted"):
        fetch(REPO, ["*"], None, None)
    assert (fetch(REPO, ["*"], None, None) / "a.safetensors").read_bytes() == FILES["a.safetensors"]


def test_a_cache_that_lies_elsewhere_is_the_one_looked_at(
    server: HubServer, hashed: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache behind a link, as on machines whose disk for data is not the home's."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "link" / "hub"))
    server.create_repo(REPO, files=FILES)
    fetch(REPO, ["*"], None, None)
    fetch(REPO, ["*"], None, None)
    assert set(hashed.values()) == {1}


def test_what_a_killed_call_brought_is_checked_by_the_next(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted between the download and its hash, a damaged file is not taken for one that was checked."""
    server.create_repo("org/t", files={"config.json": b"{}", "a.safetensors": b"a" * 100})
    server.fail(Fault("GET", "/resolve/.*a.safetensors", corrupt=True))

    def killed(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(hub, "same_content", killed)
        fetch("org/t", ["*"], None, None)
    with pytest.raises(InputError, match="a damaged download, now deleted"):
        fetch("org/t", ["*"], None, None)
    assert (fetch("org/t", ["*"], None, None) / "a.safetensors").read_bytes() == b"a" * 100
