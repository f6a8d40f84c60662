"""Bytes of published models' caches, as numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from latentfold.convert import inspect_model
from latentfold.convert.cli import main
from tests.published import PUBLISHED

BYTES = {  # at 4k, 32k and 128k tokens, bfloat16
    "Qwen3-Next-80B-A3B": (100_663_296, 805_306_368, 3_221_225_472),
    "Kimi-K2.5": (287_834_112, 2_302_672_896, 9_210_691_584),
    "Llama-4-Scout": (805_306_368, 2_818_572_288, 7_650_410_496),
    "LFM2-1.2B": (50_331_648, 402_653_184, 1_610_612_736),
    "gemma-3-4b": (205_520_896, 792_723_456, 2_805_989_376),
    "gpt-oss-20b": (103_809_024, 808_452_096, 3_224_371_200),
    "recurrentgemma-2b": (16_777_216, 16_777_216, 16_777_216),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_bytes(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name] | {"torch_dtype": "bfloat16"}))
    found = inspect_model(str(tmp_path))
    assert tuple(found.cache_bytes.values()) == BYTES[name]


def test_a_model_that_caches_no_token(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "granitemoehybrid", "torch_dtype": "bfloat16"}))
    table = CliRunner().invoke(main, ["inspect", str(tmp_path)]).stdout
    assert "recurrent state on 32 of 32 layers" in table
    assert "no layer caches tokens" in table
