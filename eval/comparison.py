"""Original against converted: one sweep over both models, a layer of each in memory at a time."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from importlib import resources
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from latentfold.convert.config import DEFAULT_WINDOW, resolve_device
from latentfold.convert.corpus import Document, Windows, make_windows, read_documents, tokenize
from latentfold.convert.errors import InputError
from latentfold.convert.layers import StreamedModel, attention_inputs
from latentfold.convert.pipeline import load_tokenizer
from latentfold.convert.plan import read_config
from latentfold.convert.recipe import RECIPE
from latentfold.convert.shapes import model_shape
from latentfold.convert.source import Checkpoint, download, open_checkpoint, read_json
from latentfold.eval.cache import cache_size
from latentfold.eval.predictions import TokenScores, agreement, nll, position_buckets, score_tokens
from latentfold.eval.records import Evaluation, LayerError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
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
    device: str = "auto",
    dtype: str = "float32",
    revision: str | None = None,
    token: str | None = None,
    progress: bool = True,
) -> Evaluation:
    """Measure what a conversion cost.

    Args:
        original, converted: folders or Hub ids of two models with the same tokenizer.
        text: text or jsonl files; default: the opening of a novel bundled for evaluation only.
        seq_len: tokens of a window, 4096 or what the models take by default; perplexity is reported by position.
        windows: windows to evaluate, at most.
        skip: tokens to pass over at the start of each text; default 0, and 1000 of the bundled novel.
        device, dtype: where and in what the models run.
        revision: of the original, if it is a Hub id.
        token: Hub token.
        progress: show progress on stderr.

    Raises:
        InputError: a model or text is missing, too short, or the two models do not share a vocabulary.
    """
    if dtype not in DTYPES:
        raise InputError(f"--dtype {dtype}: expected {', '.join(DTYPES)}")
    if (seq_len is not None and seq_len < 16) or windows < 1 or (skip or 0) < 0:
        raise InputError(
            f"--seq-len {seq_len}, --windows {windows}, --skip {skip}: expected at least 16 tokens, 1 window, 0 skipped"
        )
    torch_device = resolve_device(device)
    documents = read_documents(text) if text else [bundled_novel()]
    skip = skip if skip is not None else (0 if text else NOVEL_FRONT_MATTER)
    a = _open(original, revision, token)
    b = _open(converted, None, token)
    configs = [read_config(checkpoint) for checkpoint in (a, b)]
    limits = [getattr(config.get_text_config(), "max_position_embeddings", DEFAULT_WINDOW) for config in configs]
    if seq_len is not None and seq_len > min(limits):
        name = (a, b)[limits.index(min(limits))].name
        raise InputError(f"--seq-len {seq_len}: {name} takes at most {min(limits)} positions")
    windowed = _windows(a, b, documents, seq_len or min(DEFAULT_WINDOW, *limits), windows, skip)
    tokens = windowed.tokens
    models = [
        StreamedModel(checkpoint, config, DTYPES[dtype], torch_device)
        for checkpoint, config in zip((a, b), configs, strict=True)
    ]
    recipe = _recipe(b, models[1].num_layers)
    scores, layers = _sweep(models[0], models[1], tokens, recipe, progress)
    caches = []
    for model, checkpoint in zip(models, (a, b), strict=True):
        stored = StreamedModel(checkpoint, model.config, checkpoint.dtype, torch_device)
        caches.append(cache_size(stored, model_shape(model.config), tokens[:1]))
    length = tokens.shape[1] - 1
    return Evaluation(
        original=a.name,
        converted=b.name,
        overall=nll(scores, 0, length),
        by_position=tuple(nll(scores, start, end) for start, end in position_buckets(length)),
        agreement=agreement(scores),
        layers=layers,
        cache_original=caches[0],
        cache_converted=caches[1],
        provenance={
            "text": list(windowed.sources),
            "text_sha256": windowed.sha256,
            "windows": list(tokens.shape),
            "skipped_tokens": skip,
            "dtype": dtype,
            "device": str(torch_device),
            "revisions": {"original": a.revision, "converted": b.revision},
            "versions": {name: version(name) for name in ("latentfold", "torch", "transformers")},
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        },
    )


def bundled_novel() -> Document:
    """The evaluation text that ships with the package."""
    path = resources.files("latentfold.eval") / "data" / "persuasion.txt"
    return Document(NOVEL, path.read_text(encoding="utf-8"))


def _open(name: str, revision: str | None, token: str | None) -> Checkpoint:
    checkpoint = download(open_checkpoint(name, revision=revision, token=token), token=token)
    checkpoint.read_headers()
    return checkpoint


def _windows(
    a: Checkpoint, b: Checkpoint, documents: Sequence[Document], length: int, count: int, skip: int
) -> Windows:
    sizes = [model_shape(read_config(checkpoint)).vocab_size for checkpoint in (a, b)]
    if sizes[0] != sizes[1]:
        raise InputError(f"{a.name} has {sizes[0]} tokens, {b.name} {sizes[1]}; expected models with one vocabulary")
    tokenizer, other = load_tokenizer(a), load_tokenizer(b)
    sample = documents[0].text[:2000]
    if not torch.equal(tokenize(tokenizer, sample), tokenize(other, sample)):
        raise InputError(f"{a.name} and {b.name} tokenize the text differently; expected models with one tokenizer")
    return make_windows(
        documents, tokenizer, length=length, count=count, purpose="evaluation", vocab_size=sizes[0], skip=skip
    )


def _recipe(checkpoint: Checkpoint, num_layers: int) -> dict[str, Any] | None:
    """What the conversion recorded, or None for a checkpoint without a record.

    Raises:
        InputError: there is a record, but not of this model.
    """
    path = checkpoint.folder / RECIPE
    if not path.is_file():
        return None
    recipe = read_json(path)
    scale, layers = recipe.get("residual_scale"), recipe.get("layers")
    if not isinstance(scale, (int, float)) or not isinstance(layers, list) or len(layers) != num_layers:
        raise InputError(f"{path}: not the record of this conversion; convert again")
    return recipe


@torch.no_grad()
def _sweep(
    a: StreamedModel, b: StreamedModel, tokens: Tensor, recipe: dict[str, Any] | None, progress: bool
) -> tuple[TokenScores, tuple[LayerError, ...] | None]:
    """Both models, layer by layer over all windows; then all predictions, a few logits at a time."""
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
            inputs: list[tuple[Tensor, Tensor]] = []
            if index < a.num_layers:
                with a.layer(index) as layer:
                    for k, hidden in enumerate(streams[0]):
                        streams[0][k], x, output = attention_inputs(layer, hidden, kwargs[0][index])
                        inputs.append((x, output))
                        bar.update(tokens.shape[1])
            if index < b.num_layers:
                with b.layer(index) as layer:
                    error = power = 0.0
                    for k, hidden in enumerate(streams[1]):
                        streams[1][k] = layer(hidden, **kwargs[1][index])
                        if scale is not None:
                            x, expected = inputs[k]
                            found = layer.self_attn(hidden_states=x, **kwargs[1][index])[0] / scale
                            error += float((found - expected).square().sum(dtype=torch.float64))
                            power += float(expected.square().sum(dtype=torch.float64))
                        bar.update(tokens.shape[1])
                if scale is not None and recipe is not None:
                    predicted = math.sqrt(sum(recipe["layers"][index].values()))
                    layers.append(LayerError(index, math.sqrt(error / max(power, 1e-300)), predicted))
    with a.head() as original_head, b.head() as converted_head:
        scores = score_tokens(tokens, streams[0], streams[1], original_head, converted_head)
    return scores, tuple(layers) if layers else None
