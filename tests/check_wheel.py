"""usage: python tests/check_wheel.py WHEEL; fails unless the wheel holds every module and data file of the folders."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def expected_members() -> set[str]:
    """Names in the wheel of everything below convert/ and eval/ that is not a cache."""
    files = [path for top in ("convert", "eval") for path in (ROOT / top).rglob("*") if path.is_file()]
    return {f"latentfold/{path.relative_to(ROOT).as_posix()}" for path in files if "__pycache__" not in path.parts}


def missing_members(wheel: str) -> list[str]:
    """What the wheel lacks."""
    with zipfile.ZipFile(wheel) as archive:
        return sorted(expected_members() - set(archive.namelist()))


if __name__ == "__main__":
    missing = missing_members(sys.argv[1])
    if missing:
        sys.exit(f"{sys.argv[1]} lacks {', '.join(missing)}")
