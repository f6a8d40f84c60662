"""What is compared: two models and texts, checked before the work."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

import torch

from latentfold.convert.dtypes import DTYPES
from latentfold.convert.errors import InputError
from latentfold.convert.model.devices import resolve_device
from latentfold.convert.model.shape import model_shape
from latentfold.convert.model.streamed import StreamedModel
from latentfold.convert.source.checkpoint import Checkpoint
from latentfold.convert.source.config import max_positions, read_config
from latentfold.convert.source.hub import download
from latentfold.convert.source.opening import open_checkpoint
from latentfold.convert.source.streamed import stream as streamed
from latentfold.convert.source.tokenizer import load_tokenizer
from latentfold.convert.text.datasets import open_texts
from latentfold.convert.text.documents import Document
from latentfold.convert.text.windows import DEFAULT_WINDOW, Windows, leading_tokens, make_windows, tokenize
from latentfold.convert.write.recipe import RECIPE, Recipe, read_recipe
from latentfold.eval.options import EvaluationConfig
from latentfold.eval.quality.continuations import PROMPTS, check_prompts
from latentfold.eval.quality.tasks import check_tasks

EMBEDDINGS_COMPARED = 4096
"""Rows of the embedding that tell a conversion's original from another model."""

EMBEDDING_TOLERANCE = 0.02
"""Relative; rounding to bfloat16 makes 0.002."""

NOVEL = "Persuasion (1817), bundled"

LONG_PARAGRAPH = 120
"""Characters from which on a paragraph is hardly in two books."""
NOVEL_FRONT_MATTER = 1000
"""Tokens of the bundled novel that are passed over: title, contents, first page."""


@dataclass(frozen=True)
class Side:
    """One of the two models."""

    checkpoint: Checkpoint
    model: StreamedModel


@dataclass(frozen=True)
class Comparison:
    """An evaluation that can begin.

    Attributes:
        original, converted: the models.
        recipe: what the conversion recorded, where it did.
        documents, windows: each text and its windows.
        length: tokens of a window.  longest: tokens that both models take.
        skip: tokens passed over at the start of each text.
        notices: what the user should know beforehand, a sentence each.
    """

    original: Side
    converted: Side
    recipe: Recipe | None
    documents: list[Document]
    windows: list[Windows]
    length: int
    longest: int
    skip: int
    notices: tuple[str, ...]


def prepare(original: str, converted: str, config: EvaluationConfig) -> Comparison:
    """Check everything, and fetch both models.

    Raises:
        InputError: see `evaluate`.
    """
    device, compute = resolve_device(config.device), DTYPES[config.dtype]
    if config.tasks:
        check_tasks(config.tasks, config.include_path)
    documents = open_texts(config.text, token=config.token) if config.text else [bundled_novel()]
    if twice := [text for text, count in Counter(document.text for document in documents).items() if count > 1]:
        names = [document.name for document in documents if document.text in twice]
        raise InputError(f"text {', '.join(names)}: the same text, which would count twice; expected each once")
    skip = config.skip if config.skip is not None else (0 if config.text else NOVEL_FRONT_MATTER)
    a = open_checkpoint(original, revision=config.revision, token=config.token)
    b = open_checkpoint(converted, token=config.token)
    configs = [read_config(checkpoint) for checkpoint in (a, b)]
    limits = [max_positions(checkpoint) or DEFAULT_WINDOW for checkpoint in (a, b)]
    longest = min(limits)
    for option, length in (("seq_len", config.seq_len), ("contexts", max(config.contexts, default=None))):
        if length is not None and length > longest:
            name = (a, b)[limits.index(longest)].name
            raise InputError(f"{option} {length}: {name} takes at most {longest} positions")
    length = config.seq_len or min(DEFAULT_WINDOW, longest)
    a, b = (download(checkpoint, token=config.token, weights=False) for checkpoint in (a, b))
    windows = text_windows(a, b, documents, length, config.windows, skip)
    if config.continuations:
        check_prompts(a, b, config.prompts or PROMPTS)
    if (a.folder / RECIPE).is_file():
        raise InputError(f"{a.name}: is itself a conversion; expected the model that {b.name} was made from")
    recipe = recipe_beside(b)
    a, b = with_weights(a, config.token, config.stream), with_weights(b, config.token)
    models = []
    for checkpoint, own in zip((a, b), configs, strict=True):
        models.append(StreamedModel(checkpoint, own, compute, device))
        models[-1].check_headers(checkpoint.headers)
        models[-1].check_copies()
    if recipe:
        check_original(a.name, b.name, models, recipe)
    return Comparison(
        Side(a, models[0]),
        Side(b, models[1]),
        recipe,
        documents,
        windows,
        length,
        longest,
        skip,
        notices=tuple(
            f"{document.name}: holds less than a window of {length:,} tokens; "
            f"its {found.tokens.shape[1]:,} make a shorter one, and say nothing of longer contexts"
            for document, found in zip(documents, windows, strict=True)
            if found.tokens.shape[1] < length
        ),
    )


def bundled_novel() -> Document:
    """The evaluation text that ships with the package."""
    path = resources.files("latentfold.eval") / "data" / "persuasion.txt"
    return Document(NOVEL, path.read_text(encoding="utf-8"))


def refuse_evaluation_text(documents: Sequence[Document]) -> None:
    """Refuse to train on the bundled novel: nothing could be measured with it afterwards.

    Raises:
        InputError: a text holds a paragraph of it.
    """
    ours = _paragraphs(bundled_novel())
    for document in documents:
        if _paragraphs(document) & ours:
            raise InputError(f"text {document.name}: holds text of the evaluation novel ({NOVEL}); expected any other")


def _paragraphs(document: Document) -> set[str]:
    """Hashes of the longer paragraphs."""
    parts = (" ".join(part.split()) for part in document.text.split("\n\n"))
    return {hashlib.sha256(part.encode(errors="replace")).hexdigest() for part in parts if len(part) >= LONG_PARAGRAPH}


def with_weights(checkpoint: Checkpoint, token: str | None, stream: bool = False) -> Checkpoint:
    if stream:
        return streamed(checkpoint, token)
    checkpoint = download(checkpoint, token=token)
    checkpoint.read_headers()
    return checkpoint


def text_windows(
    a: Checkpoint, b: Checkpoint, documents: Sequence[Document], length: int, count: int, skip: int
) -> list[Windows]:
    """Up to `count` windows of each document; one that does not fill a window makes a shorter one."""
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
            shorter=True,
        )
        for document in documents
    ]


def recipe_beside(checkpoint: Checkpoint) -> Recipe | None:
    """What the conversion recorded, or None for a checkpoint without a record.

    Raises:
        InputError: there is a record, but not of this model.
    """
    path = checkpoint.folder / RECIPE
    if not path.is_file():
        return None
    recipe = read_recipe(checkpoint.folder)
    if len(recipe.layers) != model_shape(read_config(checkpoint)).num_layers:
        raise InputError(f"{path}: not the record of this conversion; convert again")
    return recipe


def check_original(a: str, b: str, models: Sequence[StreamedModel], recipe: Recipe) -> None:
    """Refuse a model that `b` was not converted from: a card would call the difference the conversion's cost.

    A conversion leaves the embedding as it is, but for the residual scale and rounding.

    Raises:
        InputError: the embeddings differ.
    """
    expected, found = (model.tensor(model.embedding)[:EMBEDDINGS_COMPARED].double() for model in models)
    expected *= recipe.residual_scale
    if expected.shape != found.shape or not (found - expected).norm() <= EMBEDDING_TOLERANCE * expected.norm():
        raise InputError(
            f"{a}: not the model that {b} was made from (their embeddings differ); expected {recipe.source.name}"
        )
