"""Original against converted: one sweep over both models, a layer of each in memory at a time."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from latentfold.convert.checkpoint import replace_text
from latentfold.convert.config import DEFAULT_WINDOW, resolve_device
from latentfold.convert.corpus import Document, Windows, leading_tokens, make_windows, tokenize
from latentfold.convert.errors import InputError
from latentfold.convert.layers import StreamedModel, attention_inputs, attention_of, watched_heads
from latentfold.convert.pipeline import load_tokenizer
from latentfold.convert.plan import read_config
from latentfold.convert.recipe import RECIPE, fingerprint_now, read_recipe
from latentfold.convert.shapes import model_shape
from latentfold.convert.source import Checkpoint, download, open_checkpoint, public_name
from latentfold.convert.stream import stream as streamed
from latentfold.eval.attention import AttentionErrors
from latentfold.eval.cache import cache_by_context, cache_size
from latentfold.eval.continuations import PROMPTS, check_prompts
from latentfold.eval.continuations import continuations as continue_prompts
from latentfold.eval.models import max_positions
from latentfold.eval.predictions import (
    TokenScores,
    agreement,
    curve,
    macro_agreement,
    macro_nll,
    nll,
    position_buckets,
    score_tokens,
)
from latentfold.eval.provenance import provenance
from latentfold.eval.records import EVALUATION, Evaluation, LayerError, TextResult
from latentfold.eval.speed import REPEATS, measure_speed
from latentfold.eval.tasks import check_tasks, run_tasks
from latentfold.eval.texts import open_texts

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHORTEST_CONTEXT = 512
EMBEDDINGS_COMPARED = 4096
"""Rows of the embedding that tell a conversion's original from another model."""
EMBEDDING_TOLERANCE = 0.02
"""Relative; rounding to bfloat16 makes 0.002."""
NOVEL = "Persuasion (1817), bundled"
NOVEL_FRONT_MATTER = 1000
"""Tokens of the bundled novel that are passed over: title, contents, first page."""


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


def _check_options(
    *,
    dtype: str,
    seq_len: int | None,
    windows: int,
    skip: int | None,
    seed: int,
    continuations: bool,
    prompts: Sequence[str],
    speed: bool,
    contexts: Sequence[int],
    batches: Sequence[int],
    tasks: Sequence[str],
    include_path: str | None,
    limit: int | None,
    batch_size: int,
    stream: bool,
) -> None:
    """Refuse options that mean nothing, alone or together.

    Raises:
        InputError: naming the option, what was expected and what was found.
    """
    if dtype not in DTYPES:
        raise InputError(f"--dtype {dtype}: expected {', '.join(DTYPES)}")
    if (seq_len is not None and seq_len < 16) or windows < 1 or (skip or 0) < 0:
        raise InputError(
            f"--seq-len {seq_len}, --windows {windows}, --skip {skip}: expected at least 16 tokens, 1 window, 0 skipped"
        )
    counts = {
        "--contexts": contexts,
        "--batches": batches,
        "--batch-size": [batch_size],
        "--limit": [] if limit is None else [limit],
    }
    for option, given in counts.items():
        for count in given:
            if not 1 <= count < 2**31:
                raise InputError(f"{option} {count}: expected {'at least 1' if count < 1 else 'less than 2^31'}")
    if not 0 <= seed < 2**32:
        raise InputError(f"--seed {seed}: expected 0 to 2^32 - 1")
    idle = {
        "--prompt is for --continuations": prompts and not continuations,
        "--contexts is for --speed": contexts and not speed,
        "--batches is for --speed": tuple(batches) != (1,) and not speed,
        "--include-path is for --tasks": include_path and not tasks,
        "--limit is for --tasks": limit is not None and not tasks,
        "--batch-size is for --tasks": batch_size != 1 and not tasks,
    }
    for message, ignored in idle.items():
        if ignored:
            raise InputError(message)
    if stream and (continuations or speed or tasks):
        raise InputError("--stream: continuations, speed and tasks need the whole original; leave it out")


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


def bundled_novel() -> Document:
    """The evaluation text that ships with the package."""
    path = resources.files("latentfold.eval") / "data" / "persuasion.txt"
    return Document(NOVEL, path.read_text(encoding="utf-8"))


def _with_weights(checkpoint: Checkpoint, token: str | None, stream: bool = False) -> Checkpoint:
    if stream:
        return streamed(checkpoint, token)
    checkpoint = download(checkpoint, token=token)
    checkpoint.read_headers()
    return checkpoint


def _windows(
    a: Checkpoint, b: Checkpoint, documents: Sequence[Document], length: int, count: int, skip: int
) -> list[Windows]:
    """Up to `count` windows of each document."""
    sizes = [model_shape(read_config(checkpoint)).vocab_size for checkpoint in (a, b)]
    if sizes[0] != sizes[1]:
        raise InputError(f"{a.name} has {sizes[0]} tokens, {b.name} {sizes[1]}; expected models with one vocabulary")
    tokenizer, other = load_tokenizer(a), load_tokenizer(b)
    samples = "".join(document.text[:2000] for document in documents)
    if leading_tokens(tokenizer) != leading_tokens(other) or not torch.equal(
        tokenize(tokenizer, samples), tokenize(other, samples)
    ):
        raise InputError(f"{a.name} and {b.name} tokenize the text differently; expected models with one tokenizer")
    return [
        make_windows(
            [document],
            tokenizer,
            length=length,
            count=count,
            purpose=f"{document.name}: evaluation",
            vocab_size=sizes[0],
            skip=skip,
        )
        for document in documents
    ]


def _recipe(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """What the conversion recorded, or None for a checkpoint without a record.

    Raises:
        InputError: there is a record, but not of this model.
    """
    path = checkpoint.folder / RECIPE
    if not path.is_file():
        return None
    recipe = read_recipe(checkpoint.folder)
    scale, layers = recipe.get("residual_scale"), recipe.get("layers")
    errors = [layer.get("output") if isinstance(layer, dict) else None for layer in layers or ()]
    complete = all(isinstance(number, (int, float)) for number in [scale, *errors])
    if not complete or len(errors) != model_shape(read_config(checkpoint)).num_layers:
        raise InputError(f"{path}: not the record of this conversion; convert again")
    return recipe


def _check_original(a: str, b: str, models: Sequence[StreamedModel], recipe: dict[str, Any]) -> None:
    """Refuse a model that `b` was not converted from: a card would call the difference the conversion's cost.

    A conversion leaves the embedding as it is, but for the residual scale and rounding.

    Raises:
        InputError: the embeddings differ.
    """
    expected, found = (model.tensor(model.embedding)[:EMBEDDINGS_COMPARED].double() for model in models)
    expected *= recipe["residual_scale"]
    if expected.shape != found.shape or not (found - expected).norm() <= EMBEDDING_TOLERANCE * expected.norm():
        raise InputError(
            f"{a}: not the model that {b} was made from (their embeddings differ); "
            f"expected {recipe['source'].get('name')}"
        )


def _layer(model: StreamedModel, index: int) -> AbstractContextManager[Any]:
    """A layer with its weights, or None past the last."""
    return model.layer(index) if index < model.num_layers else nullcontext()


@torch.no_grad()
def _sweep(
    a: StreamedModel, b: StreamedModel, tokens: Tensor, recipe: dict[str, Any] | None, progress: bool
) -> tuple[TokenScores, tuple[LayerError, ...] | None]:
    """Both models, layer by layer over all windows; then all predictions, a few logits at a time.

    Raises:
        InputError: a model gives infinite or undefined values.
    """
    streams = []
    kwargs = []
    for model in (a, b):
        began = [model.begin(row[None]) for row in tokens]
        streams.append([hidden for hidden, _ in began])
        kwargs.append(began[0][1])
    # attention outputs are comparable where both have the same layers and the residual scale is known
    scale = recipe["residual_scale"] if recipe and a.num_layers == b.num_layers else None
    layers: list[LayerError] = []
    with tqdm(
        total=(a.num_layers + b.num_layers) * tokens.numel(),
        desc="evaluating",
        unit="tok",
        unit_scale=True,
        disable=not progress,
    ) as bar:
        for index in range(max(a.num_layers, b.num_layers)):
            errors = AttentionErrors(scale) if scale is not None else None
            with _layer(a, index) as one, _layer(b, index) as other:
                for k in range(len(tokens)):
                    if one is not None and errors is None:
                        streams[0][k] = one(streams[0][k], **kwargs[0][index])
                    elif one is not None and errors is not None:
                        with watched_heads(attention_of(one)) as heads:
                            streams[0][k], x, output = attention_inputs(one, streams[0][k], kwargs[0][index])
                        errors.add(attention_of(other), x, kwargs[1][index], heads[0], output)
                    if other is not None:
                        streams[1][k] = other(streams[1][k], **kwargs[1][index])
                    for name, stream in (("original", streams[0]), ("converted model", streams[1])):
                        if not stream[k].isfinite().all():
                            raise InputError(
                                f"layer {index} of the {name} gives infinite or undefined values in {a.dtype}; "
                                "expected finite ones: try --dtype float32"
                            )
                    bar.update(tokens.shape[1] * ((one is not None) + (other is not None)))
            if errors is not None and recipe is not None:
                layers.append(errors.result(index, math.sqrt(recipe["layers"][index]["output"])))
    with a.head() as original_head, b.head() as converted_head:
        scores = score_tokens(tokens, streams[0], streams[1], original_head, converted_head)
    return scores, tuple(layers) if layers else None
