"""The house stays as it was built: imports go down, nothing runs in circles, no folder outgrows a glance."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("convert", "eval")

FLOORS = (
    ("convert.choices", "convert.errors", "convert.formats", "convert.progress"),
    ("convert.attention", "convert.dtypes", "convert.files"),
    ("convert.model", "convert.text", "convert.calibrate"),
    ("convert.source", "convert.families", "convert.factorize"),
    ("convert.targets", "convert.write"),
    ("convert.plan", "convert.verify", "eval"),
    ("convert.pipeline", "convert.publish"),
    ("convert.heal",),
    ("convert.api",),
    ("convert.cli", "convert"),
)
"""Rooms, lowest first. A room may use what lies below it, and nothing on its own floor or above."""
FILES_A_FOLDER = 13
"""`__init__.py` included."""


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Every module, named without `latentfold.`; a package by its folder."""
    found = {}
    for path in sorted(path for top in PACKAGES for path in (root / top).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, known: set[str]) -> set[str]:
    """Modules of ours that a file imports, wherever in it: functions and TYPE_CHECKING count."""
    package = list(path.relative_to(ROOT).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(["latentfold", *package[: len(package) - node.level + 1], *base.split(".")]).rstrip(".")
            names = [f"{base}.{alias.name}" for alias in node.names]
        for name in names:
            name = name.removeprefix("latentfold.")
            while name and name not in known:
                name = name.rpartition(".")[0]
            found |= {name} - {""}
    return found


def room(module: str) -> str:
    """`convert.plan` for everything in that folder, `eval` for all of eval."""
    parts = module.split(".")
    return "eval" if parts[0] == "eval" else ".".join(parts[:2])


def arrows(known: dict[str, Path]) -> Iterator[tuple[str, str]]:
    """(who imports, what)."""
    for name, path in known.items():
        for other in imported(path, set(known)) - {name}:
            yield name, other


def circle(edges: set[tuple[str, str]]) -> list[str] | None:
    """A circle in a graph, or None."""
    graph: dict[str, set[str]] = {}
    for a, b in edges:
        graph.setdefault(a, set()).add(b)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return None


def siblings(edges: set[tuple[str, str]]) -> Iterator[tuple[str, set[tuple[str, str]]]]:
    """For every folder, the imports among what lies in it, files and folders alike."""
    inside: dict[str, set[tuple[str, str]]] = {}
    for a, b in edges:
        one, other = a.split("."), b.split(".")
        depth = 0
        while depth < min(len(one), len(other)) and one[depth] == other[depth]:
            depth += 1
        if depth < min(len(one), len(other)):
            pair = one[depth], other[depth]
            inside.setdefault(".".join(one[:depth]), set()).add(pair)
    inside.pop("", None)  # convert and eval: the floors say who may use whom
    yield from inside.items()


def test_every_room_has_a_floor() -> None:
    assert {room(name) for name in modules()} == {name for floor in FLOORS for name in floor}


def test_imports_go_down() -> None:
    height = {name: floor for floor, names in enumerate(FLOORS) for name in names}
    upwards = [
        f"{a} imports {b}" for a, b in arrows(modules()) if room(a) != room(b) and height[room(b)] >= height[room(a)]
    ]
    assert not upwards, "\n".join(sorted(upwards))


def test_nothing_imports_in_a_circle() -> None:
    """Neither files nor, at any level, the files and folders that lie side by side."""
    edges = set(arrows(modules()))
    assert (found := circle(edges)) is None, " -> ".join(found or ())
    for folder, inside in siblings(edges):
        assert (found := circle(inside)) is None, f"{folder}: " + " -> ".join(found or ())


@pytest.mark.parametrize("folder", sorted({path.parent for path in modules().values()}), ids=str)
def test_no_folder_outgrows_a_glance(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) <= FILES_A_FOLDER


def test_tests_mirror_the_folders() -> None:
    """`tests/convert/plan/` tests `convert/plan/`; nothing is tested in a folder that is gone."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        parent = path.parent.relative_to(ROOT / "tests")
        assert (ROOT / parent).is_dir(), path


def test_the_checks_can_fail() -> None:
    assert circle({("a", "b"), ("b", "c"), ("c", "a")}) is not None
    assert circle({("a", "b"), ("b", "c")}) is None
    assert dict(siblings({("eval.quality.sweep", "eval.records"), ("eval.records", "eval.quality")})) == {
        "eval": {("quality", "records"), ("records", "quality")}
    }
