"""The model card: what it says, and what it leaves alone."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from huggingface_hub import ModelCard, constants

from latentfold.convert import InputError, convert_checkpoint
from latentfold.convert.cli import main
from latentfold.convert.publish.card import BEGIN, END, FIGURES, convert_command, render_card, write_card
from latentfold.convert.write.recipe import RECIPE, fingerprint
from latentfold.eval.records import EVALUATION, Evaluation
from tests import recipes
from tests.conftest import MakeModel
from tests.evaluations import bare_evaluation, full_evaluation, text_result
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


def test_the_command_is_the_one_that_was_run() -> None:
    words = shlex.split(convert_command(recipe_of()))
    assert words[:2] == ["latentfold", "convert"]
    command = main.commands["convert"]
    found = command.make_context("convert", words[2:]).params
    options = asdict(recipes.RECIPE.options)
    options = {name: value for name, value in options.items() if name != "queries"}  # no option of the command
    assert {name: found[name] for name in options} == options | {"calibration": ("my texts.txt",)}
    assert (found["model"], found["revision"]) == ("org/Small-Model", recipes.RECIPE.source.revision)
    local = render_card(recipe_of(name="/home/me/models/small", revision=None), None, None)
    assert "latentfold convert small OUT" in local and "/home/me" not in local


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
