"""The evaluator against transformers' own numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from latentfold.convert import convert_checkpoint
from latentfold.convert.cli import main
from latentfold.convert.corpus import read_documents, tokenize
from latentfold.eval import evaluate
from latentfold.eval.comparison import bundled_novel
from latentfold.eval.predictions import position_buckets, standard_error
from tests.conftest import MakeModel, load, tiny_tokenizer


@pytest.fixture
def pair(make_model: MakeModel, tmp_path: Path, options: dict[str, Any]) -> tuple[Path, Path]:
    """A tiny model and its conversion."""
    source, out = make_model(), tmp_path / "out"
    convert_checkpoint(str(source), str(out), kv_rank=8, rope_dim=4, **options)
    return source, out


def test_numbers_are_those_of_transformers(pair: tuple[Path, Path], text_file: Path) -> None:
    source, out = pair
    found = evaluate(str(source), str(out), text=[str(text_file)], seq_len=64, windows=3, progress=False)
    tokens = tokenize(tiny_tokenizer(), read_documents([text_file])[0].text)[: 3 * 64].view(3, 64)
    with torch.no_grad():
        logs = [load(folder)(tokens).logits[:, :-1].log_softmax(-1) for folder in pair]
    losses = [-log.gather(-1, tokens[:, 1:, None])[..., 0] for log in logs]
    assert found.overall.original == pytest.approx(float(losses[0].mean()), rel=1e-5)
    assert found.overall.converted == pytest.approx(float(losses[1].mean()), rel=1e-5)
    assert found.overall.gap == pytest.approx(float((losses[1] - losses[0]).mean()), abs=1e-5)
    kl = (logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean()
    assert found.agreement.kl == pytest.approx(float(kl), rel=1e-4)
    same = (logs[0].argmax(-1) == logs[1].argmax(-1)).float().mean()
    assert found.agreement.top1 == pytest.approx(float(same))
    assert found.overall.predictions == 3 * 63


def test_layer_errors_are_those_of_the_modules(pair: tuple[Path, Path], text_file: Path) -> None:
    source, out = pair
    found = evaluate(str(source), str(out), text=[str(text_file)], seq_len=64, windows=1, progress=False)
    tokens = tokenize(tiny_tokenizer(), read_documents([text_file])[0].text)[None, :64]
    original, converted = load(source), load(out)
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for i, layer in enumerate(original.model.layers):

        def note(_module: Any, _args: Any, kwargs: Any, output: Any, i: int = i) -> None:
            seen[i] = (kwargs["hidden_states"], output[0])

        layer.self_attn.register_forward_hook(note, with_kwargs=True)
    scale = json.loads((out / "latentfold.json").read_text())["residual_scale"]
    positions = torch.arange(64)[None]
    with torch.no_grad():
        original(tokens)
        assert found.layers is not None and len(found.layers) == 2
        for i, layer in enumerate(converted.model.layers):
            x, expected = seen[i]
            rotary = converted.model.rotary_emb(x, positions)
            mask = torch.full((64, 64), -torch.inf).triu(1)[None, None]
            output = layer.self_attn(hidden_states=x, position_embeddings=rotary, attention_mask=mask)[0] / scale
            error = float((output - expected).norm() / expected.norm())
            assert found.layers[i].relative_error == pytest.approx(error, rel=1e-4)
            assert 0 < error < 2 and found.layers[i].predicted is not None


def test_cache_is_counted_and_measured(pair: tuple[Path, Path], text_file: Path) -> None:
    found = evaluate(str(pair[0]), str(pair[1]), text=[str(text_file)], seq_len=64, windows=1, progress=False)
    assert found.cache_original.counted == found.cache_original.measured == 2 * 2 * 2 * 8 * 4
    assert found.cache_converted.counted == found.cache_converted.measured == 2 * 12 * 4


def test_a_model_equals_itself(make_model: MakeModel, text_file: Path) -> None:
    source = str(make_model())
    found = evaluate(source, source, text=[str(text_file)], seq_len=32, windows=2, progress=False)
    assert found.overall.gap == 0 and found.agreement.top1 == 1 and abs(found.agreement.kl) < 1e-6
    assert found.layers is None  # no recipe: the residual scale is not known, so nothing is claimed


def test_command_prints_a_table_and_writes_json(pair: tuple[Path, Path], text_file: Path, tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    command = ["eval", str(pair[0]), str(pair[1]), "--text", str(text_file), "--seq-len", "64"]
    result = CliRunner().invoke(main, [*command, "--windows", "2", "--json", str(target)])
    assert result.exit_code == 0, result.stderr
    data = json.loads(target.read_text())
    assert f"{data['overall']['gap']:+.3f}" in result.stdout
    assert "| layer |" in result.stdout and "evaluating" in result.stderr
    assert data["provenance"]["windows"] == [2, 64] and len(data["provenance"]["text_sha256"]) == 64
    machine = CliRunner().invoke(main, [*command, "--windows", "2", "--json", "-", "--quiet"])
    assert json.loads(machine.stdout)["overall"] == data["overall"] and machine.stderr == ""


def test_buckets_double_up_to_the_length() -> None:
    assert position_buckets(4095) == [(0, 512), (512, 1024), (1024, 2048), (2048, 4095)]
    assert position_buckets(300) == [(0, 300)]
    assert position_buckets(512) == [(0, 512)]


def test_standard_error_sees_neighbours_that_move_together() -> None:
    generator = torch.Generator().manual_seed(0)
    independent = torch.randn(4, 4096, generator=generator, dtype=torch.float64)
    together = torch.randn(4, 16, generator=generator, dtype=torch.float64).repeat_interleave(256, dim=1)
    assert standard_error(independent) == pytest.approx(1 / (4 * 4096) ** 0.5, rel=0.3)
    assert standard_error(together) == pytest.approx(1 / 64**0.5, rel=0.3)
    assert standard_error(independent[:1, :100]) is None


def test_evaluation_text_is_not_calibration_text() -> None:
    """The bundled texts are disjoint: no line of the novel stands in what conversions are calibrated on."""
    from latentfold.convert.corpus import default_calibration

    lines = {line.strip() for line in bundled_novel().text.splitlines() if len(line.strip()) > 40}
    assert len(lines) > 1000
    for document in default_calibration():
        assert not lines & {line.strip() for line in document.text.splitlines()}
