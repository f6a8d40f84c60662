"""Original against converted: one sweep over both models, a layer of each in memory at a time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from latentfold.convert.config import DEFAULT_WINDOW
from latentfold.convert.errors import InputError
from latentfold.convert.files import public_name, replace_text
from latentfold.convert.model.devices import resolve_device
from latentfold.convert.model.shape import model_shape
from latentfold.convert.model.streamed import StreamedModel
from latentfold.convert.source.config import max_positions, read_config
from latentfold.convert.source.hub import download
from latentfold.convert.source.opening import open_checkpoint
from latentfold.convert.text.datasets import open_texts
from latentfold.convert.text.windows import Windows
from latentfold.convert.write.recipe import RECIPE, fingerprint_now
from latentfold.eval.cache import cache_by_context, cache_size
from latentfold.eval.inputs import NOVEL_FRONT_MATTER, _check_original, _recipe, _windows, _with_weights, bundled_novel
from latentfold.eval.options import DTYPES, _check_options
from latentfold.eval.provenance import provenance
from latentfold.eval.quality.continuations import PROMPTS, check_prompts
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
from latentfold.eval.quality.sweep import _sweep
from latentfold.eval.quality.tasks import check_tasks, run_tasks
from latentfold.eval.records import EVALUATION, Evaluation, TextResult
from latentfold.eval.speed import REPEATS, measure_speed

SHORTEST_CONTEXT = 512


def evaluate(
    original: str,
    converted: str,
    *,
    text: Sequence[str] = (),
    seq_len: int | None = None,
    windows: int = 4,
    skip: int | None = None,
    continuations: bool = False,
    prompts: Sequence[str] = (),
    speed: bool = False,
    contexts: Sequence[int] = (),
    batches: Sequence[int] = (1,),
    tasks: Sequence[str] = (),
    include_path: str | None = None,
    limit: int | None = None,
    batch_size: int = 1,
    device: str = "auto",
    dtype: str = "float32",
    seed: int = 0,
    revision: str | None = None,
    stream: bool = False,
    token: str | None = None,
    command: str | None = None,
    progress: bool = True,
) -> Evaluation:
    """Measure what a conversion cost.

    Args:
        original, converted: folders or Hub ids of two models with the same tokenizer.
        text: text or jsonl files, or data sets as `hf:DATASET[:CONFIG[:SPLIT]]`; default: the opening of a novel
            bundled for evaluation only.
        seq_len: tokens of a window, 4096 or what the models take by default; perplexity is reported by position.
        windows: windows of each text, at most.
        skip: tokens to pass over at the start of each text; default 0, and 1000 of the bundled novel.
        continuations: let both models continue `prompts` greedily (default: four bundled ones). Loads them whole.
        speed: time prefill and decoding over `contexts` (tokens; default 512 to the window length, doubling) and
            `batches` (sequences), in the dtype the models are stored in. Loads them whole.
        tasks: names of lm-evaluation-harness tasks; `include_path`: a folder with more of them; `limit`: samples of
            each, at most; `batch_size`: requests at a time. Loads the models whole.
        device, dtype: where and in what the models run.
        seed: of the random tokens that speed is measured with, and of the harness.
        revision: of the original, if it is a Hub id.
        stream: keep no copy of the original: fetch its shards when they are needed and delete them.
        token: Hub token.
        command: the command line to record, if any.
        progress: show progress on stderr.

    Raises:
        InputError: a model or text is missing, too short or given twice, the two models do not share a vocabulary,
            `converted` was made from another model, options contradict each other, or something asked for needs an
            extra that is not installed. All that before the first layer runs; afterwards only that a model gives
            infinite or undefined values.
    """
    _check_options(
        dtype=dtype,
        seq_len=seq_len,
        windows=windows,
        skip=skip,
        seed=seed,
        continuations=continuations,
        prompts=prompts,
        speed=speed,
        contexts=contexts,
        batches=batches,
        tasks=tasks,
        include_path=include_path,
        limit=limit,
        batch_size=batch_size,
        stream=stream,
    )
    torch_device, compute = resolve_device(device), DTYPES[dtype]
    if tasks:
        check_tasks(tasks, include_path)
    documents = open_texts(text, token=token) if text else [bundled_novel()]
    if twice := [name for name, count in Counter(document.text for document in documents).items() if count > 1]:
        names = [document.name for document in documents if document.text in twice]
        raise InputError(f"--text {', '.join(names)}: the same text, which would count twice; expected each once")
    skip = skip if skip is not None else (0 if text else NOVEL_FRONT_MATTER)
    a = open_checkpoint(original, revision=revision, token=token)
    b = open_checkpoint(converted, token=token)
    configs = [read_config(checkpoint) for checkpoint in (a, b)]
    limits = [max_positions(checkpoint) or DEFAULT_WINDOW for checkpoint in (a, b)]
    for option, length in (("--seq-len", seq_len), ("--contexts", max(contexts, default=None))):
        if length is not None and length > min(limits):
            name = (a, b)[limits.index(min(limits))].name
            raise InputError(f"{option} {length}: {name} takes at most {min(limits)} positions")
    length = seq_len or min(DEFAULT_WINDOW, *limits)
    a, b = (download(checkpoint, token=token, weights=False) for checkpoint in (a, b))
    windowed = _windows(a, b, documents, length, windows, skip)
    prompts = prompts or PROMPTS
    if continuations:
        check_prompts(a, b, prompts)
    if (a.folder / RECIPE).is_file():
        raise InputError(f"{a.name}: is itself a conversion; expected the model that {b.name} was made from")
    recipe = _recipe(b)
    a, b = _with_weights(a, token, stream), _with_weights(b, token)
    models = []
    for checkpoint, config in zip((a, b), configs, strict=True):
        models.append(StreamedModel(checkpoint, config, compute, torch_device))
        models[-1].check_headers(checkpoint.headers)
    if recipe:
        _check_original(a.name, b.name, models, recipe)
    scores, layers = _sweep(models[0], models[1], torch.cat([w.tokens for w in windowed]), recipe, progress)
    parts = scores.split([len(w.tokens) for w in windowed])
    texts = tuple(
        _text_result(document.name, w, part, skip) for document, w, part in zip(documents, windowed, parts, strict=True)
    )
    caches = []
    for model, checkpoint in zip(models, (a, b), strict=True):
        stored = StreamedModel(checkpoint, model.config, checkpoint.dtype, torch_device)
        caches.append(cache_size(stored, model_shape(model.config), windowed[0].tokens[:1]))
    record = provenance(command=command, dtype=dtype, device=torch_device, seed=seed) | {
        "revisions": {"original": a.revision, "converted": b.revision},
        "fingerprint": fingerprint_now(b.folder, recipe) if recipe else None,
    }
    written = timed = scored = None
    if continuations:
        written = continue_prompts(a, b, prompts, dtype=compute, device=torch_device)
    if speed:
        timed = measure_speed(
            a,
            b,
            contexts=contexts or doubling(SHORTEST_CONTEXT, length),
            batches=batches,
            dtype=b.dtype,
            device=torch_device,
            seed=seed,
            progress=progress,
        )
        record["speed"] = {"dtype": str(b.dtype).removeprefix("torch."), "attention": "sdpa", "repeats": REPEATS}
    if tasks:
        scored = run_tasks(
            a,
            b,
            tasks,
            include_path=include_path,
            limit=limit,
            batch_size=batch_size,
            dtype=compute,
            device=torch_device,
            seed=seed,
        )
        record["tasks"] = {"limit": limit, "lm_eval": version("lm_eval")}
    return Evaluation(
        original=public_name(a.name),
        converted=public_name(b.name),
        texts=texts,
        overall=macro_nll([result.overall for result in texts]),
        agreement=macro_agreement([result.agreement for result in texts]),
        layers=layers,
        cache_original=caches[0],
        cache_converted=caches[1],
        cache_by_context=cache_by_context(configs[0], configs[1], (a.dtype, b.dtype), doubling(256, min(limits))),
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


def save(evaluation: Evaluation, folder: Path) -> Path | None:
    """Leave an evaluation in the folder of the conversion it speaks of, for its card; None where there is none."""
    if not (folder / RECIPE).is_file():
        return None
    path = folder / EVALUATION
    replace_text(path, json.dumps(evaluation.to_dict(), indent=2) + "\n")
    return path
