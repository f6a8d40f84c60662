"""Both models on tasks of EleutherAI's lm-evaluation-harness."""

from __future__ import annotations

import os
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from transformers import set_seed

from latentfold.convert.errors import InputError
from latentfold.convert.model.whole import loaded
from latentfold.convert.source.checkpoint import Checkpoint
from latentfold.convert.source.tokenizer import load_tokenizer
from latentfold.eval.records import TaskScore

PACKAGES = ("lm_eval", "accelerate")
"""What running tasks needs beyond this package's own requirements."""


def run_tasks(
    original: Checkpoint,
    converted: Checkpoint,
    tasks: Sequence[str],
    *,
    include_path: str | None = None,
    limit: int | None = None,
    batch_size: int = 1,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> tuple[TaskScore, ...]:
    """Score both models, one in memory at a time, as plain transformers loads them, without a chat template.

    Args:
        tasks: names of tasks, groups or tags of the harness; `*` matches any part of a name.
        include_path: folder of further tasks, as the harness's own --include_path.
        limit: samples of each task, at most.
        batch_size: requests at a time.
        seed: of few-shot examples and of whatever a task draws.

    Returns:
        One score for each metric of each task, and of each group that aggregates its tasks.

    Raises:
        InputError: as `check_tasks`; `limit` or `batch_size` is below 1; the weights do not fit in memory.
    """
    if min(batch_size, 1 if limit is None else limit) < 1:
        raise InputError(f"tasks: limit {limit}, batch size {batch_size}: expected at least 1")
    harness_tasks = check_tasks(tasks, include_path)
    found = [_evaluate(each, harness_tasks, limit, batch_size, dtype, device, seed) for each in (original, converted)]
    return _scores(*found)


def check_tasks(tasks: Sequence[str], include_path: str | None = None) -> dict[str, Any]:
    """The harness's tasks of these names, with their data (downloaded where it is not in the local cache).

    Raises:
        InputError: the harness is not installed, a name is not known, data cannot be had, or a task runs code that the
            model writes.
    """
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        raise InputError(
            f"tasks need lm-evaluation-harness ({', '.join(missing)} missing); pip install 'lm-eval>=0.4.12' accelerate"
        )
    if include_path is not None and not os.path.isdir(include_path):
        raise InputError(f"include_path {include_path}: no such folder")
    manager = _index(include_path)
    names: dict[str, None] = {}
    for task in tasks:
        matches = manager.match_tasks([task])
        if not matches:
            close = ", ".join(get_close_matches(task, manager.all_tasks)) or "none; lm-eval ls tasks lists all"
            raise InputError(f"task {task}: not known to lm-evaluation-harness; close names: {close}")
        names |= dict.fromkeys(matches)
    try:
        found: dict[str, Any] = manager.load(list(names))
    except Exception as error:  # a task is code and data of its own, which raise whatever they meet
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(f"task {', '.join(tasks)}: cannot be loaded ({type(error).__name__}: {reason})") from error
    unsafe = [name for name, task in found["tasks"].items() if getattr(task, "UNSAFE_CODE", False)]
    if unsafe:
        raise InputError(f"task {', '.join(unsafe)}: runs code that the model writes; expected tasks that do not")
    return found


@cache
def _index(include_path: str | None) -> Any:
    """The harness's index of task names, which takes it many seconds to make."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path)


def _evaluate(
    checkpoint: Checkpoint,
    tasks: dict[str, Any],
    limit: int | None,
    batch_size: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> dict[str, Any]:
    """The harness's results for one model."""
    from lm_eval import evaluate
    from lm_eval.models.huggingface import HFLM

    set_seed(seed)
    for task in tasks["tasks"].values():
        task.set_fewshot_seed(seed)
    with loaded(checkpoint, dtype, device) as model:
        harness_model = HFLM(pretrained=model, tokenizer=load_tokenizer(checkpoint), batch_size=batch_size)
        return evaluate(lm=harness_model, task_dict=tasks, limit=limit, log_samples=False)


def _scores(original: dict[str, Any], converted: dict[str, Any]) -> tuple[TaskScore, ...]:
    """Pair the harness's results: {task: {"acc,none": ..., "acc_stderr,none": ..., "alias": ...}}."""
    scores = []
    for task, found in original["results"].items():
        for key, value in found.items():
            metric, _, filter_name = key.partition(",")
            if not filter_name or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = f"{metric}_stderr,{filter_name}"
            other = converted["results"][task]
            scores.append(
                TaskScore(
                    task=task,
                    metric=metric if filter_name == "none" else key,
                    higher_is_better=original["higher_is_better"].get(task, {}).get(metric),
                    samples=original["n-samples"].get(task, {}).get("effective"),
                    original=float(value),
                    original_standard_error=_number(found.get(error)),
                    converted=float(other[key]),
                    converted_standard_error=_number(other.get(error)),
                )
            )
    return tuple(scores)


def _number(value: Any) -> float | None:
    """A standard error; the harness says "N/A" where it has none."""
    return float(value) if isinstance(value, (int, float)) else None
