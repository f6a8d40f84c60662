"""docs/python.md runs from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TEXT, MakeModel

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def test_the_page_runs(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a tiny model with eight KV heads of 16, which takes the page's sizes; with a short text in place of ours."""
    source = make_model(num_key_value_heads=8, num_attention_heads=8, head_dim=16, hidden_size=192)
    monkeypatch.chdir(tmp_path)
    text = [("latentfold default: short.txt", TEXT * 60)]
    from latentfold.convert.text.documents import Document

    documents = [Document(*one) for one in text]
    monkeypatch.setattr("latentfold.convert.pipeline.prepare.default_calibration", lambda: documents)
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))
    assert code.count("HuggingFaceTB/SmolLM2-135M-Instruct") == 1
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(source)), str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    assert "native" in printed and "2/2 converting done" in printed and "kv_rank 0: expected" in printed
    assert names["result"].recipe.size == (96, 32) and names["evaluation"].overall.predictions > 0
