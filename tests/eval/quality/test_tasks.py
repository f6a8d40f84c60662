"""lm-evaluation-harness on both models, against likelihoods computed by hand; its own tasks are left out, for speed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.tasks import TaskManager

from latentfold.convert.errors import InputError
from latentfold.convert.source.opening import open_checkpoint
from latentfold.eval.quality import tasks
from latentfold.eval.quality.tasks import check_tasks, run_tasks
from tests.conftest import MakeModel, load, tiny_tokenizer

COMPUTE: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
CHOICES = ["yes", "nay", "any"]
DOCUMENTS: list[dict[str, Any]] = [
    {"question": f"Is {i} times {i} odd?", "choices": CHOICES, "answer": i % 3} for i in range(12)
]
CHOICE_TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
PERPLEXITY_TASK = """
task: tiny_perplexity
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list:
  - {metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
"""
GROUP = """
group: tiny_group
task: [tiny_choice]
aggregate_metric_list:
  - {metric: acc, aggregation: mean, weight_by_size: true}
"""


@pytest.fixture(autouse=True)
def only_own_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    tasks._index.cache_clear()
    yield
    tasks._index.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder of tasks, as --include-path takes it."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "documents.jsonl").write_text("".join(json.dumps(each) + "\n" for each in DOCUMENTS))
    for name, text in (("choice", CHOICE_TASK), ("perplexity", PERPLEXITY_TASK), ("group", GROUP)):
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(folder / "documents.jsonl")))
    return str(folder)


def log_likelihood(model: Any, context: str, text: str) -> float:
    """Of `text` after `context`, in nats."""
    before, after = (tiny_tokenizer()(part)["input_ids"] for part in (context, text))
    with torch.no_grad():
        logs = model(torch.tensor([before + after])).logits[0].log_softmax(-1)
    return sum(float(logs[len(before) - 1 + i, token]) for i, token in enumerate(after))


def test_scores_are_those_of_likelihoods_by_hand(make_model: MakeModel, folder: str) -> None:
    pair = [make_model(), make_model(seed=1)]
    found = run_tasks(*map(open_checkpoint, pair), ["tiny_[gp]*"], include_path=folder, batch_size=4, **COMPUTE)
    scores = {(score.task, score.metric): score for score in found}
    assert scores.keys() == {
        ("tiny_choice", "acc"),
        ("tiny_group", "acc"),
        ("tiny_perplexity", "byte_perplexity"),
    }
    right, perplexity = [], []
    for path in pair:
        model = load(path)
        likelihoods = [[log_likelihood(model, each["question"], f" {c}") for c in CHOICES] for each in DOCUMENTS]
        best = torch.tensor(likelihoods).argmax(-1)
        right.append((best == torch.tensor([each["answer"] for each in DOCUMENTS])).double())
        # the harness begins a text with the beginning-of-text token
        total = sum(log_likelihood(model, "<s>", each["question"]) for each in DOCUMENTS)
        size = sum(len(each["question"].encode()) for each in DOCUMENTS)
        perplexity.append(torch.tensor(-total / size).exp().item())
    choice = scores["tiny_choice", "acc"]
    assert (choice.original, choice.converted) == (right[0].mean(), right[1].mean())
    assert choice.original != choice.converted
    for error, each in zip((choice.original_standard_error, choice.converted_standard_error), right, strict=True):
        assert error == pytest.approx(float(each.std() / len(each) ** 0.5))
    assert choice.higher_is_better is True and choice.samples == len(DOCUMENTS)
    group = scores["tiny_group", "acc"]
    assert (group.original, group.converted) == (choice.original, choice.converted)
    rolling = scores["tiny_perplexity", "byte_perplexity"]
    assert [rolling.original, rolling.converted] == pytest.approx(perplexity, rel=1e-4)
    assert rolling.higher_is_better is False


def test_limit(make_model: MakeModel, folder: str) -> None:
    checkpoint = open_checkpoint(make_model())
    (found,) = run_tasks(checkpoint, checkpoint, ["tiny_choice"], include_path=folder, limit=5, **COMPUTE)
    assert found.samples == 5 and found.original == found.converted
    with pytest.raises(InputError, match="limit 0"):
        run_tasks(checkpoint, checkpoint, ["tiny_choice"], include_path=folder, limit=0, **COMPUTE)


def test_refusals_come_before_a_model_loads(
    make_model: MakeModel, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(make_model())
    monkeypatch.setattr(tasks, "loaded", lambda *_: pytest.fail("loaded"))
    with pytest.raises(InputError, match=r"task tiny_choise: not known.*close names: tiny_choice"):
        run_tasks(checkpoint, checkpoint, ["tiny_choice", "tiny_choise"], include_path=folder, **COMPUTE)


def test_data_that_is_not_there(folder: str) -> None:
    (Path(folder) / "documents.jsonl").unlink()
    with pytest.raises(InputError, match=r"task tiny_choice: cannot be loaded \(FileNotFoundError"):
        check_tasks(["tiny_choice"], folder)
    path = Path(folder) / "choice.yaml"
    path.write_text(path.read_text().replace("dataset_path: json", "dataset_path: org/none"))
    with pytest.raises(InputError, match="task tiny_choice: cannot be loaded"):
        check_tasks(["tiny_choice"], folder)


def test_tasks_that_run_code_are_refused(folder: str) -> None:
    path = Path(folder) / "choice.yaml"
    path.write_text(path.read_text() + "unsafe_code: true\n")
    with pytest.raises(InputError, match="task tiny_choice: runs code"):
        check_tasks(["tiny_group"], folder)


def test_missing_folder_and_missing_packages(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"include_path .*: no such folder"):
        check_tasks(["tiny_choice"], folder + "x")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(InputError, match=r"\(lm_eval missing\); pip install 'lm-eval"):
        check_tasks(["tiny_choice"], folder)
