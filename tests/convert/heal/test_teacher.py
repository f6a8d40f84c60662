"""A teacher whose predictions lie on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from latentfold.convert import heal_checkpoint
from latentfold.convert.heal import teacher as teachers
from latentfold.convert.heal.models import Arithmetic
from latentfold.convert.heal.teacher import Beside, Recorded, record
from latentfold.convert.heal.text import healing_text
from latentfold.convert.model.heads import ATTENTION
from latentfold.convert.model.streamed import StreamedModel
from latentfold.convert.model.whole import load
from latentfold.convert.progress import silent
from latentfold.convert.source.config import read_config
from latentfold.convert.source.opening import open_checkpoint
from latentfold.convert.text.documents import Document
from latentfold.eval.inputs import with_weights
from tests import healing
from tests.conftest import TEXT, MakeModel, tiny_tokenizer
from tests.families import save_family
from tests.healing import SHORT, converted

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_what_is_recorded_is_what_the_model_beside_predicts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all tokens kept but one, in several files, in another order; a file that is there is not made again."""
    checkpoint = with_weights(open_checkpoint(save_family(tmp_path / "source", name)), None)
    model = load(checkpoint, torch.float32, CPU, attn_implementation=ATTENTION)
    vocab = model.config.get_text_config().vocab_size
    text = healing_text([Document("a", TEXT * 6)], tiny_tokenizer(), 32, vocab)
    windows = text.epoch(32, seed=0)[:5]
    monkeypatch.setattr(teachers, "KEPT", vocab - 1)
    monkeypatch.setattr(teachers, "STATES", 2 * 32 * model.config.get_text_config().hidden_size)
    streamed = StreamedModel(checkpoint, read_config(checkpoint), torch.float32, CPU)
    record(streamed, windows[:4], tmp_path / "record", silent)
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "record").iterdir()}
    assert len(made) == 2
    record(streamed, windows, tmp_path / "record", silent)
    assert all(path.stat().st_mtime_ns == made.get(path, path.stat().st_mtime_ns) for path in made)
    asked = [windows[3], windows[0], windows[4]]
    torch.manual_seed(0)
    logits = torch.randn(3 * 32, vocab)
    both = [
        teacher.predict(asked)
        for teacher in (Beside(model, Arithmetic(CPU, torch.float32)), Recorded(tmp_path / "record", CPU))
    ]
    with torch.no_grad():
        for mine, beside, recorded in zip(logits.split(20), *(targets.split(20) for targets in both), strict=True):
            for one, other in zip(beside(mine), recorded(mine), strict=True):
                assert torch.allclose(one, other, atol=2e-4)


def test_healing_with_the_original_on_disk(make_model: MakeModel, tmp_path: Path, options: dict[str, Any]) -> None:
    """Nearly what the original in memory gives, although most of the tiny model's tokens are beyond the kept ones."""
    source, text = make_model(), healing.healing_text(tmp_path)
    out = converted(source, tmp_path / "out", options)
    arguments: dict[str, Any] = {"teacher": str(source), "steps": 12, "rate": 0.01, "text": [text]} | SHORT
    found = heal_checkpoint(str(out), str(tmp_path / "recorded"), cache_teacher=True, **arguments).recipe.healing[0]
    assert found.curve[found.best].divergence < 0.9 * found.curve[0].divergence
    assert {path.name for path in out.iterdir()} == {path.name for path in (tmp_path / "recorded").iterdir()}
