"""The evaluator against transformers' own numbers."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from latentfold.convert import convert_checkpoint
from latentfold.convert.cli import main
from latentfold.convert.errors import InputError
from latentfold.convert.text.documents import read_documents
from latentfold.convert.text.windows import tokenize
from latentfold.convert.write.recipe import fingerprint, read_recipe
from latentfold.eval import EvaluationConfig, comparison, evaluate
from latentfold.eval.inputs import bundled_novel
from latentfold.eval.quality.predictions import TokenScores, agreement, curve, position_buckets, standard_error
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
    found = evaluate(
        str(source), str(out), EvaluationConfig(text=(str(text_file),), seq_len=64, windows=3), progress=False
    )
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
    found = evaluate(
        str(source), str(out), EvaluationConfig(text=(str(text_file),), seq_len=64, windows=1), progress=False
    )
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
    options: dict[str, Any] = {"seq_len": 64}
    both = evaluate(
        *map(str, pair), EvaluationConfig(text=(str(text_file), str(other)), windows=3, **options), progress=False
    )
    alone = [
        evaluate(*map(str, pair), EvaluationConfig(text=(str(name),), windows=3, **options), progress=False)
        for name in (text_file, other)
    ]
    assert [text.name for text in both.texts] == [text_file.name, other.name]
    for text, single in zip(both.texts, alone, strict=True):
        assert text == single.texts[0] and single.overall == text.overall
    assert both.overall.gap == pytest.approx((alone[0].overall.gap + alone[1].overall.gap) / 2)
    assert both.agreement.top1 == pytest.approx((alone[0].agreement.top1 + alone[1].agreement.top1) / 2)
    errors = [text.overall.gap_standard_error or 0 for text in both.texts]
    assert both.overall.gap_standard_error == pytest.approx((errors[0] ** 2 + errors[1] ** 2) ** 0.5 / 2)


@pytest.mark.parametrize("first", [False, True])
def test_a_text_shorter_than_a_window_is_read_whole(
    first: bool, pair: tuple[Path, Path], text_file: Path, tmp_path: Path
) -> None:
    """As one window beside the other text's, with a note; what is measured on it is what is measured on it alone."""
    short, html = tmp_path / "short.txt", tmp_path / "report.html"
    short.write_text("Only forty tokens, a byte each, are here.")
    texts = (short, text_file) if first else (text_file, short)
    arguments = ["eval", *pair, "--text", *texts, "--seq-len", 64, "--windows", 2, "--html", html]
    done = CliRunner().invoke(main, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    notes = [line for line in done.stderr.splitlines() if line.startswith("Note: ")]
    assert len(notes) == 1 and "short.txt: holds less than a window of 64 tokens; its 41 make" in notes[0]
    assert "1 window of 41 tokens" in done.stdout + html.read_text()
    found = {text.name: text for text in read_evaluation(pair[1] / EVALUATION).texts}
    assert [(found[path.name].windows, found[path.name].window_length) for path in (short, text_file)] == [
        (1, 41),
        (2, 64),
    ]
    heard: list[str] = []
    config = EvaluationConfig(text=(str(short),), seq_len=41)
    alone = evaluate(*map(str, pair), config, progress=False, notify=heard.append)
    assert not heard and alone.overall.predictions == 40
    assert alone.overall.gap == pytest.approx(found[short.name].overall.gap, abs=1e-6)
    assert alone.texts[0].sha256 == found[short.name].sha256
    quiet = CliRunner().invoke(main, [*map(str, arguments), "--quiet"])
    assert quiet.exit_code == 0 and "Note: " not in quiet.stderr


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
    found = evaluate(
        str(pair[0]), str(pair[1]), EvaluationConfig(text=(str(text_file),), seq_len=64, windows=1), progress=False
    )
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
    assert saved.provenance["fingerprint"] == fingerprint(recipe["files"])
    assert saved.texts[0].sha256 and saved.provenance["versions"]["torch"] == torch.__version__
    damaged = saved.to_dict() | {"overall": 3}
    (pair[1] / EVALUATION).write_text(json.dumps(damaged))
    with pytest.raises(InputError, match=r"not an evaluation \(overall"):
        read_evaluation(pair[1] / EVALUATION)
    (pair[1] / EVALUATION).write_text(json.dumps(damaged | {"schema": 0}))
    with pytest.raises(InputError, match="expected an evaluation of schema 1, found 0"):
        read_evaluation(pair[1] / EVALUATION)


REFUSED: dict[str, tuple[list[str], str]] = {
    "limit without tasks": (["--limit", "3"], "--limit is for --tasks"),
    "batch size without tasks": (["--batch-size", "3"], "--batch-size is for --tasks"),
    "task folder without tasks": (["--include-path", "."], "--include-path is for --tasks"),
    "contexts without speed": (["--contexts", "32"], "--contexts is for --speed"),
    "batches without speed": (["--batches", "4"], "--batches is for --speed"),
    "no tasks": (["--tasks", ","], "--tasks.*expected values with commas"),
    "no batches": (["--speed", "--batches", ""], "--batches.*expected values with commas"),
    "endless batch": (["--speed", "--batches", "9" * 20], "less than 2\\^31"),
    "long prompt": (["--prompt", "x" * 300], "300 tokens, and .* at most 256 positions"),
    "prompt of broken bytes": (["--prompt", "\udcff"], "expected some text to continue, in UTF-8"),
    "seed": (["--seed", "-1"], "'--seed': -1 is not in the range x>=0"),
    "large seed": (["--seed", str(2**32)], "--seed 4294967296: expected 0 to"),
    "skip": (["--skip", "9999"], "found 0 after the 9999 skipped"),
    "a text twice": (["--text", "again.txt"], "the same text, which would count twice"),
    "revision of a folder": (["--revision", "main"], "--revision main: .* is a folder on this disk"),
    "page to stdout": (["--html", "-"], "--html -: cannot go to stdout"),
    "two results in one file": (["--html", "one", "--json", "./one"], "expected two files"),
    "results, but no text": (["--html", "a", "--json", "b", "--text", "gone.txt"], "'gone.txt' does not exist"),
}


def test_refusals_come_before_the_work_and_leave_nothing(
    pair: tuple[Path, Path], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "sweep", lambda *_: pytest.fail("swept"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "again.txt").write_bytes(text_file.read_bytes())
    before = sorted(tmp_path.rglob("*"))
    command = ["eval", *map(str, pair), "--text", str(text_file), "--seq-len", "64", "--quiet"]
    for case, (options, message) in REFUSED.items():
        result = CliRunner().invoke(main, [*command, *options])
        assert result.exit_code == 2 and isinstance(result.exception, SystemExit), case
        assert re.search(message, result.stderr), f"{case}: {result.stderr}"
        assert sorted(tmp_path.rglob("*")) == before, case


def edit(folder: Path, change: Callable[[dict[str, Any]], Any], file: str = "latentfold.json") -> None:
    data = json.loads((folder / file).read_text())
    change(data)
    (folder / file).write_text(json.dumps(data))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def other_bytes(folder: Path) -> None:
    """Two letters that only the second text uses change their tokens."""
    edit(folder, lambda data: data["model"]["vocab"].update({"Ã": 3, "!": 258}), "tokenizer.json")


def interrupt(folder: Path) -> None:
    (folder / ".latentfold-partial").mkdir()
    (folder / ".latentfold-partial" / "journal.json").write_text("{}")


UP = "model.layers.1.mlp.up_proj.weight"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "unfinished": (interrupt, "an unfinished conversion"),
    "record without files": (lambda out: edit(out, lambda recipe: recipe.pop("files")), "files: Field required"),
    "files as a list": (lambda out: edit(out, lambda recipe: recipe.update(files=[])), "not the record"),
    "layers of nothing": (lambda out: edit(out, lambda recipe: recipe.update(layers=[{}, {}])), "not the record"),
    "no place for the result": (lambda out: (out / EVALUATION).mkdir(), "evaluation.json: is a folder"),
    "tensor missing": (lambda out: edit_weights(out, lambda tensors: tensors.pop(UP)), f"{UP}: .*found nothing"),
    "tensor cut": (
        lambda out: edit_weights(out, lambda tensors: tensors.update({UP: tensors[UP][:4].clone()})),
        rf"{UP} in model\.safetensors: .*found \[4, 32\]",
    ),
    "other tokens in the second text": (other_bytes, "tokenize the text differently"),
}


def test_damaged_conversions_are_refused_before_the_work(
    pair: tuple[Path, Path], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "sweep", lambda *_: pytest.fail("swept"))
    (tmp_path / "umlauts.txt").write_text("Zwölf Boxkämpfer! " * 9)
    for case, (damage, message) in DAMAGES.items():
        damaged = shutil.copytree(pair[1], tmp_path / case.replace(" ", "-"))
        damage(damaged)
        texts = ["--text", str(text_file), "--text", str(tmp_path / "umlauts.txt"), "--seq-len", "64"]
        result = CliRunner().invoke(main, ["eval", str(pair[0]), str(damaged), *texts, "--html", str(tmp_path / "a")])
        assert result.exit_code == 2 and isinstance(result.exception, SystemExit), case
        assert re.search(message, result.stderr) and result.stderr.count("\n") == 1, f"{case}: {result.stderr}"
        assert not (tmp_path / "a").exists()


def test_only_the_original_is_compared_with_its_conversion(
    pair: tuple[Path, Path], make_model: MakeModel, text_file: Path
) -> None:
    """Any other difference would stand in the card as what the conversion cost."""
    options: dict[str, Any] = {"text": (str(text_file),), "seq_len": 64, "windows": 1}
    for original, message in (
        (make_model(seed=1), "not the model that .* made from"),
        (pair[1], "itself a conversion"),
    ):
        with pytest.raises(InputError, match=message):
            evaluate(str(original), str(pair[1]), EvaluationConfig(**options), progress=False)
    with pytest.raises(InputError, match="itself a conversion"):
        evaluate(str(pair[1]), str(pair[0]), EvaluationConfig(**options), progress=False)


def test_changed_weights_are_told_from_the_converted_ones(pair: tuple[Path, Path], text_file: Path) -> None:
    edit_weights(pair[1], lambda tensors: tensors["model.norm.weight"].mul_(1.5))
    found = evaluate(*map(str, pair), EvaluationConfig(text=(str(text_file),), seq_len=64, windows=1), progress=False)
    assert found.provenance["fingerprint"] != fingerprint(read_recipe(pair[1]).files)


def test_values_that_overflow_are_no_result(make_model: MakeModel, text_file: Path) -> None:
    source = make_model()
    edit_weights(source, lambda tensors: tensors[UP].mul_(1e6))
    options: dict[str, Any] = {"text": (str(text_file),), "seq_len": 64, "windows": 1}
    assert math.isfinite(
        evaluate(str(source), str(source), EvaluationConfig(**options), progress=False).overall.original
    )
    with pytest.raises(InputError, match=r"layer 1 of the original gives infinite .* try the dtype float32"):
        evaluate(str(source), str(source), EvaluationConfig(dtype="float16", **options), progress=False)


def test_records_name_no_absolute_path(
    pair: tuple[Path, Path], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "test.txt").write_text("Numbers: " + " ".join(str(i * i) for i in range(200)))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    texts = [f"--text={text_file}", "--text", f"hf:{tmp_path}/data"]
    command = ["eval", *map(str, pair), *texts, f"--html={tmp_path}/a.html", "--seq-len", "64", "--token=hf_x", "-q"]
    assert CliRunner().invoke(main, command).exit_code == 0
    record = (pair[1] / EVALUATION).read_text()
    assert str(tmp_path) not in record + (tmp_path / "a.html").read_text() and "hf_x" not in record
    written = json.loads(record)["provenance"]["command"]
    assert written == "latentfold eval source1 out --text text.txt --text hf:data --seq-len 64 --html a.html --quiet"


def test_interrupted(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "sweep", interrupt)
    result = CliRunner().invoke(main, ["eval", *map(str, pair), "--seq-len", "64", "--quiet"])
    assert result.exit_code == 130 and "Interrupted" in result.stderr and "same command" not in result.stderr
    assert not (pair[1] / EVALUATION).exists()


def test_a_model_equals_itself(make_model: MakeModel, text_file: Path) -> None:
    source = str(make_model())
    found = evaluate(source, source, EvaluationConfig(text=(str(text_file),), seq_len=32, windows=2), progress=False)
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
    from latentfold.convert.text.documents import default_calibration

    lines = {line.strip() for line in bundled_novel().text.splitlines() if len(line.strip()) > 40}
    assert len(lines) > 1000
    for document in default_calibration():
        assert not lines & {line.strip() for line in document.text.splitlines()}
