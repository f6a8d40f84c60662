"""Publishing: what is refused before anything is sent, and that every fault leaves the repository whole."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from huggingface_hub import HfApi, constants

from latentfold.convert import InputError, convert_checkpoint, publish_checkpoint
from latentfold.convert.cli import main
from latentfold.convert.files import sha256
from latentfold.convert.publish import push as hub
from latentfold.convert.publish.card import write_card
from latentfold.convert.publish.files import files_to_push
from latentfold.convert.publish.licences import licence_notice
from latentfold.convert.publish.push import PushResult
from latentfold.convert.source.hub import fetch
from latentfold.convert.write.recipe import RECIPE, fingerprint, read_recipe
from latentfold.eval.records import EVALUATION
from tests.conftest import TEXT, save_tiny
from tests.evaluations import full_evaluation
from tests.hub_server import Fault, HubServer
from tests.recipes import recipe_of

pytestmark = pytest.mark.hub

REPO = "alice/tiny-mla"
TOKEN = "hf_alicealicealicealicealice"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted and evaluated checkpoint of several shards and a sub-folder, with its card."""
    folder = tmp_path_factory.mktemp("converted")
    (folder / "text.txt").write_text(TEXT * 8)
    template = save_tiny(folder / "source") / "additional_chat_templates" / "tool_use.jinja"
    template.parent.mkdir()
    template.write_text("{{ tools }}")
    convert_checkpoint(
        str(folder / "source"),
        str(folder / "out"),
        kv_rank=8,
        rope_dim=4,
        calibration=(str(folder / "text.txt"),),
        calibration_tokens=512,
        seq_len=64,
        max_shard_size="60KB",
        progress=False,
    )
    write_evaluation(folder / "out")
    write_card(folder / "out")
    return folder / "out"


def write_evaluation(folder: Path, **provenance: Any) -> None:
    """An evaluation as one of this checkpoint's weights, unless told otherwise."""
    found = full_evaluation()
    provenance = found.provenance | {"fingerprint": fingerprint(read_recipe(folder).files)} | provenance
    (folder / EVALUATION).write_text(json.dumps(replace(found, provenance=provenance).to_dict()))


@pytest.fixture
def out(converted: Path, tmp_path: Path) -> Path:
    """A copy of it to change."""
    return shutil.copytree(converted, tmp_path / "out")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub that huggingface_hub in this process takes for the real one, and no waiting between its retries."""
    with HubServer() as server:
        server.add_token(TOKEN, user="alice")
        server.add_token("hf_reader", user="alice", role="read")
        server.add_token("hf_bob", user="bob")
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        yield server


def push(out: Path, repo: str = REPO, token: str | None = TOKEN, **options: Any) -> PushResult:
    return hub.push(files_to_push(out, read_recipe(out)), repo, token=token, **options)


def contents(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def published(server: HubServer, revision: str = "main", repo: str = REPO) -> dict[str, bytes]:
    return {name: data for name, data in server.repo(repo).files(revision).items() if name != ".gitattributes"}


# ------------------------------------------------------------------------------------------------ a push


def test_one_commit_holds_everything(server: HubServer, out: Path) -> None:
    result = push(out, message="First", tag="v1", private=True)
    repo = server.repo(REPO)
    assert published(server) == contents(out) and repo.private
    assert [commit.title for commit in repo.commits()] == ["First", "initial commit"]
    assert result == PushResult(f"{server.url}/{REPO}/commit/{result.commit}", repo.commits()[0].oid, True)
    assert repo.refs["refs/tags/v1"].oid == result.commit
    assert len([name for name in contents(out) if name.endswith(".safetensors")]) > 1

    again = push(out, tag="v1")
    assert (again.commit, again.changed) == (result.commit, False) and len(repo.commits()) == 2
    (out / "README.md").write_text((out / "README.md").read_text() + "\nMore.\n")
    with pytest.raises(InputError, match="has a tag v1"):
        push(out, tag="v1")
    sent = len(server.requests_for("PUT", "/lfs-upload/"))
    changed = push(out, tag="v2")
    assert changed.changed and published(server) == contents(out)
    assert len(server.requests_for("PUT", "/lfs-upload/")) == sent, "weights that are there are not sent again"


def test_files_of_an_earlier_conversion_go_in_the_same_commit(server: HubServer, out: Path) -> None:
    earlier = read_recipe(out).to_dict()
    earlier["files"] |= {"model-00009-of-00009.safetensors": "0" * 64}
    files = {RECIPE: json.dumps(earlier).encode(), "model-00009-of-00009.safetensors": b"old", "figures/a.png": b"old"}
    repo = server.create_repo(REPO, files=files | {"mine.gguf": b"mine"})
    before = repo.commits()
    push(out)
    assert published(server) == contents(out) | {"mine.gguf": b"mine"}
    assert repo.commits()[1:] == before


def test_pull_request_and_branch(server: HubServer, out: Path) -> None:
    repo = server.create_repo(REPO)
    result = push(out, create_pr=True)
    assert result.url == f"{server.url}/{REPO}/discussions/1"
    assert published(server) == {} and published(server, "refs/pr/1") == contents(out)
    push(out, revision="int/v2")
    assert published(server) == {} and published(server, "int/v2") == contents(out)
    assert len(repo.commits("int/v2")) == 2
    for options in ({"revision": "x"}, {"tag": "x"}):
        with pytest.raises(InputError, match="create_pr"):
            push(out, create_pr=True, **options)


def test_a_repository_of_something_else_is_not_touched(server: HubServer, out: Path) -> None:
    repo = server.create_repo(REPO, files={"config.json": b"{}", "deep/notes.txt": b"mine"})
    with pytest.raises(InputError, match=r"holds config\.json and no latentfold\.json.*overwrite"):
        push(out)
    assert len(repo.commits()) == 2 and repo.lfs_objects == {}
    push(out, overwrite=True)
    assert published(server) == contents(out) and len(repo.commits()) == 3


def test_a_public_repository_is_not_taken_for_a_private_one(server: HubServer, out: Path) -> None:
    server.create_repo(REPO)
    with pytest.raises(InputError, match="is public"):
        push(out, private=True)
    with pytest.raises(InputError, match="is public"):  # before a conversion, too
        hub.check_target(REPO, private=True, token=TOKEN)
    assert published(server) == {}


def test_a_change_meanwhile_is_not_overwritten(server: HubServer, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = server.create_repo(REPO)
    look = hub._replaceable

    def change_then_look(*args: Any, **options: Any) -> set[str]:
        repo.commit({"theirs.txt": b"theirs"})
        return look(*args, **options)

    monkeypatch.setattr(hub, "_replaceable", change_then_look)
    with pytest.raises(InputError, match="has changed on the Hub meanwhile"):
        push(out)
    assert published(server) == {"theirs.txt": b"theirs"}


def test_what_arrived_is_compared(server: HubServer, out: Path) -> None:
    push(out)
    weights = next(name for name in contents(out) if name.endswith(".safetensors"))
    for name in (weights, "config.json"):
        content = contents(out)[name]
        commit = server.repo(REPO).commit({name: content[:-1] + b"x"})
        with pytest.raises(InputError, match=f"{name} arrived damaged"):
            hub.check_arrival(HfApi(token=TOKEN), REPO, commit.oid, files_to_push(out, read_recipe(out)))
        push(out)
        assert published(server) == contents(out)


# ------------------------------------------------------------------------------------------------- faults

FAULTS: dict[str, tuple[Fault, str]] = {
    "401": (Fault("GET", "/api/models/alice", status=401), "does not accept the token; log in again"),
    "403 creating": (Fault("POST", "/repos/create", status=403), "the token has no permission"),
    "404 creating": (Fault("POST", "/repos/create", status=404), "not found on the Hub"),
    "429": (
        Fault("POST", "/repos/create", status=429, headers={"Retry-After": "7"}),
        "repeat the command in 7 seconds",
    ),
    "429 at the end": (Fault("POST", "/commit/", status=429), "too many requests; repeat the command in a few minutes"),
    "500 looking": (Fault("GET", "/tree/", status=500, times=6), r"problem of its own \(status 500\)"),
    "403 midway": (Fault("PUT", "/lfs-upload/", status=403, after=1), "the token has no permission"),
    "500 midway": (Fault("PUT", "/lfs-upload/", status=500, after=1, times=None), r"of its own \(status 500\)"),
    "503 committing": (Fault("POST", "/commit/", status=503), r"problem of its own \(status 503\)"),
    "connection lost midway": (Fault("PUT", "/lfs-upload/", drop=100, after=1, times=None), "connection to the Hub"),
    "connection lost committing": (Fault("POST", "/commit/", drop=100), "the connection to the Hub failed"),
    "answer cut": (Fault("GET", "/api/models/alice", truncate=20), "the connection to the Hub failed"),
    "wrong hash": (Fault("PUT", "/lfs-upload/", garble=True), r"refused \(status 400: .*sha256"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_leaves_nothing_half_published(case: str, server: HubServer, out: Path) -> None:
    fault, message = FAULTS[case]
    server.fail(replace(fault))
    with pytest.raises(InputError, match=message) as raised:
        push(out)
    assert server.faults[0].hits, "the fault did not strike"
    assert "\n" not in str(raised.value) and TOKEN not in str(raised.value)
    if ("model", REPO) in server.repos:
        assert published(server) == {}
        assert len(server.repo(REPO).commits()) == 1
    weights = {sha256(path) for path in out.glob("*.safetensors")}
    arrived = set(server.repo(REPO).lfs_objects) if ("model", REPO) in server.repos else set()
    if case.endswith("midway"):
        assert arrived and arrived < weights
    server.faults.clear()
    before = len(server.requests)
    push(out)
    assert published(server) == contents(out) and len(server.repo(REPO).commits()) == 2
    sent = [request.path.split("/")[-1] for request in server.requests[before:] if request.method == "PUT"]
    assert sorted(sent) == sorted(weights - arrived), "each large file is sent once"


def test_rate_limits_are_waited_for(server: HubServer, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    fault = server.fail(Fault("POST", "/preupload/", status=429, headers={"Retry-After": "7"}))
    push(out)
    assert fault.hits == 1 and any(wait >= 7 for wait in waits)
    assert published(server) == contents(out)


def test_a_lost_answer_to_the_commit(server: HubServer, out: Path) -> None:
    fault = server.fail(Fault("POST", "/commit/", truncate=0))
    with pytest.raises(InputError, match="repeat the command to continue"):
        push(out, tag="v1")
    assert fault.hits == 1
    result = push(out, tag="v1")
    assert not result.changed and published(server, "v1") == contents(out)
    assert len(server.repo(REPO).commits()) == 2


@pytest.mark.parametrize(
    ("repo", "token", "message"),
    [
        (REPO, None, "not logged in; run hf auth login"),
        (REPO, "hf_nobodynobodynobody", "does not accept the token"),
        (REPO, "hf_reader", "no permission"),
        ("other/tiny", TOKEN, "no permission"),
        ("bob/private", TOKEN, "no permission"),
        ("bob/public", TOKEN, "no permission"),
        ("no-namespace", TOKEN, "expected a repository as namespace/name"),
        ("a/b/c", TOKEN, "expected a repository as namespace/name"),
        ("a/..", TOKEN, "not a Hub id"),
    ],
)
def test_who_may_not(server: HubServer, out: Path, repo: str, token: str | None, message: str) -> None:
    server.create_repo("bob/private", private=True)
    server.create_repo("bob/public")
    with pytest.raises(InputError, match=message) as raised:
        push(out, repo, token)
    assert "\n" not in str(raised.value) and not (token and token in str(raised.value))
    assert not server.requests_for("PUT", "") and set(server.repos) == {
        ("model", "bob/private"),
        ("model", "bob/public"),
    }


def test_offline(server: HubServer, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="HF_HUB_OFFLINE is set"):
        push(out)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    server.__exit__()
    with pytest.raises(InputError, match="connection to the Hub failed"):
        push(out)
    assert server.requests == []


# ----------------------------------------------------------------------------------------- before any upload


def invoke(*args: Any) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def edit_recipe(out: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    recipe = json.loads((out / RECIPE).read_text())
    change(recipe)
    (out / RECIPE).write_text(json.dumps(recipe))


def interrupt(out: Path) -> None:
    (out / ".latentfold-partial").mkdir()
    (out / ".latentfold-partial" / "journal.json").write_text("{}")


def shard(out: Path) -> Path:
    return next(out.glob("*.safetensors"))


def flip_last_byte(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


REFUSALS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, "no such folder"),
    "unfinished": (interrupt, "unfinished conversion"),
    "no recipe": (lambda out: (out / RECIPE).unlink(), "no latentfold.json"),
    "foreign recipe": (lambda out: (out / RECIPE).write_text("{}"), "not the record of a conversion"),
    "weights changed": (lambda out: flip_last_byte(shard(out)), "SHA-256 differs"),
    "config changed": (lambda out: (out / "config.json").write_text("{}"), "config.json is not what"),
    "template changed": (
        lambda out: (out / "additional_chat_templates" / "tool_use.jinja").write_text("{{ other }}"),
        r"additional_chat_templates/tool_use\.jinja is not what",
    ),
    "weights missing": (lambda out: shard(out).unlink(), "is missing"),
    "no evaluation": (lambda out: (out / EVALUATION).unlink(), "no evaluation.json; run latentfold eval"),
    "other evaluation": (lambda out: write_evaluation(out, fingerprint="0"), "of other weights; run latentfold eval"),
    "broken evaluation": (lambda out: (out / EVALUATION).write_text("{"), "not readable as JSON"),
    "broken card": (lambda out: (out / "README.md").write_text("<!-- latentfold:begin -->"), "expected one"),
    "stray file": (lambda out: (out / "notes.txt").write_text("x"), "holds notes.txt"),
    "hidden file": (lambda out: (out / ".env").write_text("x"), r"holds \.env"),
    "stray folder": (lambda out: shutil.copytree(out / "figures", out / "more"), "holds more/"),
    "stray template": (
        lambda out: (out / "additional_chat_templates" / "mine.jinja").write_text("x"),
        r"holds additional_chat_templates/mine\.jinja",
    ),
    "deeper": (lambda out: shutil.copytree(out / "figures", out / "figures" / "more"), "holds figures/more/"),
    "token": (lambda out: (out / "README.md").write_text(f"login: {TOKEN}"), "README.md holds what looks like a Hub"),
    "key": (lambda out: (out / "LICENSE").write_text("-----BEGIN RSA PRIVATE KEY-----"), "like a private key"),
    "aws": (lambda out: (out / "NOTICE").write_text("AKIA" + "A1" * 8), "like an AWS key"),
    "other logits": (
        lambda out: edit_recipe(out, lambda recipe: recipe["check"]["probe"]["largest_logits"].reverse()),
        "gives other logits than when it was converted",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_before_anything_is_sent(case: str, server: HubServer, out: Path) -> None:
    damage, message = REFUSALS[case]
    damage(out)
    before = contents(out)
    result = invoke("push", out, REPO, "--token", TOKEN, "--quiet")
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    assert re.search(message, result.stderr), result.stderr
    assert TOKEN not in result.output and server.requests == [] and contents(out) == before


def test_command(server: HubServer, out: Path) -> None:
    dry = invoke("push", out, REPO, "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert server.requests == []
    assert shard(out).name in dry.stdout and (out / "README.md").read_text() in dry.stdout
    assert "licence is not known" in dry.stderr
    (out / "README.md").unlink()
    done = invoke("push", out, REPO, "--token", TOKEN, "--quiet", "--branch", "dev")
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{server.url}/{REPO}/commit/{server.repo(REPO).resolve('dev').oid}\n"
    assert done.stderr == "" and published(server, "dev") == contents(out) and "README.md" in published(server, "dev")
    again = invoke("push", out, REPO, "--token", TOKEN, "--branch", "dev")
    assert "Nothing to do" in again.stderr and again.exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny-mla", "--token", TOKEN], "expected a repository as namespace/name"),
        (["tiny-mla", "--dry-run"], "expected a repository as namespace/name"),
        ([REPO], "not logged in"),
        ([REPO, "--create-pr", "--tag", "x"], "--create-pr: goes to the main branch"),
    ],
)
def test_requests_are_refused_before_files_are_hashed(
    server: HubServer, out: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("latentfold.convert.publish.checkpoint.check_files", lambda *_: pytest.fail("hashed"))
    result = invoke("push", out, *arguments)
    assert result.exit_code == 2 and message in result.stderr and server.requests == []


def test_what_is_left_of_a_conversion_that_is_not_published(
    server: HubServer, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **options: Any) -> None:
        raise InputError("not today")

    monkeypatch.setattr("latentfold.eval.comparison.evaluate", refuse)
    source, text = converted.parent / "source", converted.parent / "text.txt"
    sizes = ["--calibration", text, "--calibration-tokens", 256, "--seq-len", 64, "--quiet"]
    command = ["convert", source, tmp_path / "new", *sizes, "--push", REPO, "--private", "--token", TOKEN]
    planned = invoke(*command, "--dry-run")
    assert planned.exit_code == 0 and not (tmp_path / "new").exists()
    result = invoke(*command)
    assert result.exit_code == 2 and TOKEN not in result.output
    assert result.stderr.splitlines() == [
        "Error: not today",
        "The conversion is complete; repeat this command to go on. What is left: "
        f"latentfold eval {source} {tmp_path}/new && latentfold push {tmp_path}/new {REPO} --private",
    ]
    lone = invoke("convert", source, tmp_path / "other", *sizes, "--private", "--dry-run")
    assert lone.exit_code == 2 and "--private is for --push" in lone.stderr


@pytest.mark.parametrize("size", [["--kv-rank", 8, "--rope-dim", 4], ["--cache-ratio", 0.4]], ids=["size", "ratio"])
def test_a_conversion_that_was_not_published_is_not_made_again(
    size: list[Any], server: HubServer, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(shutil.copytree(converted.parent / "source", tmp_path / "source"))
    text, out = tmp_path / "text.txt", tmp_path / "new"
    text.write_text(TEXT * 8)
    options = ["--calibration", text, "--calibration-tokens", 256, "--seq-len", 64, "--token", TOKEN]
    plain = ["convert", source, out, *size, *options]
    command = [*plain, "--push", REPO]

    fault = server.fail(Fault("POST", "/commit/", status=403))
    with monkeypatch.context() as patched:
        patched.setattr("latentfold.eval.comparison.evaluate", lambda *_, **__: interrupted("not evaluated"))
        assert "Error: not evaluated" in invoke(*command).stderr
    made = contents(out)
    with monkeypatch.context() as patched:  # the conversion is there, its evaluation is not
        patched.setattr("latentfold.convert.pipeline.run.run", lambda *_: pytest.fail("converted again"))
        refused = invoke(*command)
    assert refused.exit_code == 2 and "no permission" in refused.stderr and fault.hits == 1
    assert refused.stderr.splitlines()[-1].endswith(f"What is left: latentfold push {out} {REPO}")
    assert f"{out} holds this conversion already" in refused.stderr
    assert {name: contents(out)[name] for name in made} == made
    typed = json.loads((out / EVALUATION).read_text())["provenance"]["command"]
    assert typed == "latentfold eval source new"

    monkeypatch.setattr("latentfold.convert.pipeline.run.run", lambda *_: pytest.fail("converted again"))
    monkeypatch.setattr("latentfold.eval.comparison.evaluate", lambda *_, **__: pytest.fail("evaluated again"))
    for other in (plain, [*command, "--seed", 1], [*command, "--dtype", "float32", "--target", "native"]):
        assert "not empty" in invoke(*other).stderr, other
    text.write_text("Other. " + TEXT * 8)
    assert (refused := invoke(*command)).exit_code == 2 and "not empty" in refused.stderr, "other text"
    text.write_text(TEXT * 8)
    (source / "model.safetensors").touch()
    assert (refused := invoke(*command)).exit_code == 2 and "not empty" in refused.stderr, "a younger source"
    os.utime(source / "model.safetensors", (0, 0))
    recipe = (out / RECIPE).read_text()
    (out / RECIPE).write_text("{}")
    assert (refused := invoke(*command)).exit_code == 2 and "not empty" in refused.stderr, "a record of another version"
    (out / RECIPE).write_text(recipe)
    done = invoke(*command)
    assert done.exit_code == 0, done.output
    assert published(server) == contents(out) and done.stdout.splitlines()[0] == str(out)


def interrupted(reason: str) -> None:
    raise InputError(reason)


def test_from_python_the_same_is_refused_and_named_as_python_has_it(server: HubServer, out: Path) -> None:
    (out / EVALUATION).unlink()
    for options, message in (
        ({}, r"no evaluation\.json; run latentfold eval \(from Python: save_evaluation\), or pass allow_unevaluated"),
        ({"create_pr": True, "tag": "x"}, "create_pr: goes to the main branch"),
        ({"token": None}, "not logged in"),
    ):
        with pytest.raises(InputError, match=message) as raised:
            publish_checkpoint(out, REPO, **{"token": TOKEN, "progress": False} | options)
        assert "--" not in str(raised.value)
    assert server.requests == []
    before = contents(out)
    planned = publish_checkpoint(str(out), REPO, allow_unevaluated=True, dry_run=True)
    assert planned.pushed is None and "Not measured" in planned.card and contents(out) == before
    assert planned.notice and "licence is not known" in planned.notice and server.requests == []
    done = publish_checkpoint(out, REPO, allow_unevaluated=True, token=TOKEN, tag="v1", private=True)
    assert done.pushed and done.pushed.changed and set(done.files) == set(published(server, "v1"))
    assert done.card.encode() == published(server)["README.md"] and server.repo(REPO).private
    assert not publish_checkpoint(out, REPO, allow_unevaluated=True, token=TOKEN, progress=False).pushed.changed


def test_unevaluated_if_told_so(server: HubServer, out: Path) -> None:
    """An evaluation of other weights stays here, and nothing in the card comes from it."""
    write_evaluation(out, fingerprint="0")
    (out / "report.html").write_text("of other weights")
    done = invoke("push", out, REPO, "--token", TOKEN, "--allow-unevaluated")
    assert done.exit_code == 0, done.output
    found = published(server)
    assert not {EVALUATION, "report.html"} & set(found) and not any(name.startswith("figures/") for name in found)
    assert b"Not measured" in found["README.md"] and (out / EVALUATION).exists()


@pytest.mark.parametrize(
    ("licence", "message"),
    [
        (None, "not known"),
        ("apache-2.0", None),
        ("cc-by-nc-4.0", "no commercial use"),
        ("cc-by-nc-nd-4.0", "forbids derivatives"),
        ("cc-by-nd-4.0", "forbids derivatives"),
        ("llama3.1", "Built with Llama"),
        ("gemma", "terms passed on"),
        ("other", "read its terms"),
    ],
)
def test_licence_notices(licence: str | None, message: str | None) -> None:
    found = licence_notice(recipe_of(license=licence))
    assert found is None if message is None else found is not None and message in found


# --------------------------------------------------------------------------------------------------- pulls

PULL_FAULTS: dict[str, tuple[Fault, str]] = {
    "401": (Fault("GET", "/api/models/", status=401), "does not accept the token"),
    "403": (Fault("GET", "/api/models/", status=403), "the token has no permission"),
    "404": (Fault("GET", "/api/models/", status=404), "not found on the Hub"),
    "gated": (Fault("GET|HEAD", "/resolve/", status=403, headers={"X-Error-Code": "GatedRepo"}), "gated; accept its"),
    "429": (Fault("GET", "/resolve/", status=429, headers={"Retry-After": "9"}, times=None), "in 9 seconds"),
    "500": (Fault("GET", "/resolve/", status=500, times=None), r"problem of its own \(status 500\)"),
    "wrong body": (Fault("GET", "/resolve/", corrupt=True), r"config\.json is not what the Hub's hash says.*deleted"),
}


@pytest.mark.parametrize("case", PULL_FAULTS)
def test_a_download_that_fails_says_why(case: str, server: HubServer) -> None:
    server.create_repo(REPO, files={"config.json": b'{"a": 1}'})
    fault, message = PULL_FAULTS[case]
    server.fail(replace(fault))
    with pytest.raises(InputError, match=message) as raised:
        fetch(REPO, ["config.json"], None, TOKEN)
    assert server.faults[0].hits and "\n" not in str(raised.value) and TOKEN not in str(raised.value)
    server.faults.clear()
    assert (fetch(REPO, ["config.json"], None, TOKEN) / "config.json").read_bytes() == b'{"a": 1}'


def test_a_wrong_body_of_large_files_is_noticed(server: HubServer) -> None:
    server.create_repo(REPO, files={"config.json": b"{}", "model.safetensors": b"weights"})
    server.fail(Fault("GET", r"/resolve/.*safetensors", corrupt=True))
    with pytest.raises(InputError, match=r"model\.safetensors is not what the Hub's hash says"):
        fetch(REPO, ["*.safetensors"], None, None)


def test_offline_the_cache_is_taken_as_it_is(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.create_repo(REPO, files={"config.json": b"{}"})
    found = fetch(REPO, ["config.json"], None, None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = len(server.requests)
    assert fetch(REPO, ["config.json"], None, None) == found
    with pytest.raises(InputError, match="not in the local cache, and the Hub cannot be reached"):
        fetch("alice/other", ["config.json"], None, None)
    assert len(server.requests) == before
