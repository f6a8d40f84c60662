"""The benchmark's rows: the default is what `convert` writes, the baselines are exact where they can be."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from benchmarks import quality
from benchmarks.quality import main
from benchmarks.variants import BASELINES, VARIANTS
from latentfold.convert import convert_checkpoint
from latentfold.convert.attention.call import AttentionCall
from latentfold.convert.attention.latent import latent_attention
from latentfold.convert.calibrate.layer import calibrate
from latentfold.convert.calibrate.probe import Sampling
from latentfold.eval import EvaluationConfig, evaluate
from tests.attentions import FREQUENCIES, TOKENS, attention, random_inputs, random_weights
from tests.conftest import MakeModel


def test_default_row_is_what_convert_writes(
    make_model: MakeModel, tmp_path: Path, options: dict[str, Any], text_file: Path
) -> None:
    source = str(make_model())
    other = tmp_path / "other.txt"
    other.write_text("Numbers: " + " ".join(str(i * i) for i in range(200)))
    result = tmp_path / "result.json"
    arguments = [source, "--sizes", "4+8", "--text", str(other), "--calibration", str(text_file), "--seq-len", "64"]
    printed = CliRunner().invoke(main, [*arguments, "--json", str(result), "--ablate", "--baselines"])
    assert printed.exit_code == 0, printed.output
    rows = {row["method"]: row for row in json.loads(result.read_text())[0]["rows"]}
    assert (set(VARIANTS) | set(BASELINES)) - set(rows) <= {"no ladder search"}  # where it finds the literal one
    assert str(tmp_path) not in result.read_text() + printed.stdout and "NaN" not in result.read_text()
    options["calibration_tokens"] = 28672
    convert_checkpoint(source, str(tmp_path / "out"), kv_rank=8, rope_dim=4, **options)
    found = evaluate(
        source, str(tmp_path / "out"), EvaluationConfig(text=(str(other),), seq_len=64, windows=2), progress=False
    )
    (text,) = rows["latentfold"]["texts"].values()
    assert text["overall"]["gap"] == pytest.approx(found.overall.gap, abs=2e-4)
    gaps = [next(iter(row["texts"].values()))["overall"]["gap"] for row in rows.values()]
    assert all(math.isfinite(gap) for gap in gaps) and len({round(gap, 6) for gap in gaps}) > 10
    assert rows["MHA2MLA, weights only (own words)"]["container"] == "simulated"


def test_refusals_come_before_the_work(make_model: MakeModel, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "score_ladders", lambda *_: pytest.fail("began"))
    source, text = str(make_model()), str(text_file)
    again = text_file.parent / "again" / text_file.name
    again.parent.mkdir()
    again.write_text("Another text of the same name.")
    command = [source, "--sizes", "4+8", "--calibration", text, "--seq-len", "64", "--text", text]
    for arguments, message in (
        ([*command, "--windows", "0"], "--windows"),
        ([*command, "--text", str(again)], "two of one name"),
        ([*command[:-1], str(again)], "evaluation text is too short"),
        ([*command, "nowhere/at/all"], "nowhere/at/all: no such folder"),
        ([*command, "--manual"], "drop --text and --calibration"),
        ([source, "--sizes", "4+8", "--seq-len", "64", "--manual"], "at most 256 positions"),
        ([*command, "--only", "magic"], "--only magic: expected one of latentfold"),
        ([*command, "--sizes", "4+"], "expected rope-dim \\+ kv-rank"),
    ):
        refused = CliRunner().invoke(main, arguments)
        assert refused.exit_code == 2 and isinstance(refused.exception, SystemExit), message
        assert re.search(message, refused.stderr), refused.stderr


@pytest.mark.parametrize(
    ("name", "kv_heads"), [("TransMLA (own words)", 1), *((name, 2) for name in BASELINES if "TransMLA" not in name)]
)
def test_baselines_are_exact_at_full_size(name: str, kv_heads: int) -> None:
    """Every rotation kept and full rank: each is the identity where its slots can hold the model."""
    w = random_weights(kv_heads)
    inputs = [random_inputs(100 + seed) for seed in range(6)]
    calls = [AttentionCall(k, x, x, attention(w, FREQUENCIES, x)) for k, x in enumerate(inputs)]
    calibrated = calibrate(calls, w, FREQUENCIES, (6, TOKENS), Sampling(16, 0))
    slots = FREQUENCIES.repeat_interleave(kv_heads)
    layer, frequencies = BASELINES[name].convert(calibrated, slots, 16)
    x = random_inputs()
    expected = attention(w, FREQUENCIES, x)
    assert (latent_attention(layer, frequencies, x) - expected).norm() <= 1e-6 * expected.norm()
    smaller, frequencies = BASELINES[name].convert(calibrated, slots[: len(slots) // 2], 6)
    assert (latent_attention(smaller, frequencies, x) - expected).norm() > 1e-3 * expected.norm()
    assert torch.isfinite(smaller.o).all()
