"""Healing tiny conversions: the loss by its definition, what is kept, what is refused, what an interruption costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from latentfold.convert import InputError, heal_checkpoint, read_recipe
from latentfold.convert.cli import main
from latentfold.convert.heal.models import Student, hidden_and_head
from latentfold.convert.heal.text import healing_text
from latentfold.convert.heal.train import Healer
from latentfold.convert.model import whole
from latentfold.convert.model.heads import ATTENTION
from latentfold.convert.publish.files import check_files
from latentfold.convert.source.opening import open_checkpoint
from latentfold.convert.targets.registry import TARGETS
from latentfold.convert.text.documents import Document
from latentfold.convert.verify.reloaded import check_probe
from latentfold.eval import EvaluationConfig, evaluate
from latentfold.eval.inputs import bundled_novel
from tests import healing
from tests.conftest import TEXT, MakeModel, load, random_tokens, tiny_tokenizer
from tests.families import save_family
from tests.healing import SHORT, converted

FAMILIES = {
    "llama": "deepseek",
    "qwen2": "deepseek",
    "llama, yarn, tied": "native",
    "qwen3": "native",
    "gemma2": "native",
    "gpt_neox": "native",
    "mixtral": "native",
}


@pytest.fixture
def text(tmp_path: Path) -> str:
    return healing.healing_text(tmp_path)


@pytest.mark.parametrize("name", FAMILIES)
def test_opened_and_closed_it_is_the_same_model(name: str, tmp_path: Path, options: dict[str, Any]) -> None:
    """Every trained tensor survives the way there and back, in every class."""
    target = FAMILIES[name]
    engine = {"engine": "transformers"} if name == "qwen2" else {}
    out = converted(save_family(tmp_path / "source", name), tmp_path / "out", options, target=target, **engine)
    checkpoint = open_checkpoint(out)
    model = whole.load(checkpoint, torch.float32, torch.device("cpu"), attn_implementation=ATTENTION)
    student = Student(model, TARGETS[target], "all")
    tokens = random_tokens(2)
    hidden, head = hidden_and_head(student.model)
    with torch.no_grad():
        expected = load(out)(tokens).logits
        found = head(hidden(tokens).flatten(0, 1)).view_as(expected)
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    before = load_file(out / "model.safetensors")
    stored = student.stored(torch.float32)
    layers = {key for key in before if ".layers." in key}
    assert set(stored) <= layers and layers - set(stored) <= {key for key in layers if ".q_a_" in key}
    for key, tensor in stored.items():
        assert tensor.shape == before[key].shape
        if "kv_a" not in key and "kv_b" not in key:
            assert torch.equal(tensor, before[key]), key


@pytest.mark.parametrize("name", FAMILIES)
def test_healing_brings_a_model_nearer(name: str, tmp_path: Path, options: dict[str, Any], text: str) -> None:
    source, target = save_family(tmp_path / "source", name), FAMILIES[name]
    engine = {"engine": "transformers"} if name == "qwen2" else {}
    out = converted(source, tmp_path / "out", options, target=target, **engine)
    healed = tmp_path / "healed"
    result = heal_checkpoint(str(out), str(healed), teacher=str(source), steps=24, rate=0.01, text=[text], **SHORT)
    record = result.recipe.healing[-1]
    assert record.curve[record.best].divergence < 0.9 * record.curve[0].divergence
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (out, healed))
    assert before == after and {path.name for path in out.iterdir()} == {path.name for path in healed.iterdir()}
    recipe = read_recipe(healed)
    assert recipe == result.recipe and recipe.source == read_recipe(out).source
    check_files(healed, recipe)
    check_probe(healed, recipe.check.probe, torch.device("cpu"))
    config = EvaluationConfig(text=(text,), seq_len=64, windows=2)
    gaps = [evaluate(str(source), str(folder), config, progress=False).agreement.kl for folder in (out, healed)]
    assert gaps[1] < 0.9 * gaps[0]


def test_never_worse_than_what_was_given(
    make_model: MakeModel, tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    """Far too large a step, and a conversion that is exact: the very same weights come back."""
    source = make_model(num_key_value_heads=1)
    exact = converted(source, tmp_path / "out", options, kv_rank=16, rope_dim=8, dtype="float32")
    for rate in (0.9, None):
        healed = tmp_path / f"healed{rate}"
        record = heal_checkpoint(
            str(exact), str(healed), teacher=str(source), steps=6, rate=rate, text=[text], **SHORT
        ).recipe.healing[-1]
        assert record.curve[record.best].divergence <= record.curve[0].divergence
        if rate:
            assert record.best == 0 and record.curve[-1].divergence > record.curve[0].divergence
            assert (healed / "model.safetensors").read_bytes() == (exact / "model.safetensors").read_bytes()


def test_a_healed_model_is_healed_further(
    make_model: MakeModel, tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    source = make_model()
    out = converted(source, tmp_path / "out", options)
    for step, train in enumerate(("attention", "norms")):
        healed = tmp_path / f"healed{step}"
        heal_checkpoint(
            str(out), str(healed), teacher=str(source), steps=8, rate=0.01, train=train, text=[text], **SHORT
        )
        out = healed
    records = read_recipe(out).healing
    assert [record.train for record in records] == ["attention", "norms"]
    assert records[1].curve[0].divergence == pytest.approx(records[0].curve[records[0].best].divergence, rel=1e-2)


def test_an_interrupted_healing_gives_the_same_weights(
    make_model: MakeModel, tmp_path: Path, options: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_model()
    out = converted(source, tmp_path / "out", options)
    command: Callable[..., Any] = lambda name: heal_checkpoint(  # noqa: E731
        str(out), str(tmp_path / name), teacher=str(source), steps=12, text=[text], **SHORT
    )
    whole = command("whole").recipe
    step = Healer._step

    def dying(self: Healer, *args: Any) -> None:
        if self.training.step == 7:
            raise KeyboardInterrupt
        step(self, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Healer, "_step", dying)
        command("healed")
    assert not (tmp_path / "healed" / "config.json").exists()
    resumed = command("healed").recipe
    assert resumed.files["model.safetensors"] == whole.files["model.safetensors"]
    assert [p.divergence for p in resumed.healing[0].curve] == [p.divergence for p in whole.healing[0].curve]


def test_held_out_text_is_never_trained_on() -> None:
    documents = [Document("a", TEXT * 6), Document("b", TEXT[:100]), Document("c", TEXT * 9)]
    found = healing_text(documents, tiny_tokenizer(), 32, 259)
    assert found.held.shape[1] == 32 and 2 <= len(found.held) <= 8
    assert sum(map(len, found.streams)) + 32 * len(found.held) == 15 * len(TEXT.encode()) + 100
    windows = found.windows(32, seed=3)
    seen = [next(windows) for _ in range(200)]
    later = found.windows(32, seed=3, begin=150)
    assert all(one.place == other.place for one, other in zip(seen[150:], later, strict=False))
    assert all(len(window.tokens) == 32 for window in seen)


def test_refusals(make_model: MakeModel, tmp_path: Path, options: dict[str, Any], text: str) -> None:
    source = make_model()
    out = converted(source, tmp_path / "out", options)
    novel = tmp_path / "novel.txt"
    novel.write_text("My own words.\n\n" + bundled_novel().text[30000:60000])
    tiny = tmp_path / "tiny.txt"
    tiny.write_text("Too short.")
    other = make_model(seed=5)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"teacher": str(other)}, "not the model that"),
        ({"teacher": None}, "was a folder that is not here; pass teacher"),
        ({"text": [str(novel)]}, "evaluation novel"),
        ({"text": [str(tiny)]}, "healing text is too short"),
        ({"steps": 3, "minutes": 1.0}, "expected one of minutes, steps and tokens"),
        ({"rate": 2.0}, "rate 2.0: expected a number between 0 and 1"),
        ({"seq_len": 512, "batch_tokens": 512}, "seq_len 512: .* at most 256 positions"),
        ({"batch_tokens": 32}, "batch_tokens 32: expected at least one window"),
        ({"converted": str(source)}, "no latentfold.json"),
    ]
    for changes, message in cases:
        asked = {"converted": str(out), "teacher": str(source), "text": [text], "steps": 2} | SHORT | changes
        with pytest.raises(InputError, match=message):
            heal_checkpoint(output=str(tmp_path / "healed"), **asked)
        assert not (tmp_path / "healed").exists()
    with pytest.raises(InputError, match="lies inside the source"):
        heal_checkpoint(str(out), str(out / "in"), teacher=str(source), steps=2, text=[text], **SHORT)


def test_the_command(make_model: MakeModel, tmp_path: Path, options: dict[str, Any], text: str) -> None:
    source = make_model()
    out, healed = converted(source, tmp_path / "out", options), tmp_path / "healed"
    command = ["heal", str(out), str(healed), "--teacher", str(source), "--text", text, "--seq-len", "64"]
    command += ["--batch-tokens", "64", "--tokens", "512", "--train", "attention"]
    for name, message in (
        ("curve.jpg", "expected a name that ends in .png or .svg"),
        ("no/curve.png", "does not exist"),
    ):
        refused = CliRunner().invoke(main, [*command, "--plot", str(tmp_path / name)])
        assert refused.exit_code == 2 and message in refused.stderr and refused.stderr.count("\n") == 1
    drawn = tmp_path / "curve.svg"
    done = CliRunner().invoke(main, [*command, "--plot", str(drawn)])
    assert drawn.read_bytes().startswith(b"<?xml")
    assert done.exit_code == 0, done.output
    assert "KL from original" in done.stdout and "kept" in done.stdout and "latentfold eval" in done.stderr
    again = CliRunner().invoke(main, command)
    assert again.exit_code == 2 and "not empty" in again.stderr
    data = json.loads(CliRunner().invoke(main, [*command, "--overwrite", "--json", "-q"]).stdout)
    assert data["curve"][-1]["step"] == 8 and data["train"] == "attention"
    both = CliRunner().invoke(main, [*command, "--minutes", "1", "--overwrite"])
    assert both.exit_code == 2 and "expected one of minutes, steps and tokens" in both.stderr
