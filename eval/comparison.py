"""Original against converted: one sweep over both models, a layer of each in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from latentfold.convert.dtypes import dtype_name
from latentfold.convert.files import public_name, replace_text
from latentfold.convert.model.shape import model_shape
from latentfold.convert.model.streamed import StreamedModel
from latentfold.convert.progress import Progress, shown
from latentfold.convert.text.windows import Windows
from latentfold.convert.write.recipe import RECIPE, fingerprint_now
from latentfold.eval.cache import cache_by_context, cache_size
from latentfold.eval.inputs import prepare
from latentfold.eval.options import EvaluationConfig
from latentfold.eval.provenance import provenance
from latentfold.eval.quality.continuations import PROMPTS
from latentfold.eval.quality.continuations import continuations as continue_prompts
from latentfold.eval.quality.predictions import (
    TokenScores,
    agreement,
    curve,
    macro_agreement,
    macro_nll,
    nll,
    position_buckets,
)
from latentfold.eval.quality.sweep import sweep
from latentfold.eval.quality.tasks import run_tasks
from latentfold.eval.records import EVALUATION, Evaluation, TextResult
from latentfold.eval.speed import REPEATS, measure_speed

SHORTEST_CONTEXT = 512


def evaluate(
    original: str,
    converted: str,
    config: EvaluationConfig | None = None,
    *,
    progress: bool | Progress = True,
    command: str | None = None,
    notify: Callable[[str], None] | None = None,
) -> Evaluation:
    """Measure what a conversion cost.

    Args:
        original, converted: folders or Hub ids of two models with the same tokenizer.
        config: what to measure, and on what.
        progress: show bars, or tell a function of your own.
        command: the command line to record, if any.
        notify: hears, before the first layer runs, what the user should know: of texts shorter than a window.

    Raises:
        InputError: a model or text is missing, too short or given twice, the two models do not share a vocabulary,
            `converted` was made from another model, or something asked for needs an extra that is not installed. All
            that before the first layer runs; afterwards only that a model gives infinite or undefined values.

    Example:
        >>> evaluate("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-mla", EvaluationConfig(windows=2)).overall.gap
    """
    config = config or EvaluationConfig()
    job = prepare(original, converted, config)
    if notify:
        for notice in job.notices:
            notify(notice)
    tell = shown(progress)
    a, b = job.original, job.converted
    scores, layers = sweep(a.model, b.model, [w.tokens for w in job.windows], job.recipe, tell)
    texts = tuple(
        _text_result(document.name, windows, part, job.skip)
        for document, windows, part in zip(job.documents, job.windows, scores, strict=True)
    )
    caches = []
    for side in (a, b):
        stored = StreamedModel(side.checkpoint, side.model.config, side.checkpoint.dtype, side.model.device)
        caches.append(cache_size(stored, model_shape(side.model.config), job.windows[0].tokens[:1]))
    record = provenance(command=command, dtype=config.dtype, device=a.model.device, seed=config.seed) | {
        "revisions": {"original": a.checkpoint.revision, "converted": b.checkpoint.revision},
        "fingerprint": fingerprint_now(b.checkpoint.folder, job.recipe) if job.recipe else None,
    }
    tokens, seconds = job.recipe.trained if job.recipe else (0, 0.0)
    if tokens:
        record["healed"] = {"tokens": tokens, "minutes": seconds / 60}
    pair = (a.checkpoint, b.checkpoint)
    how: dict[str, Any] = {"dtype": a.model.dtype, "device": a.model.device}
    written = timed = scored = None
    if config.continuations:
        written = continue_prompts(*pair, config.prompts or PROMPTS, **how)
    if config.speed:
        stored_dtype = b.checkpoint.dtype
        timed = measure_speed(
            *pair,
            contexts=config.contexts or doubling(SHORTEST_CONTEXT, job.length),
            batches=config.batches,
            dtype=stored_dtype,
            device=a.model.device,
            seed=config.seed,
            progress=tell,
        )
        record["speed"] = {"dtype": dtype_name(stored_dtype), "attention": "sdpa", "repeats": REPEATS}
    if config.tasks:
        scored = run_tasks(
            *pair,
            config.tasks,
            include_path=config.include_path,
            limit=config.limit,
            batch_size=config.batch_size,
            seed=config.seed,
            **how,
        )
        record["tasks"] = {"limit": config.limit, "lm_eval": version("lm_eval")}
    contexts = doubling(256, job.longest)
    return Evaluation(
        original=public_name(a.checkpoint.name),
        converted=public_name(b.checkpoint.name),
        texts=texts,
        overall=macro_nll([result.overall for result in texts]),
        agreement=macro_agreement([result.agreement for result in texts]),
        layers=layers,
        cache_original=caches[0],
        cache_converted=caches[1],
        cache_by_context=cache_by_context(
            a.model.config, b.model.config, (a.checkpoint.dtype, b.checkpoint.dtype), contexts
        ),
        continuations=written,
        speed=timed,
        tasks=scored,
        provenance=record,
    )


def doubling(first: int, last: int) -> list[int]:
    """first, 2 first, 4 first, ... and `last`."""
    lengths = [min(first, last)]
    while 2 * lengths[-1] <= last:
        lengths.append(2 * lengths[-1])
    return lengths if lengths[-1] == last else [*lengths, last]


def _text_result(name: str, windows: Windows, scores: TokenScores, skip: int) -> TextResult:
    count, length = windows.tokens.shape
    return TextResult(
        name=public_name(name),
        sha256=windows.sha256,
        windows=count,
        window_length=length,
        skipped_tokens=skip,
        overall=nll(scores, 0, length - 1),
        by_position=tuple(nll(scores, start, end) for start, end in position_buckets(length - 1)),
        curve=curve(scores),
        agreement=agreement(scores),
    )


def save_evaluation(evaluation: Evaluation, folder: str | Path) -> Path | None:
    """Leave an evaluation in the folder of the conversion it speaks of, for its card; None where there is none."""
    folder = Path(folder)
    if not (folder / RECIPE).is_file():
        return None
    path = folder / EVALUATION
    replace_text(path, json.dumps(evaluation.to_dict(), indent=2) + "\n")
    return path
