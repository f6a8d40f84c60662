"""What is compared: two models and texts, checked before the work."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any

import torch

from latentfold.convert.errors import InputError
from latentfold.convert.model.shape import model_shape
from latentfold.convert.model.streamed import StreamedModel
from latentfold.convert.source.checkpoint import Checkpoint
from latentfold.convert.source.config import read_config
from latentfold.convert.source.hub import download
from latentfold.convert.source.streamed import stream as streamed
from latentfold.convert.source.tokenizer import load_tokenizer
from latentfold.convert.text.documents import Document
from latentfold.convert.text.windows import Windows, leading_tokens, make_windows, tokenize
from latentfold.convert.write.recipe import RECIPE, read_recipe

EMBEDDINGS_COMPARED = 4096
"""Rows of the embedding that tell a conversion's original from another model."""

EMBEDDING_TOLERANCE = 0.02
"""Relative; rounding to bfloat16 makes 0.002."""

NOVEL = "Persuasion (1817), bundled"

NOVEL_FRONT_MATTER = 1000
"""Tokens of the bundled novel that are passed over: title, contents, first page."""


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
