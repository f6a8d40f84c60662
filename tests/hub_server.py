"""A Hugging Face Hub on the loopback interface, for tests.

`HubServer` speaks enough of the Hub's HTTP API for an unmodified `huggingface_hub` client to list,
download, upload and commit against it, so that what a test exercises is the real client's requests,
retries and cache. Everything lives in memory; a test can read the history it produced, the requests
that were made, and switch on faults:

    with HubServer() as server:
        server.add_token("hf_alice", user="alice")
        repo = server.create_repo("alice/model", files={"config.json": b"{}"})
        server.fail(Fault("GET", r"/resolve/.*\\.json", truncate=1))
        subprocess.run([sys.executable, "-c", SCRIPT], env=server.env(tmp_path, token="hf_alice"))
        assert repo.files("main")["config.json"] == b"{}"

The client reads HF_ENDPOINT and its other settings once, at import, so code that does not take an
`endpoint=` argument has to run in a subprocess under `server.env(...)`.

Xet. A download uses Xet only where the server offers it (an `X-Xet-Hash` header), so this server
declines by not offering. An upload of an LFS file does not negotiate: with hf_xet installed the client
goes to Xet unless HF_HUB_DISABLE_XET is set before it is imported (or the content is an open file
object, which Xet cannot take). `CLIENT_ENV` and `env()` set it; without it such an upload fails at once
on the 403 that this server answers a request for a Xet token with.

Where it differs from the Hub: LFS files are served in place and not through a redirect to a CDN; a tree
listing is one page; `.gitignore` is not applied; of a model card's metadata only `CARD_FIELDS` and the shape
of the model-index are validated; repository ids are `namespace/name`; multipart uploads, discussions (a
pull request is the ref its commit made), deletion and settings of repositories, and git itself are not
there. What is not there answers 501.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import socket
import threading
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import cached_property
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

CLIENT_ENV = {
    "HF_HUB_DISABLE_XET": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",  # or the client asks its endpoint which coding agent runs it
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}
"""What a client of this server needs in its environment, whichever server and whoever it is."""

LFS_THRESHOLD = 10 * 2**20
LFS_SUFFIXES = (b"bin", b"ckpt", b"gguf", b"npy", b"npz", b"onnx", b"pt", b"pth", b"safetensors")
GITATTRIBUTES = b"".join(b"*.%b filter=lfs diff=lfs merge=lfs -text\n" % suffix for suffix in LFS_SUFFIXES)

CARD_FIELDS = {
    "base_model": r"\w[\w.-]*/[\w.-]+",
    "language": r"[a-z]{2,3}(-[A-Za-z]+)?|code|multilingual",
    "library_name": r"[\w.-]+",
    "license": r"[a-z0-9][a-z0-9.-]*",
    "license_link": r"https?://\S+|LICEN[SC]E(\.\w+)?",
    "pipeline_tag": r"[a-z0-9-]+",
    "tags": r".+",
}
"""What the fields of a model card's metadata, or each value of a list there, have to look like."""

_POLL_INTERVAL = 0.01
"""Seconds that closing the server may take."""


# ---------------------------------------------------------------------------------------------- storage


@dataclass(frozen=True)
class Blob:
    """The content of a file, and whether git holds it or a pointer to it in large file storage."""

    content: bytes
    lfs: bool = False

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def pointer(self) -> bytes:
        """What git holds in place of an LFS file."""
        spec = "https://git-lfs.github.com/spec/v1"
        return f"version {spec}\noid sha256:{self.sha256}\nsize {len(self.content)}\n".encode()

    @cached_property
    def oid(self) -> str:
        """The git object id, which for an LFS file is its pointer's."""
        stored = self.pointer if self.lfs else self.content
        return hashlib.sha1(b"blob %d\0" % len(stored) + stored).hexdigest()

    @property
    def etag(self) -> str:
        """What identifies the content to the client: its cache key, and its test for 'unchanged'."""
        return self.sha256 if self.lfs else self.oid


@dataclass(frozen=True)
class Commit:
    oid: str
    title: str
    message: str
    author: str
    date: datetime
    parent: Commit | None
    files: Mapping[str, Blob]


class Repo:
    """A repository: immutable commits, refs that point at them, and the LFS objects it was sent."""

    def __init__(self, repo_id: str, repo_type: str, *, private: bool, gated: bool) -> None:
        self.id = repo_id
        self.type = repo_type
        self.private = private
        self.gated = gated
        self.granted: set[str] = set()
        """Users, beyond the namespace's members, who were let through the gate."""
        self.refs: dict[str, Commit] = {}
        """Full names (`refs/heads/main`, `refs/tags/v1`, `refs/pr/1`) to commits."""
        self.lfs_objects: dict[str, bytes] = {}
        self._commits: dict[str, Commit] = {}
        first = {".gitattributes": Blob(GITATTRIBUTES)}
        self.push("refs/heads/main", first, title="initial commit", author="system")

    @property
    def namespace(self) -> str:
        return self.id.split("/")[0]

    @property
    def web_path(self) -> str:
        return self.id if self.type == "model" else f"{self.type}s/{self.id}"

    def commits(self, revision: str = "main") -> list[Commit]:
        """The history of a branch, tag, pull request or commit, newest first."""
        history = []
        commit: Commit | None = self.resolve(revision)
        while commit is not None:
            history.append(commit)
            commit = commit.parent
        return history

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """The content of every file at a revision, large ones included."""
        return {path: blob.content for path, blob in self.resolve(revision).files.items()}

    def commit(
        self,
        files: Mapping[str, bytes | Blob],
        *,
        deleted: Iterable[str] = (),
        branch: str = "main",
        title: str = "a commit",
    ) -> Commit:
        """Commit from the test itself, with no request. Pass a `Blob` to choose how a file is stored."""
        head = self.resolve(branch)
        tree = {path: blob for path, blob in head.files.items() if path not in set(deleted)}
        for path, content in files.items():
            if isinstance(content, bytes):
                content = Blob(content, lfs=wants_lfs(head, path, len(content)))
            tree[path] = content
        return self.push(self.writable_ref(branch), tree, title=title)

    def push(
        self,
        ref: str,
        files: Mapping[str, Blob],
        *,
        title: str,
        message: str = "",
        author: str = "tests",
        parent: Commit | None = None,
    ) -> Commit:
        """Point `ref` at a new commit of the whole tree `files`, on top of `parent` or what it was."""
        parent = parent or self.refs.get(ref)
        date = datetime.now(UTC)
        tree = {path: files[path].oid for path in sorted(files)}
        identity = json.dumps([parent and parent.oid, title, message, author, date.isoformat(), tree])
        oid = hashlib.sha1(identity.encode()).hexdigest()
        frozen = MappingProxyType({path: files[path] for path in tree})
        commit = Commit(oid, title, message, author, date, parent, frozen)
        self.lfs_objects |= {blob.sha256: blob.content for blob in files.values() if blob.lfs}
        self._commits[oid] = commit
        self.refs[ref] = commit
        return commit

    def resolve(self, revision: str) -> Commit:
        """The commit that a branch, a tag, a full ref name or a full commit id stands for."""
        for ref in (f"refs/heads/{revision}", f"refs/tags/{revision}", revision):
            if ref in self.refs:
                return self.refs[ref]
        if revision in self._commits:
            return self._commits[revision]
        raise HubError(404, f"Invalid rev id: {revision}", code="RevisionNotFound")

    def writable_ref(self, revision: str) -> str:
        """The ref a commit to `revision` moves: a branch or a pull request, never a tag or a commit id."""
        for ref in (f"refs/heads/{revision}", revision):
            if ref in self.refs and not ref.startswith("refs/tags/"):
                return ref
        raise HubError(404, f"Invalid rev id: {revision}", code="RevisionNotFound")


def wants_lfs(commit: Commit, path: str, size: int) -> bool:
    """Whether a new file goes to large file storage: it is large, or `.gitattributes` says so."""
    attributes = commit.files.get(".gitattributes", Blob(b"")).content.decode()
    patterns = [line.split()[0] for line in attributes.splitlines() if "filter=lfs" in line]
    name = PurePosixPath(path).name
    return size >= LFS_THRESHOLD or any(fnmatch(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class Token:
    """Who a token belongs to, and what it lets them do."""

    user: str
    role: Literal["read", "write"]
    orgs: tuple[str, ...]

    def member_of(self, namespace: str) -> bool:
        return namespace in (self.user, *self.orgs)


# ------------------------------------------------------------------------------------- requests and faults


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    """As sent, percent-encoding included: a revision may hold an encoded slash."""
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """By lower-case name."""
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Response:
    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    declared_length: int | None = None
    """A Content-Length that promises more than `body` holds; the connection then closes early."""


class HubError(Exception):
    """An error the Hub reports; its code is what the client picks the exception to raise from."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message, **(headers or {})}
        if code:
            self.headers["X-Error-Code"] = code

    def response(self) -> Response:
        return json_response({"error": str(self)}, status=self.status, headers=self.headers)


def json_response(data: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    headers = {"Content-Type": "application/json", **(headers or {})}
    return Response(status, json.dumps(data).encode(), headers)


@dataclass
class Fault:
    """Something to go wrong with the requests whose method and path match.

    `method` is a regular expression the whole method must match (`"GET|HEAD"`), `path` one to find in the
    decoded path, without the query. `after` matching requests pass unharmed, the next `times` are hit
    (None: all of them). Exactly one effect is given:

    - `status`: answer this error and do nothing; `headers` can hold a Retry-After, or the X-Error-Code
      that makes the client raise one of its own exceptions (RepoNotFound, GatedRepo, EntryNotFound...).
    - `truncate`: do as asked, but close the connection after this many bytes of the response's body, fewer
      than its Content-Length promises. On a commit, `truncate=0` is the lost response: it was applied.
    - `shorten`: the same cut, with a Content-Length that agrees with it.
    - `corrupt`: the last byte of the response's body is wrong; its ETag, hash and length are not.
    - `drop`: close the connection, unanswered, after this many bytes of the request's body.
    - `garble`: the last byte of the request's body arrives wrong.
    """

    method: str
    path: str
    _: KW_ONLY
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    truncate: int | None = None
    shorten: int | None = None
    corrupt: bool = False
    drop: int | None = None
    garble: bool = False
    after: int = 0
    times: int | None = 1
    hits: int = field(default=0, init=False)
    """How many requests it has hit: assert on this, or a fault that never fired looks like one survived."""

    def __post_init__(self) -> None:
        self._seen = 0
        effects = [self.status, self.truncate, self.shorten, self.drop, self.corrupt or None, self.garble or None]
        if sum(effect is not None for effect in effects) != 1:
            raise ValueError(f"a fault has exactly one effect: {self}")

    def strikes(self, method: str, path: str) -> bool:
        """Whether to hit this request, which counts as one more seen."""
        if not re.fullmatch(self.method, method) or not re.search(self.path, path):
            return False
        self._seen += 1
        spent = self.times is not None and self.hits >= self.times
        if self._seen <= self.after or spent:
            return False
        self.hits += 1
        return True

    def distort(self, response: Response) -> Response:
        body = response.body
        if self.garble:
            return response
        if self.truncate is not None:
            return replace(response, body=body[: self.truncate], declared_length=max(len(body), self.truncate + 1))
        if self.shorten is not None:
            return replace(response, body=body[: self.shorten])
        return replace(response, body=wrong_at_the_end(body))


def wrong_at_the_end(body: bytes) -> bytes:
    return body[:-1] + bytes(byte ^ 0xFF for byte in body[-1:])


@dataclass(frozen=True)
class LoggedRequest:
    """A request as it was received, and what came of it."""

    method: str
    path: str
    """Decoded, without the query."""
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """By lower-case name."""
    received: int
    """Bytes of the request's body."""
    status: int | None
    """None where a fault dropped the connection."""
    sent: int
    """Bytes of the response's body."""


# ------------------------------------------------------------------------------------------------- routes

View = Callable[..., Response]


class Route(NamedTuple):
    method: str
    pattern: re.Pattern[str]
    view: View


ROUTES: list[Route] = []

_PLACEHOLDERS = {
    "type": "(?P<repo_type>models|datasets|spaces)",
    "web": "(?:(?P<repo_type>datasets|spaces)/)?",
    "repo": "(?P<repo_id>[^/]+/[^/]+)",
    "rev": "(?P<rev>[^/]+)",
    "path": "(?P<path>.+)",
    "name": "(?P<name>[^/]+)",
}


def route(method: str, template: str) -> Callable[[View], View]:
    """Serve the paths of `template` with the view, passed the server, the request and the placeholders.

    Where they name a repository the view is passed the `Repo`, and is not called for who may not read it.
    """

    def register(view: View) -> View:
        ROUTES.append(Route(method, re.compile(template.format(**_PLACEHOLDERS)), view))
        return view

    return register


@route("GET", "/api/whoami-v2")
def whoami(hub: HubServer, request: Request) -> Response:
    token = hub.require_token(request)
    access = {"displayName": token.user, "role": token.role}
    return json_response(
        {
            "type": "user",
            "id": token.user,
            "name": token.user,
            "fullname": token.user,
            "orgs": [{"type": "org", "id": org, "name": org} for org in token.orgs],
            "auth": {"type": "access_token", "accessToken": access},
        }
    )


@route("POST", "/api/validate-yaml")
def validate_yaml(hub: HubServer, request: Request) -> Response:
    errors = [{"message": message} for message in card_errors(request.json()["content"])]
    return json_response({"errors": errors, "warnings": []}, status=400 if errors else 200)


def card_errors(content: str) -> list[str]:
    """What is wrong with a model card's metadata."""
    block = re.match(r"\s*---\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", content, re.DOTALL)
    if block is None:
        return []  # the Hub warns and accepts
    try:
        data = yaml.safe_load(block[1]) or {}
    except yaml.YAMLError as error:
        return [f"invalid YAML: {error}"]
    if not isinstance(data, dict):
        return ["metadata must be a mapping"]
    errors = []
    for field_name, pattern in CARD_FIELDS.items():
        values = data.get(field_name, [])
        for value in values if isinstance(values, list) else [values]:
            if not isinstance(value, str) or not re.fullmatch(pattern, value):
                errors.append(f'"{field_name}" is not valid: {value!r}')
    index = data.get("model-index", [])
    if not isinstance(index, list):
        return [*errors, '"model-index" must be an array']
    for number, model in enumerate(index):
        try:
            strings, numbers = [model["name"]], []
            for result in model["results"]:
                strings += [result["task"]["type"], result["dataset"]["type"], result["dataset"]["name"]]
                strings += [metric["type"] for metric in result["metrics"]]
                numbers += [metric["value"] for metric in result["metrics"]]
        except (KeyError, TypeError) as error:
            errors.append(f'"model-index[{number}]" lacks {error}')
        else:
            errors += [
                f'"model-index[{number}]": {each!r} must be a string' for each in strings if type(each) is not str
            ]
    return errors


@route("POST", "/api/repos/create")
def create_repo(hub: HubServer, request: Request) -> Response:
    token = hub.require_token(request)
    asked = request.json()
    namespace, repo_type = asked.get("organization") or token.user, asked.get("type", "model")
    hub.require_write(request, namespace)
    repo_id = f"{namespace}/{asked['name']}"
    exists = (repo_type, repo_id) in hub.repos
    if not exists:
        hub.create_repo(repo_id, repo_type=repo_type, private=asked.get("visibility") == "private")
    repo = hub.repo(repo_id, repo_type)
    answer = {"name": repo.id, "url": f"{hub.url}/{repo.web_path}"}
    if exists:
        return json_response({**answer, "error": f"You already created this {repo_type} repo"}, status=409)
    return json_response(answer)


@route("GET", "/api/{type}/{repo}")
@route("GET", "/api/{type}/{repo}/revision/{rev}")
def repo_info(hub: HubServer, request: Request, repo: Repo, rev: str = "main") -> Response:
    commit = repo.resolve(rev)
    siblings: list[dict[str, Any]] = [{"rfilename": path} for path in commit.files]
    if flag(request, "blobs"):
        for sibling, blob in zip(siblings, commit.files.values(), strict=True):
            sibling |= {"size": len(blob.content), "blobId": blob.oid}
            if blob.lfs:
                lfs = {"sha256": blob.sha256, "size": len(blob.content), "pointerSize": len(blob.pointer)}
                sibling |= {"lfs": lfs}
    return json_response(
        {
            "id": repo.id,
            "author": repo.namespace,
            "sha": commit.oid,
            "private": repo.private,
            "gated": "manual" if repo.gated else False,
            "disabled": False,
            "tags": [],
            "createdAt": timestamp(repo.commits()[-1].date),
            "lastModified": timestamp(commit.date),
            "siblings": siblings,
        }
    )


@route("GET", "/api/{type}/{repo}/tree/{rev}")
@route("GET", "/api/{type}/{repo}/tree/{rev}/{path}")
def tree(hub: HubServer, request: Request, repo: Repo, rev: str, path: str = "") -> Response:
    files = repo.resolve(rev).files
    prefix = f"{path}/" if path else ""
    below = [file for file in files if file.startswith(prefix)]
    if path and not below:
        raise HubError(404, f"{path} does not exist on {rev}", code="EntryNotFound")
    parents = {str(parent) for file in below for parent in PurePosixPath(file).parents}
    folders = sorted(parent for parent in parents if parent != "." and parent.startswith(prefix))
    paths = folders + below
    if not flag(request, "recursive"):
        paths = [entry for entry in paths if "/" not in entry.removeprefix(prefix)]
    return json_response([entry for each in paths if (entry := path_info(files, each))])


@route("POST", "/api/{type}/{repo}/paths-info/{rev}")
def paths_info(hub: HubServer, request: Request, repo: Repo, rev: str) -> Response:
    files = repo.resolve(rev).files
    paths = parse_qs(request.body.decode()).get("paths", [])
    return json_response([entry for path in paths if (entry := path_info(files, path.strip("/")))])


def path_info(files: Mapping[str, Blob], path: str) -> dict[str, Any] | None:
    """How the Hub describes a file or a folder of a tree, or None where there is neither."""
    if blob := files.get(path):
        size = len(blob.content)
        entry = {"type": "file", "path": path, "oid": blob.oid, "size": size}
        if blob.lfs:
            entry |= {"lfs": {"oid": blob.sha256, "size": size, "pointerSize": len(blob.pointer)}}
        return entry
    inside = [(name, files[name].oid) for name in sorted(files) if name.startswith(f"{path}/")]
    if not inside:
        return None
    oid = hashlib.sha1(json.dumps(inside).encode()).hexdigest()
    return {"type": "directory", "path": path, "oid": oid, "size": 0}


@route("GET", "/api/{type}/{repo}/refs")
def refs(hub: HubServer, request: Request, repo: Repo) -> Response:
    def under(prefix: str) -> list[dict[str, str]]:
        return [
            {"name": ref.removeprefix(prefix), "ref": ref, "targetCommit": commit.oid}
            for ref, commit in repo.refs.items()
            if ref.startswith(prefix)
        ]

    listing = {"branches": under("refs/heads/"), "tags": under("refs/tags/"), "converts": []}
    if flag(request, "include_prs"):
        listing["pullRequests"] = under("refs/pr/")
    return json_response(listing)


@route("GET", "/api/{type}/{repo}/commits/{rev}")
def commits(hub: HubServer, request: Request, repo: Repo, rev: str) -> Response:
    return json_response(
        [
            {
                "id": commit.oid,
                "title": commit.title,
                "message": commit.message,
                "authors": [{"user": commit.author}],
                "date": timestamp(commit.date),
            }
            for commit in repo.commits(rev)
        ]
    )


@route("POST", "/api/{type}/{repo}/branch/{name}")
def create_branch(hub: HubServer, request: Request, repo: Repo, name: str) -> Response:
    return create_ref(hub, request, repo, f"refs/heads/{name}", request.json().get("startingPoint", "main"))


@route("POST", "/api/{type}/{repo}/tag/{rev}")
def create_tag(hub: HubServer, request: Request, repo: Repo, rev: str) -> Response:
    return create_ref(hub, request, repo, f"refs/tags/{request.json()['tag']}", rev)


def create_ref(hub: HubServer, request: Request, repo: Repo, ref: str, revision: str) -> Response:
    hub.require_write(request, repo.namespace)
    if ref in repo.refs:
        raise HubError(409, f"Reference already exists: {ref}")
    repo.refs[ref] = repo.resolve(revision)
    return json_response({})


@route("GET", "/{web}{repo}/resolve/{rev}/{path}")
def resolve(hub: HubServer, request: Request, repo: Repo, rev: str, path: str) -> Response:
    """The content of a file, whole or the range asked for. A HEAD request comes here too, for the headers."""
    hub.require_passage(request, repo)
    commit = repo.resolve(rev)
    headers = {"X-Repo-Commit": commit.oid}
    if path not in commit.files:
        raise HubError(404, f"{path} does not exist on {rev}", code="EntryNotFound", headers=headers)
    blob = commit.files[path]
    size = len(blob.content)
    headers |= {
        "ETag": f'"{blob.etag}"',
        "Content-Type": "application/octet-stream",
        "Accept-Ranges": "bytes",
    }
    if blob.lfs:
        headers |= {"X-Linked-ETag": f'"{blob.etag}"', "X-Linked-Size": str(size)}

    asked = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
    if asked is None or asked[0] == "bytes=-":
        return Response(200, blob.content, headers)
    first, last = asked.groups()
    start = int(first) if first else max(size - int(last), 0)
    stop = min(int(last) + 1, size) if first and last else size
    if start >= stop:
        raise HubError(416, "Range not satisfiable", headers={**headers, "Content-Range": f"bytes */{size}"})
    headers |= {"Content-Range": f"bytes {start}-{stop - 1}/{size}"}
    return Response(206, blob.content[start:stop], headers)


@route("POST", "/api/{type}/{repo}/preupload/{rev}")
def preupload(hub: HubServer, request: Request, repo: Repo, rev: str) -> Response:
    """How each file is to be sent, and the identity of the one it replaces so that no-ops can be left out."""
    hub.require_write(request, repo.namespace, pull_request=flag(request, "create_pr"))
    head = repo.resolve(rev)
    answers = []
    for file in request.json()["files"]:
        path = file["path"]
        mode = "lfs" if wants_lfs(head, path, file["size"]) else "regular"
        answer = {"path": path, "uploadMode": mode, "shouldIgnore": False}
        if path in head.files:
            answer |= {"oid": head.files[path].etag}
        answers.append(answer)
    return json_response({"files": answers})


@route("POST", "/{web}{repo}.git/info/lfs/objects/batch")
def lfs_batch(hub: HubServer, request: Request, repo: Repo) -> Response:
    """Where to send each LFS object that the repository does not have yet."""
    asked = request.json()
    if asked["operation"] != "upload" or "basic" not in asked["transfers"]:
        raise HubError(422, "This server takes basic uploads only")
    hub.require_write(request, repo.namespace, pull_request="ref" not in asked)
    objects = []
    for wanted in asked["objects"]:
        answer = {"oid": wanted["oid"], "size": wanted["size"], "authenticated": True}
        if wanted["oid"] not in repo.lfs_objects:
            upload = f"{hub.url}/lfs-upload/{wanted['oid']}?ticket={hub.issue_ticket(repo, wanted['size'])}"
            verify = f"{hub.url}/{repo.web_path}.git/info/lfs/objects/verify"
            answer |= {"actions": {"upload": {"href": upload}, "verify": {"href": verify}}}
        objects.append(answer)
    headers = {"Content-Type": "application/vnd.git-lfs+json"}
    return json_response({"transfer": "basic", "objects": objects}, headers=headers)


@route("PUT", "/lfs-upload/{name}")
def lfs_upload(hub: HubServer, request: Request, name: str) -> Response:
    """Take an object; the ticket in the URL stands in for the signature of a storage provider's."""
    repo, size = hub.redeem_ticket(request.query.get("ticket", ""))
    if len(request.body) != size or hashlib.sha256(request.body).hexdigest() != name:
        raise HubError(400, "The content does not match its size or sha256")
    repo.lfs_objects[name] = request.body
    return Response(200)


@route("POST", "/{web}{repo}.git/info/lfs/objects/verify")
def lfs_verify(hub: HubServer, request: Request, repo: Repo) -> Response:
    if request.json()["oid"] not in repo.lfs_objects:
        raise HubError(404, "The object was not uploaded")
    return json_response({})


@route("GET", "/api/{type}/{repo}/xet-(?:read|write)-token/{rev}")
def xet_token(hub: HubServer, request: Request, repo: Repo, rev: str) -> Response:
    raise HubError(403, "This server does not speak Xet: set HF_HUB_DISABLE_XET=1")


@route("POST", "/api/{type}/{repo}/commit/{rev}")
def commit(hub: HubServer, request: Request, repo: Repo, rev: str) -> Response:
    """Apply an operation per line to a copy of the tree, and only then move the ref: all or nothing."""
    opens_pull_request = flag(request, "create_pr")
    token = hub.require_write(request, repo.namespace, pull_request=opens_pull_request)
    header, *changes = [json.loads(line) for line in request.body.splitlines()]
    head = repo.resolve(repo.writable_ref(rev))
    if not head.oid.startswith(header["value"].get("parentCommit", "")):
        raise HubError(412, "A commit has happened since. Please refresh and try again.")
    files = dict(head.files)
    for change in changes:
        apply(repo, files, change["key"], **change["value"])

    number = sum(ref.startswith("refs/pr/") for ref in repo.refs) + 1
    ref = f"refs/pr/{number}" if opens_pull_request else repo.writable_ref(rev)
    title, message = header["value"]["summary"], header["value"]["description"]
    new = repo.push(ref, files, title=title, message=message, author=token.user, parent=head)
    web_url = f"{hub.url}/{repo.web_path}"
    answer = {"success": True, "commitOid": new.oid, "commitUrl": f"{web_url}/commit/{new.oid}"}
    if opens_pull_request:
        answer |= {"pullRequestUrl": f"{web_url}/discussions/{number}"}
    return json_response(answer)


def apply(repo: Repo, files: dict[str, Blob], operation: str, *, path: str, **value: Any) -> None:
    """Change `files` by one operation of a commit."""
    match operation:
        case "file":
            files[path] = Blob(b64decode(value["content"]))
        case "lfsFile":
            if value["oid"] not in repo.lfs_objects:
                raise HubError(400, f"{path} points to an LFS object that was not uploaded")
            files[path] = Blob(repo.lfs_objects[value["oid"]], lfs=True)
        case "deletedFile" if path in files:
            del files[path]
        case "deletedFolder" if inside := [each for each in files if each.startswith(f"{path.rstrip('/')}/")]:
            for each in inside:
                del files[each]
        case "deletedFile" | "deletedFolder":
            raise HubError(404, f"A file with this name doesn't exist: {path}", code="EntryNotFound")
        case _:
            raise HubError(400, f"Unknown operation {operation}")


def flag(request: Request, name: str) -> bool:
    return request.query.get(name, "").lower() in ("1", "true")


def timestamp(date: datetime) -> str:
    return date.strftime("%Y-%m-%dT%H:%M:%S.000Z")


# ------------------------------------------------------------------------------------------------- server


class HubServer:
    """The server; a context manager that listens while it is entered. See the module for what it serves."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.tokens: dict[str, Token] = {}
        self.faults: list[Fault] = []
        self.requests: list[LoggedRequest] = []
        """Every request, in order, each logged before its response leaves: a client's own are all here."""
        self._tickets: dict[str, tuple[Repo, int]] = {}
        self._lock = threading.Lock()
        self._listener = _Listener(self)
        self.url = f"http://127.0.0.1:{self._listener.server_port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._listener.serve_forever, args=(_POLL_INTERVAL,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._listener.shutdown()
        self._listener.server_close()

    # What a test sets up and looks at.

    def env(self, home: Path, token: str | None = None) -> dict[str, str]:
        """The environment of a subprocess that uses this server: its cache in `home`, and no real login."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "HUGGING")) and name != "TRANSFORMERS_OFFLINE"
        }
        own = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub")}
        return inherited | CLIENT_ENV | own | ({"HF_TOKEN": token} if token else {})

    def add_token(
        self, token: str, user: str, *, role: Literal["read", "write"] = "write", orgs: Iterable[str] = ()
    ) -> str:
        """Accept `token` as `user`'s, who reads and (given the role) writes under their name and `orgs`."""
        self.tokens[token] = Token(user, role, tuple(orgs))
        return token

    def create_repo(
        self,
        repo_id: str,
        *,
        repo_type: str = "model",
        private: bool = False,
        gated: bool = False,
        files: Mapping[str, bytes | Blob] | None = None,
    ) -> Repo:
        """Create a repository with the Hub's first commit, of `.gitattributes`, and one of any `files`."""
        if (repo_type, repo_id) in self.repos:
            raise ValueError(f"{repo_type} {repo_id} exists")
        repo = self.repos[repo_type, repo_id] = Repo(repo_id, repo_type, private=private, gated=gated)
        if files:
            repo.commit(files)
        return repo

    def repo(self, repo_id: str, repo_type: str = "model") -> Repo:
        return self.repos[repo_type, repo_id]

    def fail(self, fault: Fault) -> Fault:
        """Switch a fault on; where two match a request, the one switched on first hits it."""
        self.faults.append(fault)
        return fault

    def requests_for(self, method: str, path: str) -> list[LoggedRequest]:
        """The requests whose method and path match, in a fault's sense."""
        return [each for each in self.requests if re.fullmatch(method, each.method) and re.search(path, each.path)]

    # What the views ask.

    def token_of(self, request: Request) -> Token | None:
        authorization = request.headers.get("authorization")
        if authorization is None:
            return None
        token = self.tokens.get(authorization.removeprefix("Bearer "))
        if token is None:
            raise HubError(401, "Invalid credentials in Authorization header")
        return token

    def require_token(self, request: Request) -> Token:
        token = self.token_of(request)
        if token is None:
            raise HubError(401, "Invalid username or password.")
        return token

    def require_read(self, request: Request, repo_type: str, repo_id: str) -> Repo:
        """The repository, unless it is not there or, which the answer does not tell apart, not to be seen.

        The code goes with the 401 as well, since the client guesses it from the URL only where that is https.
        """
        token = self.token_of(request)
        repo = self.repos.get((repo_type, repo_id))
        if repo is None or (repo.private and not (token and token.member_of(repo.namespace))):
            raise HubError(404 if token else 401, "Repository not found", code="RepoNotFound")
        return repo

    def require_passage(self, request: Request, repo: Repo) -> None:
        """A gated repository shows what it has to everyone, and gives it to some."""
        token = self.token_of(request)
        if repo.gated and not (token and (token.member_of(repo.namespace) or token.user in repo.granted)):
            raise HubError(403 if token else 401, f"Access to {repo.id} is restricted", code="GatedRepo")

    def require_write(self, request: Request, namespace: str, *, pull_request: bool = False) -> Token:
        """Writing takes a token of that role and membership, but anyone may propose a change."""
        token = self.require_token(request)
        if token.role != "write" or not (pull_request or token.member_of(namespace)):
            raise HubError(403, f"You don't have the rights to write to {namespace}")
        return token

    def issue_ticket(self, repo: Repo, size: int) -> str:
        ticket = secrets.token_hex(16)
        self._tickets[ticket] = repo, size
        return ticket

    def redeem_ticket(self, ticket: str) -> tuple[Repo, int]:
        """What a ticket is for. It stays good, for the client sends an upload that failed again."""
        if ticket not in self._tickets:
            raise HubError(403, "Invalid upload ticket")
        return self._tickets[ticket]

    # What the listener asks.

    def fault_for(self, method: str, path: str) -> Fault | None:
        with self._lock:
            return next((fault for fault in self.faults if fault.strikes(method, path)), None)

    def respond(self, request: Request) -> Response:
        """Serve a request, one at a time: that is what makes a commit atomic."""
        method = "GET" if request.method == "HEAD" else request.method
        for candidate in ROUTES:
            found = candidate.pattern.fullmatch(request.path)
            if found and candidate.method == method:
                with self._lock:
                    try:
                        return candidate.view(self, request, **self._arguments(request, found))
                    except HubError as error:
                        return error.response()
        return HubError(501, f"{request.method} {request.path} is not part of this server").response()

    def _arguments(self, request: Request, found: re.Match[str]) -> dict[str, Any]:
        given = {name: value for name, value in found.groupdict().items() if value}
        arguments: dict[str, Any] = {name: unquote(value) for name, value in given.items()}
        if "repo_id" in arguments:
            repo_type = arguments.pop("repo_type", "models").removesuffix("s")
            arguments["repo"] = self.require_read(request, repo_type, arguments.pop("repo_id"))
        return arguments


class _Listener(ThreadingHTTPServer):
    """Serves each connection in a thread, and cuts them when closed: a kept-alive one would be served on."""

    def __init__(self, hub: HubServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub
        self._connections: set[socket.socket] = set()

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self._connections.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        for connection in list(self._connections):
            with suppress(OSError):  # the client has closed it meanwhile
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Listener
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes, and would wait for an ACK in between

    def handle_any(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        query = {name: values[-1] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        headers = {name.lower(): value for name, value in self.headers.items()}
        fault = self.server.hub.fault_for(self.command, path)

        limit = fault.drop if fault else None
        body = self._read_body(limit)
        if fault and fault.garble:
            body = wrong_at_the_end(body)
        response = None
        if limit is None:
            response = self._respond(Request(self.command, url.path, query, headers, body), fault)
        self.server.hub.requests.append(
            LoggedRequest(
                self.command,
                path,
                query,
                headers,
                received=len(body),
                status=response.status if response else None,
                sent=len(response.body) if response and self.command != "HEAD" else 0,
            )
        )
        if response is None:
            self.close_connection = True
        else:
            self._send(response)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def _respond(self, request: Request, fault: Fault | None) -> Response:
        if fault is None:
            return self.server.hub.respond(request)
        if fault.status is not None:
            return HubError(fault.status, HTTPStatus(fault.status).phrase, headers=fault.headers).response()
        return fault.distort(self.server.hub.respond(request))

    def _read_body(self, limit: int | None) -> bytes:
        """The request's body, or no more than `limit` bytes of it."""
        length = int(self.headers.get("Content-Length", 0))
        return self.rfile.read(length if limit is None else min(length, limit))

    def _send(self, response: Response) -> None:
        length = len(response.body) if response.declared_length is None else response.declared_length
        self.close_connection = self.close_connection or length > len(response.body)
        self.send_response(response.status)
        for name, value in response.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing on stderr: the server keeps its own log."""
