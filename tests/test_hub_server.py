"""The test Hub, driven by the real client: what it serves, and what the client makes of each fault."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hub_server import CLIENT_ENV, LFS_THRESHOLD, Blob, Fault, HubServer

os.environ.update(CLIENT_ENV)  # the client reads these when it is imported

import httpx2
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    RepoFile,
    get_session,
    try_to_load_from_cache,
)
from huggingface_hub.constants import DOWNLOAD_CHUNK_SIZE
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

pytestmark = pytest.mark.hub

REPO = "alice/model"
TENSOR = bytes(range(256))
HEADER = json.dumps({"w": {"dtype": "U8", "shape": [256], "data_offsets": [0, 256]}}).encode()
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + TENSOR
CONFIG = b'{"layers": 2}'


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub where Alice and Bob have accounts, with the environment of this process pointing at it.

    That is for subprocesses and for what the client reads at each call, such as HF_TOKEN; in this process
    the client is told the endpoint and the cache by argument.
    """
    with HubServer() as server:
        server.add_token("hf_alice", user="alice", orgs=["acme"])
        server.add_token("hf_bob", user="bob")
        server.add_token("hf_reader", user="alice", role="read")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        for name, value in server.env(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def api(hub: HubServer) -> HfApi:
    return HfApi(endpoint=hub.url, token="hf_alice")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def as_user(hub: HubServer, token: str | bool) -> HfApi:
    return HfApi(endpoint=hub.url, token=token)


def upload_lfs(api: HfApi, content: bytes = WEIGHTS, **options: Any) -> Any:
    """Upload by LFS in any process: an open file object cannot go by Xet, whatever the environment says."""
    file = io.BytesIO(content)
    return api.upload_file(path_or_fileobj=file, path_in_repo="model.safetensors", repo_id=REPO, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# ------------------------------------------------------------------------------------------- round trip


ROUND_TRIP = """
import json, sys
from huggingface_hub import HfApi, create_repo, list_repo_files, snapshot_download

repo_id, repo_type, folder = sys.argv[1:]
create_repo(repo_id, repo_type=repo_type, private=True)
upload = lambda: HfApi().upload_folder(repo_id=repo_id, repo_type=repo_type, folder_path=folder)
print(json.dumps({
    "first": upload().oid,
    "again": upload().oid,
    "files": list_repo_files(repo_id, repo_type=repo_type),
    "snapshot": snapshot_download(repo_id, repo_type=repo_type),
}))
"""


@pytest.mark.parametrize("repo_type", ["model", "dataset"])
def test_a_folder_uploaded_comes_back_the_same(hub: HubServer, tmp_path: Path, repo_type: str) -> None:
    folder = tmp_path / "folder"
    files = {
        "model.safetensors": WEIGHTS,  # large file storage by its name
        "vocabulary.dat": os.urandom(LFS_THRESHOLD),  # by its size
        "README.md": b"---\nlicense: mit\n---\n",
        "nested/deeper/notes.txt": b"small text",
        "empty.bin": b"",
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)

    home = tmp_path / "home"
    client = subprocess.run(
        [sys.executable, "-c", ROUND_TRIP, "acme/thing", repo_type, str(folder)],
        env=hub.env(home, token="hf_alice"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert client.returncode == 0, client.stderr
    result = json.loads(client.stdout)

    repo = hub.repo("acme/thing", repo_type)
    attributes = repo.files().pop(".gitattributes")
    assert repo.private
    assert repo.files() == {**files, ".gitattributes": attributes}
    assert sorted(result["files"]) == sorted(repo.files())
    assert contents(Path(result["snapshot"])) == repo.files()
    assert home in Path(result["snapshot"]).parents
    assert {path for path, blob in repo.resolve("main").files.items() if blob.lfs} == {
        "model.safetensors",
        "vocabulary.dat",
    }
    assert repo.commits()[0].oid == result["first"] == result["again"]
    assert len(repo.commits()) == 2, "the second upload had nothing to commit"
    assert len(hub.requests_for("PUT", "/lfs-upload/")) == 2
    assert not hub.requests_for(".*", "xet")
    assert not [request for request in hub.requests if request.status and request.status >= 400]


UPLOAD = """
import sys
from huggingface_hub import upload_file

repo_id, file = sys.argv[1:]
upload_file(repo_id=repo_id, path_or_fileobj=file, path_in_repo=file)
"""


def test_the_client_needs_xet_disabled_to_upload_lfs_files(hub: HubServer, tmp_path: Path) -> None:
    hub.create_repo(REPO)
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    environment = hub.env(tmp_path / "home", token="hf_alice")
    del environment["HF_HUB_DISABLE_XET"]
    client = subprocess.run(
        [sys.executable, "-c", UPLOAD, REPO, "model.safetensors"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert client.returncode != 0
    assert [request.status for request in hub.requests_for("GET", "/xet-write-token/main")] == [403]
    assert len(hub.repo(REPO).commits()) == 1


def test_environment_of_a_subprocess_carries_no_login(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_developer")
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", "hf_of_the_developer")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    environment = hub.env(tmp_path)
    assert "hf_of_the_developer" not in environment.values()
    assert "HF_HUB_OFFLINE" not in environment
    assert environment["HF_ENDPOINT"] == hub.url
    assert environment["PATH"] == os.environ["PATH"]


# ----------------------------------------------------------------------------------- listing and reading


def test_metadata_of_files(hub: HubServer, api: HfApi) -> None:
    repo = hub.create_repo(REPO, files={"model.safetensors": WEIGHTS, "a/config.json": CONFIG})
    config_oid = hashlib.sha1(b"blob %d\0" % len(CONFIG) + CONFIG).hexdigest()
    sha256 = hashlib.sha256(WEIGHTS).hexdigest()

    info = api.model_info(REPO, files_metadata=True)
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or []}
    assert info.sha == repo.commits()[0].oid
    assert siblings.keys() == repo.files().keys()
    assert (siblings["a/config.json"].size, siblings["a/config.json"].blob_id) == (len(CONFIG), config_oid)
    assert siblings["a/config.json"].lfs is None
    lfs = siblings["model.safetensors"].lfs
    assert lfs is not None and (lfs.sha256, lfs.size) == (sha256, len(WEIGHTS))

    top = {entry.path: type(entry).__name__ for entry in api.list_repo_tree(REPO)}
    assert top == {".gitattributes": "RepoFile", "model.safetensors": "RepoFile", "a": "RepoFolder"}
    assert [entry.path for entry in api.list_repo_tree(REPO, "a")] == ["a/config.json"]
    assert sorted(api.list_repo_files(REPO)) == [".gitattributes", "a/config.json", "model.safetensors"]
    with pytest.raises(RemoteEntryNotFoundError):
        list(api.list_repo_tree(REPO, "b"))

    found = api.get_paths_info(REPO, ["a", "model.safetensors", "absent"])
    assert [entry.path for entry in found] == ["a", "model.safetensors"]

    metadata = api.get_hf_file_metadata(url=f"{hub.url}/{REPO}/resolve/main/model.safetensors")
    assert (metadata.etag, metadata.size, metadata.commit_hash) == (sha256, len(WEIGHTS), info.sha)
    assert metadata.xet_file_data is None
    headers = get_session().head(f"{hub.url}/{REPO}/resolve/main/model.safetensors").headers
    assert (headers["X-Linked-Etag"], headers["X-Linked-Size"]) == (f'"{sha256}"', str(len(WEIGHTS)))
    assert "X-Linked-Etag" not in get_session().head(f"{hub.url}/{REPO}/resolve/main/a/config.json").headers
    assert api.get_hf_file_metadata(url=f"{hub.url}/{REPO}/resolve/main/a/config.json").etag == config_oid


def test_what_exists(hub: HubServer, api: HfApi, cache: Path) -> None:
    hub.create_repo(REPO, files={"config.json": CONFIG})
    assert api.repo_exists(REPO) and not api.repo_exists("alice/absent")
    assert not api.repo_exists(REPO, repo_type="dataset")
    assert api.file_exists(REPO, "config.json") and not api.file_exists(REPO, "absent.json")
    assert api.revision_exists(REPO, "main") and not api.revision_exists(REPO, "absent")
    with pytest.raises(RemoteEntryNotFoundError):
        api.hf_hub_download(REPO, "absent.json", cache_dir=cache)
    with pytest.raises(RevisionNotFoundError):
        api.hf_hub_download(REPO, "config.json", revision="absent", cache_dir=cache)
    with pytest.raises(RepositoryNotFoundError):
        api.hf_hub_download("alice/absent", "config.json", cache_dir=cache)


def test_every_kind_of_revision(hub: HubServer, api: HfApi, cache: Path) -> None:
    repo = hub.create_repo(REPO)
    first = repo.commit({"config.json": b"first"})
    api.create_tag(REPO, tag="v1")
    repo.commit({"config.json": b"second"}, title="change it")
    api.create_branch(REPO, branch="try/it", revision="v1")
    repo.commit({"config.json": b"branched"}, branch="try/it", title="branch off")

    def read(revision: str | None) -> bytes:
        return Path(api.hf_hub_download(REPO, "config.json", revision=revision, cache_dir=cache)).read_bytes()

    revisions = [None, "main", "v1", first.oid, "try/it", "refs/heads/try/it"]
    assert [read(each) for each in revisions] == [
        b"second",
        b"second",
        b"first",
        b"first",
        b"branched",
        b"branched",
    ]
    refs = api.list_repo_refs(REPO)
    assert {branch.name for branch in refs.branches} == {"main", "try/it"}
    assert [(tag.name, tag.target_commit) for tag in refs.tags] == [("v1", first.oid)]
    history = api.list_repo_commits(REPO)
    assert [commit.title for commit in history] == ["change it", "a commit", "initial commit"]
    assert [commit.commit_id for commit in history] == [commit.oid for commit in repo.commits("main")]
    branched = api.list_repo_commits(REPO, revision="try/it")
    assert [commit.title for commit in branched] == ["branch off", "a commit", "initial commit"]

    api.create_tag(REPO, tag="v1", exist_ok=True)
    api.create_branch(REPO, branch="try/it", exist_ok=True)
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_tag(REPO, tag="v1")
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_branch(REPO, branch="try/it")
    for fixed in ("v1", "refs/tags/v1", first.oid):
        with pytest.raises(RevisionNotFoundError):
            api.upload_file(path_or_fileobj=b"third", path_in_repo="config.json", repo_id=REPO, revision=fixed)


def test_ranges(hub: HubServer, api: HfApi) -> None:
    hub.create_repo(REPO, files={"model.safetensors": WEIGHTS, "ten": b"0123456789"})
    metadata = api.get_safetensors_metadata(REPO)
    assert metadata.files_metadata["model.safetensors"].tensors["w"].shape == [256]
    fetched = hub.requests_for("GET", "/resolve/main/model.safetensors")
    assert [(request.status, request.headers["range"]) for request in fetched] == [(206, "bytes=0-100000")]

    def get(asked: str) -> tuple[int, bytes, str | None]:
        response = get_session().get(f"{hub.url}/{REPO}/resolve/main/ten", headers={"Range": asked})
        return response.status_code, response.content, response.headers.get("Content-Range")

    assert get("bytes=2-4") == (206, b"234", "bytes 2-4/10")
    assert get("bytes=7-") == (206, b"789", "bytes 7-9/10")
    assert get("bytes=-2") == (206, b"89", "bytes 8-9/10")
    assert get("bytes=8-99") == (206, b"89", "bytes 8-9/10")
    assert get("lines=1-2") == (200, b"0123456789", None)
    status, _, content_range = get("bytes=10-")
    assert (status, content_range) == (416, "bytes */10")


# --------------------------------------------------------------------------------------------- permission


def test_private_repository(hub: HubServer, api: HfApi, cache: Path) -> None:
    hub.create_repo(REPO, private=True, files={"config.json": CONFIG})
    for token, status in ((False, 401), ("hf_bob", 404)):
        stranger = as_user(hub, token)
        with pytest.raises(RepositoryNotFoundError) as refused:
            stranger.hf_hub_download(REPO, "config.json", cache_dir=cache)
        assert refused.value.response.status_code == status
        with pytest.raises(RepositoryNotFoundError):
            stranger.model_info(REPO)
        assert not stranger.repo_exists(REPO)
    assert api.model_info(REPO).private
    assert Path(api.hf_hub_download(REPO, "config.json", cache_dir=cache)).read_bytes() == CONFIG


def test_gated_repository(hub: HubServer, cache: Path) -> None:
    repo = hub.create_repo(REPO, gated=True, files={"config.json": CONFIG})
    bob = as_user(hub, "hf_bob")
    assert bob.model_info(REPO).gated == "manual"
    assert "config.json" in bob.list_repo_files(REPO)
    for token, status in ((False, 401), ("hf_bob", 403)):
        with pytest.raises(GatedRepoError) as refused:
            as_user(hub, token).hf_hub_download(REPO, "config.json", cache_dir=cache)
        assert refused.value.response.status_code == status
    repo.granted.add("bob")
    assert Path(bob.hf_hub_download(REPO, "config.json", cache_dir=cache)).read_bytes() == CONFIG


def test_who_a_token_is(hub: HubServer, api: HfApi, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = api.whoami()
    assert (identity["name"], identity["orgs"][0]["name"]) == ("alice", "acme")
    assert identity["auth"]["accessToken"]["role"] == "write"
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    assert HfApi(endpoint=hub.url).whoami()["auth"]["accessToken"]["role"] == "read"

    hub.create_repo(REPO)
    impostor = as_user(hub, "hf_unknown")
    for call in (impostor.whoami, lambda: impostor.model_info(REPO)):
        with pytest.raises(HfHubHTTPError) as refused:
            call()
        assert refused.value.response.status_code == 401
        assert not isinstance(refused.value, RepositoryNotFoundError)


@pytest.mark.parametrize(("token", "status"), [(False, 401), ("hf_reader", 403), ("hf_bob", 403)])
def test_writing_takes_a_member_with_the_write_role(hub: HubServer, token: str | bool, status: int) -> None:
    repo = hub.create_repo(REPO)
    user = as_user(hub, token)
    for write in (
        lambda: user.upload_file(path_or_fileobj=CONFIG, path_in_repo="config.json", repo_id=REPO),
        lambda: user.create_branch(REPO, branch="b"),
        lambda: user.create_tag(REPO, tag="t"),
        lambda: user.create_repo("acme/new"),
    ):
        with pytest.raises(HfHubHTTPError) as refused:
            write()
        assert refused.value.response.status_code == status
    assert len(repo.commits()) == 1
    assert list(repo.refs) == ["refs/heads/main"]
    assert list(hub.repos) == [("model", REPO)]


def test_create_repo(hub: HubServer, api: HfApi) -> None:
    url = api.create_repo("new", private=True)
    assert (url.repo_id, url.url) == ("alice/new", f"{hub.url}/alice/new")
    assert hub.repo("alice/new").private
    assert api.create_repo("acme/set", repo_type="dataset").repo_type == "dataset"
    assert not hub.repo("acme/set", "dataset").private

    assert api.create_repo("alice/new", exist_ok=True).repo_id == "alice/new"
    with pytest.raises(HfHubHTTPError) as refused:
        api.create_repo("alice/new")
    assert refused.value.response.status_code == 409


# ------------------------------------------------------------------------------------------------ commits


def test_pull_request_leaves_the_branch_alone(hub: HubServer, cache: Path) -> None:
    repo = hub.create_repo(REPO, files={"config.json": CONFIG})
    before = repo.commits()
    bob = as_user(hub, "hf_bob")
    proposal = upload_lfs(bob, create_pr=True)
    assert (proposal.pr_num, proposal.pr_revision) == (1, "refs/pr/1")
    assert repo.commits() == before
    assert repo.files("refs/pr/1") == {**repo.files(), "model.safetensors": WEIGHTS}
    assert repo.commits("refs/pr/1")[0].author == "bob"
    assert repo.commits("refs/pr/1")[1:] == before
    proposals = bob.list_repo_refs(REPO, include_pull_requests=True).pull_requests or []
    assert [reference.ref for reference in proposals] == ["refs/pr/1"]
    fetched = bob.hf_hub_download(REPO, "model.safetensors", revision="refs/pr/1", cache_dir=cache)
    assert Path(fetched).read_bytes() == WEIGHTS


def test_lfs_object_is_sent_once(hub: HubServer, api: HfApi) -> None:
    repo = hub.create_repo(REPO)
    upload_lfs(api, WEIGHTS, commit_message="one")
    upload_lfs(api, WEIGHTS[:-1], commit_message="two")
    upload_lfs(api, WEIGHTS, commit_message="three")
    assert [commit.title for commit in repo.commits()] == ["three", "two", "one", "initial commit"]
    assert repo.files()["model.safetensors"] == WEIGHTS
    assert [each.received for each in hub.requests_for("PUT", ".*")] == [len(WEIGHTS), len(WEIGHTS) - 1]
    assert len(hub.requests_for("POST", "/objects/verify")) == 2


def test_upload_that_is_not_its_hash_is_refused(hub: HubServer) -> None:
    repo = hub.create_repo(REPO)
    oid = hashlib.sha256(WEIGHTS).hexdigest()
    batch = {"operation": "upload", "transfers": ["basic"], "objects": [{"oid": oid, "size": len(WEIGHTS)}]}
    login = {"Authorization": "Bearer hf_alice"}
    answer = get_session().post(f"{hub.url}/{REPO}.git/info/lfs/objects/batch", json=batch, headers=login)
    upload_url = answer.json()["objects"][0]["actions"]["upload"]["href"]
    assert get_session().put(upload_url, content=WEIGHTS[::-1]).status_code == 400
    assert get_session().put(upload_url.replace("ticket=", "ticket=x"), content=WEIGHTS).status_code == 403
    verify = {"oid": oid, "size": len(WEIGHTS)}
    verify_url = f"{hub.url}/{REPO}.git/info/lfs/objects/verify"
    assert get_session().post(verify_url, json=verify, headers=login).status_code == 404
    assert repo.lfs_objects == {}
    assert get_session().put(upload_url, content=WEIGHTS).status_code == 200
    assert repo.lfs_objects == {oid: WEIGHTS}


def test_commit_is_all_or_nothing(hub: HubServer, api: HfApi) -> None:
    repo = hub.create_repo(REPO, files={"config.json": CONFIG, "old/a": b"a", "old/b": b"b"})
    before, files_before = repo.resolve("main"), repo.files()

    def commit(*operations: CommitOperationAdd | CommitOperationDelete, **options: Any) -> None:
        api.create_commit(REPO, operations, commit_message="change", **options)

    def unchanged() -> bool:
        return repo.resolve("main") is before and repo.files() == files_before

    with pytest.raises(EntryNotFoundError):
        commit(CommitOperationAdd("new.json", b"new"), CommitOperationDelete("absent.json"))
    assert unchanged()

    lines = [
        {"key": "header", "value": {"summary": "weights that were not uploaded", "description": ""}},
        {"key": "file", "value": {"path": "new.json", "content": "bmV3", "encoding": "base64"}},
        {"key": "lfsFile", "value": {"path": "model.safetensors", "algo": "sha256", "oid": "0" * 64}},
    ]
    refused = get_session().post(
        f"{hub.url}/api/models/{REPO}/commit/main",
        content="\n".join(json.dumps(line) for line in lines),
        headers={"Authorization": "Bearer hf_alice"},
    )
    assert refused.status_code == 400
    assert unchanged()

    fault = hub.fail(Fault("POST", "/commit/", status=500))
    with pytest.raises(HfHubHTTPError):
        upload_lfs(api)
    assert fault.hits == 1
    assert unchanged()
    assert list(repo.lfs_objects.values()) == [WEIGHTS], "the content had arrived"

    commit(
        CommitOperationAdd("new.json", b"new"),
        CommitOperationAdd("model.safetensors", io.BytesIO(WEIGHTS)),
        CommitOperationDelete("old/"),
        parent_commit=before.oid,
    )
    after = repo.resolve("main")
    assert after.parent is before
    assert repo.files() == {
        ".gitattributes": repo.files()[".gitattributes"],
        "config.json": CONFIG,
        "new.json": b"new",
        "model.safetensors": WEIGHTS,
    }

    with pytest.raises(HfHubHTTPError, match="412"):
        commit(CommitOperationAdd("late.json", b"late"), parent_commit=before.oid)
    assert repo.resolve("main") is after


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("license: mit\ntags: [a, b]\nbase_model: org/model", None),
        ("license: My Licence", "license"),
        ("base_model: ./folder", "base_model"),
        ("tags: [1]", "tags"),
        ("a: [", "invalid YAML"),
        ("- a", "mapping"),
        ("model-index: [{name: m, results: [{task: {type: t}, dataset: {type: d, name: D}, metrics: [{}]}]}]", "type"),
        ("model-index: [{name: m}]", "results"),
    ],
)
def test_model_card_is_validated(hub: HubServer, api: HfApi, metadata: str, message: str | None) -> None:
    repo = hub.create_repo(REPO)
    readme = CommitOperationAdd("README.md", f"---\n{metadata}\n---\n# Card\n".encode())
    if message is None:
        api.create_commit(REPO, [readme], commit_message="card")
        return
    with pytest.raises(ValueError, match=message):
        api.create_commit(REPO, [readme], commit_message="card")
    assert len(repo.commits()) == 1


# ------------------------------------------------------------------------------------------------- faults


def download(api: HfApi, cache: Path, file: str = "model.safetensors") -> bytes:
    return Path(api.hf_hub_download(REPO, file, cache_dir=cache)).read_bytes()


@pytest.fixture
def model(hub: HubServer) -> None:
    hub.create_repo(REPO, files={"model.safetensors": WEIGHTS, "config.json": CONFIG})


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (401, None, HfHubHTTPError),
        (401, "RepoNotFound", RepositoryNotFoundError),
        (403, None, LocalEntryNotFoundError),
        (403, "GatedRepo", GatedRepoError),
        (404, None, LocalEntryNotFoundError),
        (404, "RepoNotFound", RepositoryNotFoundError),
        (404, "RevisionNotFound", RevisionNotFoundError),
        (404, "EntryNotFound", RemoteEntryNotFoundError),
    ],
)
def test_refusal_is_raised_at_once(
    hub: HubServer, api: HfApi, cache: Path, status: int, code: str | None, error: type[Exception]
) -> None:
    headers = {"X-Error-Code": code} if code else {}
    fault = hub.fail(Fault("HEAD", "/resolve/.*safetensors", status=status, headers=headers))
    with pytest.raises(error) as raised:
        download(api, cache)
    assert type(raised.value) is error
    assert (fault.hits, len(hub.requests)) == (1, 1)
    assert download(api, cache) == WEIGHTS


@pytest.mark.usefixtures("model")
def test_rate_limit_is_waited_for(hub: HubServer, api: HfApi) -> None:
    hub.fail(Fault("GET", "/tree/", status=429, headers={"Retry-After": "1"}))
    start = time.monotonic()
    assert "config.json" in api.list_repo_files(REPO)
    assert time.monotonic() - start >= 2, "the second it was told to wait, and one the client adds"
    assert [request.status for request in hub.requests] == [429, 200]


@pytest.mark.usefixtures("model")
def test_server_error_is_retried_on_the_metadata_and_not_on_the_content(
    hub: HubServer, api: HfApi, cache: Path
) -> None:
    hub.fail(Fault("HEAD", "/resolve/", status=500, times=2))
    fault = hub.fail(Fault("GET", "/resolve/", status=500))
    with pytest.raises(HfHubHTTPError) as raised:
        download(api, cache)
    assert raised.value.response.status_code == 500
    outcomes = [(request.method, request.status) for request in hub.requests]
    assert outcomes == [("HEAD", 500), ("HEAD", 500), ("HEAD", 200), ("GET", 500)]
    assert fault.hits == 1
    assert download(api, cache) == WEIGHTS


def test_snapshot_that_failed_midway_resumes_with_the_files_it_lacks(hub: HubServer, api: HfApi, cache: Path) -> None:
    hub.create_repo(REPO, files={f"{number}.safetensors": WEIGHTS + bytes([number]) for number in range(3)})
    hub.fail(Fault("GET", r"/resolve/.*\.safetensors", status=500, after=1))
    with pytest.raises(HfHubHTTPError):
        api.snapshot_download(REPO, cache_dir=cache, max_workers=1)
    weights = [request.status for request in hub.requests_for("GET", r"/resolve/.*\.safetensors")]
    assert weights[:2] == [200, 500]
    snapshot = Path(api.snapshot_download(REPO, cache_dir=cache))
    assert contents(snapshot) == hub.repo(REPO).files()
    arrived = [request.path for request in hub.requests_for("GET", "/resolve/") if request.status == 200]
    assert len(arrived) == len(set(arrived)) == 4, "none was downloaded twice"


@pytest.mark.parametrize("kept", [0, DOWNLOAD_CHUNK_SIZE])
def test_truncated_download_goes_on_from_the_last_whole_chunk(
    hub: HubServer, api: HfApi, cache: Path, kept: int
) -> None:
    content = bytes(kept) + WEIGHTS
    hub.create_repo(REPO, files={"model.safetensors": content})
    hub.fail(Fault("GET", r"/resolve/.*safetensors", truncate=kept + 100))
    assert download(api, cache) == content
    first, second = hub.requests_for("GET", "/resolve/")
    assert (first.status, first.sent) == (200, kept + 100)
    assert second.sent == len(WEIGHTS)
    assert (second.status, second.headers.get("range")) == ((206, f"bytes={kept}-") if kept else (200, None))


@pytest.mark.usefixtures("model")
def test_short_download_is_detected(hub: HubServer, api: HfApi, cache: Path) -> None:
    fault = hub.fail(Fault("GET", r"/resolve/.*safetensors", shorten=100))
    with pytest.raises(OSError, match="Consistency check failed"):
        download(api, cache)
    assert fault.hits == 1
    assert try_to_load_from_cache(REPO, "model.safetensors", cache_dir=cache) is None


@pytest.mark.usefixtures("model")
def test_corrupt_download_is_not_detected_until_checksums_are_verified(hub: HubServer, api: HfApi, cache: Path) -> None:
    hub.fail(Fault("GET", r"/resolve/.*safetensors", corrupt=True))
    content = download(api, cache)
    assert len(content) == len(WEIGHTS)
    assert content[:-1] == WEIGHTS[:-1] and content[-1] != WEIGHTS[-1]
    mismatches = api.verify_repo_checksums(REPO, cache_dir=cache).mismatches
    assert [mismatch["path"] for mismatch in mismatches] == ["model.safetensors"]
    assert mismatches[0]["expected"] == hashlib.sha256(WEIGHTS).hexdigest()


def test_lfs_upload_cut_midway_is_sent_again(hub: HubServer, api: HfApi) -> None:
    repo = hub.create_repo(REPO)
    content = os.urandom(4 * 2**20)
    hub.fail(Fault("PUT", "/lfs-upload/", drop=2**20))
    upload_lfs(api, content)
    first, second = hub.requests_for("PUT", "/lfs-upload/")
    assert (first.status, first.received) == (None, 2**20)
    assert (second.status, second.received) == (200, len(content))
    assert repo.files()["model.safetensors"] == content
    assert len(repo.commits()) == 2


def test_garbled_upload_is_refused(hub: HubServer, api: HfApi) -> None:
    repo = hub.create_repo(REPO)
    fault = hub.fail(Fault("PUT", "/lfs-upload/", garble=True))
    with pytest.raises(RuntimeError, match="uploading"):
        upload_lfs(api)
    assert fault.hits == 1 and repo.lfs_objects == {} and len(repo.commits()) == 1
    upload_lfs(api)
    assert repo.files()["model.safetensors"] == WEIGHTS


def test_response_lost_to_a_commit_leaves_it_applied(hub: HubServer, api: HfApi) -> None:
    repo = hub.create_repo(REPO)
    hub.fail(Fault("POST", "/commit/", truncate=0))
    with pytest.raises(httpx2.RemoteProtocolError):
        upload_lfs(api)
    assert len(repo.commits()) == 2
    assert repo.files()["model.safetensors"] == WEIGHTS
    upload_lfs(api)
    assert len(repo.commits()) == 2, "sent again, there is nothing to commit"


@pytest.mark.usefixtures("model")
def test_fault_strikes_only_when_and_what_it_is_told_to(hub: HubServer, api: HfApi) -> None:
    fault = hub.fail(Fault("GET|HEAD", "/api/models/alice/model$", status=403, after=1, times=2))
    statuses = []
    for _ in range(5):
        get_session().get(f"{hub.url}/api/models/alice/model")
        get_session().get(f"{hub.url}/api/models/alice/model/revision/main")
        get_session().post(f"{hub.url}/api/models/alice/model")
    statuses = [request.status for request in hub.requests_for("GET", "/api/models/alice/model$")]
    assert statuses == [200, 403, 403, 200, 200]
    assert fault.hits == 2
    assert [request.status for request in hub.requests_for("GET", "/revision/")] == [200] * 5
    assert [request.status for request in hub.requests_for("POST", "")] == [501] * 5


@pytest.mark.parametrize("effects", [{}, {"status": 500, "truncate": 0}, {"status": 500, "corrupt": True}])
def test_fault_has_one_effect(effects: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="exactly one effect"):
        Fault("GET", "", **effects)


def test_file_stored_as_told(hub: HubServer, api: HfApi) -> None:
    """A `Blob` overrides the choice of storage, and with it the ETag the client caches under."""
    hub.create_repo(REPO, files={"model.safetensors": Blob(WEIGHTS), "config.json": Blob(CONFIG, lfs=True)})
    files = [each for each in api.list_repo_tree(REPO) if isinstance(each, RepoFile)]
    assert {file.path: file.lfs and file.lfs.sha256 for file in files} == {
        ".gitattributes": None,
        "model.safetensors": None,
        "config.json": hashlib.sha256(CONFIG).hexdigest(),
    }


def test_closed_server_is_gone_even_for_a_connection_kept_alive() -> None:
    with HubServer() as server:
        api = HfApi(endpoint=server.url, token=False)
        server.create_repo(REPO)
        assert api.repo_exists(REPO)
    with pytest.raises(httpx2.TransportError):
        api.model_info(REPO)
