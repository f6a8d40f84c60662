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
from latentfold.convert.errors import InputError
from latentfold.convert.recipe import fingerprint
from latentfold.eval import evaluate
from latentfold.eval.comparison import bundled_novel
from latentfold.eval.predictions import TokenScores, agreement, curve, position_buckets, standard_error
from latentfold.eval.records import EVALUATION, read_evaluation
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
    """Scores, values and output against the eager modules of plain transformers, all queries of one window."""
    source, out = pair
    found = evaluate(str(source), str(out), text=[str(text_file)], seq_len=64, windows=1, progress=False)
    tokens = tokenize(tiny_tokenizer(), read_documents([text_file])[0].text)[None, :64]
    original, converted = (load(folder, attn_implementation="eager") for folder in (source, out))
    seen: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
    for i, layer in enumerate(original.model.layers):

        def note(_module: Any, _args: Any, kwargs: Any, output: Any, i: int = i) -> None:
            seen[i] = (kwargs["hidden_states"], *output)

        layer.self_attn.register_forward_hook(note, with_kwargs=True)
    scale = json.loads((out / "latentfold.json").read_text())["residual_scale"]
    positions = torch.arange(64)[None]
    mask = torch.full((64, 64), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        original(tokens)
        assert found.layers is not None and len(found.layers) == 2
        for i, layer in enumerate(converted.model.layers):
            x, expected, weights = seen[i]
            rotary = converted.model.rotary_emb(x, positions)
            output, attended = layer.self_attn(hidden_states=x, position_embeddings=rotary, attention_mask=mask)
            error = float((output / scale - expected).norm() / expected.norm())
            assert found.layers[i].output == pytest.approx(error, rel=1e-4)
            assert 0 < error < 2 and found.layers[i].predicted is not None

            logs = [w.log().masked_fill(mask < 0, 0.0) for w in (weights, attended)]
            seen_keys = torch.arange(1, 65)[:, None]
            centred = [(log - log.sum(-1, keepdim=True) / seen_keys).masked_fill(mask < 0, 0.0) for log in logs]
            error = float((centred[1] - centred[0]).norm() / centred[0].norm())
            assert found.layers[i].scores == pytest.approx(error, rel=1e-3)

            up = layer.self_attn.kv_b_proj(
                layer.self_attn.kv_a_layernorm(layer.self_attn.kv_a_proj_with_mqa(x)[..., :8])
            )
            values = up.view(1, 64, 4, -1)[..., -8:].transpose(1, 2)
            output = layer.self_attn.o_proj((weights @ values).transpose(1, 2).flatten(2)) / scale
            error = float((output - expected).norm() / expected.norm())
            assert found.layers[i].values == pytest.approx(error, rel=1e-4)


def test_several_texts_count_alike(pair: tuple[Path, Path], text_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("Numbers: " + " ".join(str(i * i) for i in range(200)))
    options: dict[str, Any] = {"seq_len": 64, "progress": False}
    both = evaluate(*map(str, pair), text=[str(text_file), str(other)], windows=3, **options)
    alone = [evaluate(*map(str, pair), text=[str(name)], windows=3, **options) for name in (text_file, other)]
    assert [text.name for text in both.texts] == [text_file.name, other.name]
    for text, single in zip(both.texts, alone, strict=True):
        assert text == single.texts[0] and single.overall == text.overall
    assert both.overall.gap == pytest.approx((alone[0].overall.gap + alone[1].overall.gap) / 2)
    assert both.agreement.top1 == pytest.approx((alone[0].agreement.top1 + alone[1].agreement.top1) / 2)
    errors = [text.overall.gap_standard_error or 0 for text in both.texts]
    assert both.overall.gap_standard_error == pytest.approx((errors[0] ** 2 + errors[1] ** 2) ** 0.5 / 2)


def test_curve_is_the_mean_over_runs_of_positions() -> None:
    length = 300
    losses = torch.arange(length, dtype=torch.float64).expand(2, length)
    found = curve(TokenScores(losses, losses + 1, losses, losses))
    assert found.original == pytest.approx(found.context)  # the mean of a run of positions is its middle
    assert found.converted == pytest.approx([value + 1 for value in found.original])
    assert found.context[0] == 7.5 and len(found.context) < length / 8


def test_kl_quantiles() -> None:
    kl = torch.arange(101, dtype=torch.float64)[None]
    assert agreement(TokenScores(kl, kl, kl, kl)).kl_quantiles == {"0.5": 50, "0.9": 90, "0.99": 99}


def test_cache_is_counted_and_measured(pair: tuple[Path, Path], text_file: Path) -> None:
    found = evaluate(str(pair[0]), str(pair[1]), text=[str(text_file)], seq_len=64, windows=1, progress=False)
    assert found.cache_original.counted == found.cache_original.measured == 2 * 2 * 2 * 8 * 4
    assert found.cache_converted.counted == found.cache_converted.measured == 2 * 12 * 4
    points = {point.context: (point.original, point.converted) for point in found.cache_by_context}
    assert points[256] == (256 * found.cache_original.counted, 256 * found.cache_converted.counted)


def test_result_stays_beside_the_checkpoint(pair: tuple[Path, Path], text_file: Path) -> None:
    command = ["eval", *map(str, pair), "--text", str(text_file), "--seq-len", "64", "--windows", "1", "--quiet"]
    assert CliRunner().invoke(main, [*command, "--no-save"]).exit_code == 0
    assert not (pair[1] / EVALUATION).exists()
    printed = CliRunner().invoke(main, [*command, "--json", "-"])
    saved = read_evaluation(pair[1] / EVALUATION)
    assert json.loads(json.dumps(saved.to_dict())) == json.loads(printed.stdout)
    assert str(pair[1].parent) not in (pair[1] / EVALUATION).read_text()  # it may be published
    recipe = json.loads((pair[1] / "latentfold.json").read_text())
    assert saved.provenance["fingerprint"] == fingerprint(recipe)
    assert saved.texts[0].sha256 and saved.provenance["versions"]["torch"] == torch.__version__
    damaged = saved.to_dict() | {"overall": 3}
    (pair[1] / EVALUATION).write_text(json.dumps(damaged))
    with pytest.raises(InputError, match=r"not an evaluation \(overall"):
        read_evaluation(pair[1] / EVALUATION)
    (pair[1] / EVALUATION).write_text(json.dumps(damaged | {"schema": 0}))
    with pytest.raises(InputError, match="expected an evaluation of schema 1, found 0"):
        read_evaluation(pair[1] / EVALUATION)


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
    (text,) = data["texts"]
    assert (text["windows"], text["window_length"], len(text["sha256"])) == (2, 64, 64)
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
