"""Whose commit a record names."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from latentfold.eval import provenance

ROOT = Path(__file__).parents[2]
OURS, THEIRS = '[project]\nname = "latentfold"\n', '[project]\nname = "theirs"\n'


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit_of_a_copy(folder: Path) -> str | None:
    """What a copy of the module in `folder` takes for its commit."""
    spec = spec_from_file_location("copied", folder / "provenance.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module._commit()


@pytest.mark.parametrize(
    ("project", "place", "tracked", "known"),
    [
        (THEIRS, ".venv/lib/python3/site-packages/latentfold/eval", False, False),
        (THEIRS, "vendor/latentfold/eval", True, False),
        (None, "latentfold/eval", True, False),
        ("[tool.x]\n", "latentfold/eval", True, False),
        ("not TOML", "latentfold/eval", True, False),
        (OURS, ".venv/lib/python3/site-packages/latentfold/eval", False, False),
        (OURS, "eval", True, True),
    ],
)
def test_only_the_repository_that_holds_our_source(
    project: str | None, place: str, tracked: bool, known: bool, tmp_path: Path
) -> None:
    git(tmp_path, "init", "-q")
    if project is not None:
        (tmp_path / "pyproject.toml").write_text(project)
    (tmp_path / "theirs.txt").write_text("theirs")
    (tmp_path / place).mkdir(parents=True)
    shutil.copy(provenance.__file__, tmp_path / place)
    git(tmp_path, "add", "--all" if tracked else "theirs.txt", *([] if tracked else ["pyproject.toml"]))
    git(tmp_path, "commit", "-q", "-m", "theirs")
    assert commit_of_a_copy(tmp_path / place) == (git(tmp_path, "rev-parse", "--short=12", "HEAD") if known else None)


def test_changes_show_and_no_repository_is_none(tmp_path: Path) -> None:
    shutil.copy(provenance.__file__, tmp_path)
    assert commit_of_a_copy(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "pyproject.toml").write_text(OURS)
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "-q", "-m", "ours")
    (tmp_path / "pyproject.toml").write_text(OURS + "# changed\n")
    assert re.fullmatch("[0-9a-f]{12}[+]", commit_of_a_copy(tmp_path) or "")


def test_this_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also inside a git hook, where GIT_DIR says otherwise."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    git(tmp_path, "init", "-q")
    head = git(ROOT, "rev-parse", "--short=12", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    assert (provenance._commit() or "").rstrip("+") == head
