"""What is installed is what is in the folders."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_subpackage_is_listed() -> None:
    """A new folder works editable and is missing from the wheel: compare the list with the folders."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        "latentfold." + ".".join(path.parent.relative_to(ROOT).parts)
        for top in ("convert", "eval")
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert sorted(listed) == sorted(found)


def test_nothing_bare_is_importable_and_help_needs_no_torch() -> None:
    """`import convert` must fail, and `latentfold --help` must not wait for torch."""
    code = (
        "import importlib.util, sys\n"
        "assert importlib.util.find_spec('convert') is None and importlib.util.find_spec('eval') is None\n"
        "import latentfold.convert.cli, latentfold.convert, latentfold.eval\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


def test_inspect_loads_no_model_code(tmp_path: Path) -> None:
    """config.json alone is read: what transformers' config classes load themselves is all that it waits for."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    code = (
        "import sys\n"
        "from latentfold.convert.cli import main\n"
        f"main(['inspect', {str(tmp_path)!r}], standalone_mode=False)\n"
        "heavy = {'transformers.modeling_utils', 'latentfold.convert.model.streamed', 'matplotlib', 'pydantic'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/", stdout=subprocess.DEVNULL)
