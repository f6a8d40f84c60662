"""The model card: what it says, and what it leaves alone."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from huggingface_hub import ModelCard, constants

from latentfold.convert import InputError, LayerSize, convert_checkpoint
from latentfold.convert.cli import main
from latentfold.convert.formats import growth
from latentfold.convert.plan.config import ConversionConfig
from latentfold.convert.publish.card import (
    BEGIN,
    END,
    FIGURES,
    HEALING,
    convert_command,
    heal_command,
    render_card,
    write_card,
)
from latentfold.convert.publish.files import check_files, files_to_push
from latentfold.convert.targets.registry import TARGETS
from latentfold.convert.write.recipe import RECIPE, Change, HealingPoint, Recipe, fingerprint
from latentfold.eval.records import EVALUATION, Evaluation
from tests import recipes
from tests.conftest import MakeModel
from tests.evaluations import bare_evaluation, full_evaluation, healed_evaluation, text_result
from tests.hub_server import HubServer
from tests.recipes import recipe_of


def metadata(text: str) -> dict[str, Any]:
    return yaml.safe_load(text.split("---\n")[1])


@pytest.mark.hub
def test_the_hub_and_its_client_accept_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = (text_result(), text_result("notes | of: mine.txt", gap=0.2))
    with HubServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        for evaluation in (None, full_evaluation(texts=texts), bare_evaluation()):
            text = render_card(recipe_of(), evaluation, None)
            card = ModelCard(text)
            card.validate()
            assert str(card) == text
            assert len(card.data.get("eval_results", [])) == {None: 0, 2: 7, 1: 2}[evaluation and len(evaluation.texts)]
        with pytest.raises(ValueError, match="license"):
            ModelCard(render_card(recipe_of(license="Not An Id"), None, None)).validate()
        assert len(server.requests_for("POST", "/api/validate-yaml")) == 4


def test_metadata_follow_from_source_and_evaluation() -> None:
    evaluation = full_evaluation()
    found = metadata(render_card(recipe_of(), evaluation, None))
    results = found.pop("model-index")[0]["results"]
    assert found == {
        "base_model": "org/Small-Model",
        "license": "apache-2.0",
        "language": ["en", "de"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["latentfold", "mla", "multi-head-latent-attention", "kv-cache"],
    }
    values = {(r["dataset"]["type"], m["type"]): m["value"] for r in results for m in r["metrics"]}
    assert values["persuasion-1817-bundled", "nll-gap"] == pytest.approx(evaluation.overall.gap, abs=1e-4)
    assert values["arc_easy", "acc_norm"] == 0.4263
    unknown = metadata(render_card(recipe_of(name="./small", revision=None, license=None, language=None), None, None))
    assert not {"base_model", "license", "language", "model-index"} & set(unknown)


def test_what_the_user_wrote_stays() -> None:
    mine = (
        "---\nlicense: mit\nmy_key: 1\ntags:\n- mine\nbase_model: other/model\n---\n"
        f"# My title\n\nBefore.\n\n{BEGIN}\nold\n{END}\n\nAfter.\n"
    )
    text = render_card(recipe_of(), full_evaluation(), mine)
    assert "\n# My title\n\nBefore.\n\n" + BEGIN in text and text.endswith(END + "\n\nAfter.\n")
    assert "\nold\n" not in text
    found = metadata(text)
    assert found["my_key"] == 1 and found["tags"][:2] == ["mine", "latentfold"]
    assert found["license"] == "apache-2.0" and found["base_model"] == "org/Small-Model"
    assert render_card(recipe_of(), full_evaluation(), text) == text
    unmeasured = render_card(recipe_of(), None, text)
    assert "Not measured" in unmeasured and "model-index" not in unmeasured and "perplexity" not in unmeasured
    assert metadata(render_card(recipe_of(license=None), None, mine))["license"] == "mit"


@pytest.mark.parametrize("existing", ["", "# Mine\n", "---\ntitle: x\n---\n# Mine\n", "Mine, no line end"])
def test_a_card_without_markers_gets_them_at_its_end(existing: str) -> None:
    text = render_card(recipe_of(), full_evaluation(), existing)
    assert text.count(BEGIN) == text.count(END) == 1 and text.endswith(END + "\n")
    assert text.index("Mine" if existing else BEGIN) <= text.index(BEGIN)
    assert render_card(recipe_of(), full_evaluation(), text) == text


@pytest.mark.parametrize(
    ("existing", "message"),
    [
        (f"{BEGIN}\nno end", "expected one"),
        (f"{END}\n{BEGIN}\n", "expected one"),
        (f"{BEGIN}{END}{BEGIN}{END}", "expected one"),
        ("---\na: [\n---\n", "not a YAML mapping"),
        ("---\n- a\n---\n", "not a YAML mapping"),
    ],
)
def test_a_damaged_card_is_left_alone(existing: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        render_card(recipe_of(), None, existing)


def test_measured_texts_that_would_damage_a_card() -> None:
    """A prompt that is a marker, a file's name of broken bytes."""
    found = full_evaluation()
    assert found.continuations
    marked = replace(found.continuations[0], prompt=f"{END} {BEGIN}", converted=END)
    hostile = replace(found, continuations=(marked,), texts=(replace(found.texts[0], name="a\udcff\n.txt"),))
    text = render_card(recipe_of(), hostile, None)
    assert text.encode() and render_card(recipe_of(), hostile, text) == text
    assert metadata(text)["model-index"][0]["results"][0]["dataset"]["name"] == "a\N{REPLACEMENT CHARACTER} .txt"


def test_cards_in_other_encodings(make_model: MakeModel, tmp_path: Path, options: dict[str, Any]) -> None:
    source, out = make_model(), tmp_path / "out"
    convert_checkpoint(str(source), str(out), kv_rank=8, rope_dim=4, **options)
    (out / "README.md").write_bytes("\ufeff---\nlicense: mit\n---\n# Mine\n".encode())
    text = write_card(out)
    assert metadata(text)["license"] == "mit" and text.count("license: mit") == 1 and "# Mine" in text
    (out / "README.md").write_bytes("café".encode("latin-1"))
    refused = CliRunner().invoke(main, ["card", str(out)])
    assert refused.exit_code == 2 and "README.md: not UTF-8 text (byte 3)" in refused.stderr
    assert (out / "README.md").read_bytes() == b"caf\xe9"
    (out / "README.md").unlink()
    (out / "README.md").mkdir()
    for name in (str(out), "x" * 5000):  # what the system refuses is one line, too
        refused = CliRunner().invoke(main, ["card", name])
        assert refused.exit_code == 2 and refused.stderr.startswith("Error: ") and refused.stderr.count("\n") == 1
    assert not list(out.glob("*.tmp"))


BIASED = {"target": "deepseek", "engine": "transformers"}
NATIVE = {"target": "native", "engine": "transformers", "dtype": "float16"}


def with_options(**options: Any) -> Recipe:
    return replace(recipes.RECIPE, options=replace(recipes.RECIPE.options, **options))


@pytest.mark.parametrize("target", [{}, BIASED, NATIVE], ids=["stock", "biased", "native"])
def test_the_command_is_the_one_that_was_run(
    target: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("my texts.txt", "more.jsonl"):
        Path(name).touch()
    found = with_options(calibration=("/home/me/my texts.txt", "more.jsonl"), device="cuda:1", **target)
    words = shlex.split(convert_command(found))
    assert words[:2] == ["latentfold", "convert"]
    parsed = main.commands["convert"].make_context("convert", words[2:]).params
    options = asdict(found.options)
    del options["queries"]  # no option of the command, and as it would be
    assert {name: parsed[name] for name in options} == options | {"calibration": ("my texts.txt", "more.jsonl")}
    assert (parsed["model"], parsed["revision"]) == ("org/Small-Model", recipes.RECIPE.source.revision)
    local = render_card(recipe_of(name="/home/me/models/small", revision=None), None, None)
    assert "latentfold convert small OUT" in local and "/home/me" not in local


OTHER: dict[str, Any] = {
    "kv_rank": 80,
    "rope_dim": 16,
    "calibration": ("other.txt",),
    "calibration_tokens": 4096,
    "seq_len": 1024,
    "queries": 64,
    "seed": 8,
    "device": "cuda",
    "target": "native",
    "engine": "transformers",
    "dtype": "float32",
    "max_shard_size": "1GB",
}
"""Another value of every option that the result depends on."""


def test_every_option_that_matters_is_in_the_command() -> None:
    matters = {field.name for field in fields(ConversionConfig)}
    matters -= {"output", "token", "stream", "overwrite"}  # nothing in the result depends on them
    matters -= {"cache_values", "cache_ratio"}  # kv_rank and rope_dim by then
    assert matters == {"source", "revision", "sizes", *OTHER}, "a new option: must the command have it?"
    usual = convert_command(recipes.RECIPE)
    for name, value in OTHER.items():
        command = convert_command(with_options(**{name: value}))
        shown = value[0] if isinstance(value, tuple) else str(value)
        assert shown in command and command != usual, name
    assert "cache-" not in convert_command(with_options(cache_values=128)) + usual
    assert "other" in convert_command(recipe_of(revision="other"))


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((LayerSize(96, 32), None, None, LayerSize(64, 32)), {"kv_rank": None, "rope_dim": None, **NATIVE}),
        ((LayerSize(96, 32),) * 4, {"queries": 64, "calibration": ()}),
    ],
    ids=["sizes that differ", "queries"],
)
def test_what_the_command_has_no_option_for_is_repeated_from_python(
    sizes: tuple[LayerSize | None, ...], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = replace(with_options(**options), sizes=sizes, layers=recipes.RECIPE.layers[:4])
    calls: list[ConversionConfig] = []
    monkeypatch.setattr("latentfold.convert.api.prepare", calls.append)
    monkeypatch.setattr("latentfold.convert.api.run", lambda *_: None)
    exec(convert_command(found), {})
    (config,) = calls
    assert (config.source, config.revision) == (found.source.name, found.source.revision)
    asked = {name: getattr(config, name) for name in OTHER}
    recorded = {name: getattr(found.options, name) for name in OTHER}
    assert asked == recorded | {"calibration": tuple(Path(name).name for name in found.options.calibration)}
    assert config.sizes == (None if found.size else sizes)
    card = render_card(found, None, None)
    assert "```python\nfrom latentfold.convert import" in card and "The call above makes" in card


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_says_how_it_is_loaded(name: str) -> None:
    """In a text of its own, beside it; and what the card says of the class is what the registry knows of it."""
    own = resources.files("latentfold.convert.targets").joinpath(name, "loading.md.j2").read_text(encoding="utf-8")
    card = render_card(with_options(target=name, engine="any"), None, None)
    assert own.splitlines()[-2 if "{%" in own else -1] in card
    entry = TARGETS[name]
    assert f"is a `{entry.architecture}` in bfloat16" in card
    assert ("trust_remote_code=True" in card) is entry.remote_code
    assert ("float16 cannot hold" in card) is ("float16" not in entry.dtypes)
    assert re.search(r"\n\n## Load it\n\n```python\n.*\n```\n\n\S.*[^\n]\n\n## How it was made\n", card, re.DOTALL)


def test_biases_are_warned_of() -> None:
    assert "drop in silence" in render_card(with_options(**BIASED), None, None)


def test_growth_is_explained() -> None:
    grown = "28.3 M more for the output head, which the original shares with its embedding, 3.9 M more for attention"
    assert f"(134,515,008 in the original; {grown}" in render_card(recipes.RECIPE, None, None)
    assert growth(134_515_008, 166_700_160, 0).startswith("32.2 M more for attention")
    assert growth(100, 90, 0) == growth(100, 100, 0) == growth(100, 99, 5) == ""
    smaller = replace(recipes.RECIPE, parameters=Change(134515008, 130000000), untied_parameters=0)
    assert "(134,515,008 in the original); it needs no remote code" in render_card(smaller, None, None)


def write_evaluation(folder: Path, evaluation: Evaluation) -> None:
    """Leave an evaluation beside a checkpoint as one of its weights."""
    found = json.loads((folder / RECIPE).read_text())
    provenance = evaluation.provenance | {"fingerprint": fingerprint(found["files"])}
    (folder / EVALUATION).write_text(json.dumps(replace(evaluation, provenance=provenance).to_dict()))


def test_a_converted_folder(make_model: MakeModel, tmp_path: Path, options: dict[str, Any]) -> None:
    source, out = make_model(), tmp_path / "out"
    (source / "README.md").write_text(
        "---\nlicense: other\nlicense_name: mine\nlicense_link: LICENSE\n---\n# Original\n"
    )
    (source / "LICENSE").write_text("Do as you like.")
    convert_checkpoint(str(source), str(out), kv_rank=8, rope_dim=4, **options)
    assert (out / "LICENSE").read_text() == "Do as you like."
    assert json.loads((out / RECIPE).read_text())["source"]["license_name"] == "mine"

    printed = CliRunner().invoke(main, ["card", str(out), "--stdout"])
    assert printed.exit_code == 0, printed.stderr
    assert not (out / "README.md").exists()
    written = CliRunner().invoke(main, ["card", str(out)])
    assert written.stdout == f"{out / 'README.md'}\n"
    text = (out / "README.md").read_text()
    assert text == printed.stdout and "Not measured" in text and metadata(text)["license_link"] == "LICENSE"
    assert not (out / "figures").exists()

    write_evaluation(out, full_evaluation())
    write_card(out)
    before = {path.name: path.read_bytes() for path in [out / "README.md", *(out / "figures").iterdir()]}
    assert {f"figures/{name}" for name in before if name != "README.md"} == set(FIGURES)
    assert all(f"]({name})" in (out / "README.md").read_text() for name in FIGURES)
    assert all(content.startswith(b"\x89PNG") for name, content in before.items() if name != "README.md")
    write_card(out)
    assert {path.name: path.read_bytes() for path in [out / "README.md", *(out / "figures").iterdir()]} == before

    stale = full_evaluation()
    (out / EVALUATION).write_text(json.dumps(stale.to_dict()))
    assert "Not measured" in write_card(out)
    assert list((out / "figures").iterdir()) == []


def test_not_a_converted_folder(tmp_path: Path) -> None:
    for folder, message in ((tmp_path, "no latentfold.json"), (tmp_path / "gone", "no such folder")):
        result = CliRunner().invoke(main, ["card", str(folder)])
        assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_healed_model_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was trained, what held-out text said of it, and the command; nothing claims that nothing was trained."""
    curve = (HealingPoint(0, 0, 0.0, 0.4, 3.5), HealingPoint(20, 20480, 100.0, 0.2, 3.3))
    texts = ("/home/me/mine.txt",)
    record = replace(recipes.HEALING, texts=texts, minutes=None, dtype="float32", curve=curve, best=1)
    text = render_card(replace(recipes.RECIPE, healing=(record,)), None, None)
    assert "then trained on the original's predictions" in text and "Nothing was trained" not in text
    assert "| 20 (kept) | 1.7 | 20,480 | 0.2000 | 3.3000 |" in text and "without any training" not in text
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    words = shlex.split(heal_command(record))
    found = main.commands["heal"].make_context("heal", words[2:]).params
    assert {name: found[name] for name in ("steps", "train", "seq_len", "batch_tokens", "rate", "seed", "dtype")} == {
        "steps": 20,
        "train": "all",
        "seq_len": 1024,
        "batch_tokens": 2048,
        "rate": 1e-3,
        "seed": 7,
        "dtype": "float32",
    }
    assert found["text"] == ("mine.txt",) and "/home/me" not in text


def test_no_figure_of_a_healed_model_passes_for_a_conversions() -> None:
    """Introduction, tables, everything that was measured, and what the Hub lists."""
    healed = replace(recipes.RECIPE, healing=(recipes.HEALING,))
    text = render_card(healed, healed_evaluation(healed), None)
    assert "predictions for 8.3 minutes (below)" in text and "healed for 8.3 minutes: trained" in text
    assert "| perplexity, original ↓ | perplexity, healed 8.3 minutes ↓ |" in text
    assert "| task | metric | original | healed 8.3 minutes |" in text and "NLL converted" not in text
    assert metadata(text)["model-index"][0]["name"] == "Small-Model-MLA, healed 8.3 minutes"
    assert metadata(render_card(recipes.RECIPE, full_evaluation(), None))["model-index"][0]["name"] == "Small-Model-MLA"


def test_a_healing_that_gained_nothing_is_no_training() -> None:
    vain = replace(recipes.RECIPE, healing=(replace(recipes.HEALING, best=0),))
    text = render_card(vain, None, None)
    assert "without any training" in text and "gained nothing" in text and "Nothing was trained" in text
    assert "| 0 (kept) | 0.0 | 0 |" in text


def test_the_curve_is_a_picture_that_goes_along(tmp_path: Path) -> None:
    """Drawn with or without an evaluation, shown in the card, accepted by a push, gone where it speaks of nothing."""
    healed = replace(recipes.RECIPE, healing=(recipes.HEALING, recipes.HEALING), files={})
    (tmp_path / RECIPE).write_text(json.dumps(healed.to_dict()))
    text = write_card(tmp_path)
    assert f"]({HEALING})" in text and text.count("(kept)") == 2
    assert (tmp_path / HEALING).read_bytes().startswith(b"\x89PNG")
    check_files(tmp_path, healed)
    assert HEALING in files_to_push(tmp_path, healed)
    (tmp_path / RECIPE).write_text(json.dumps(replace(healed, healing=()).to_dict()))
    assert HEALING not in write_card(tmp_path) and not (tmp_path / HEALING).exists()
