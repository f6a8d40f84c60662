"""config.json as transformers reads it."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from latentfold.convert.errors import InputError
from latentfold.convert.model.shape import longest_context
from latentfold.convert.source.checkpoint import Checkpoint


def read_config(checkpoint: Checkpoint) -> Any:
    """The transformers config of a checkpoint, both spellings of rope parameters understood.

    Raises:
        InputError: no model_type, or one that this transformers does not know.
    """
    data = dict(checkpoint.config)
    model_type = data.pop("model_type", None)
    if model_type is None:
        raise InputError(f"{checkpoint.name}: config.json has no model_type; expected a transformers checkpoint")
    try:
        return AutoConfig.for_model(model_type, **data)
    except ValueError as error:
        known = "Unrecognized model identifier" in str(error)
        detail = "unknown to this transformers" if known else " ".join(str(error).split())
        raise InputError(f"{checkpoint.name}: model type {model_type!r}: {detail}") from error
    except Exception as error:  # transformers validates configs with exceptions of its own
        raise InputError(f"{checkpoint.name}: config.json is not valid: {' '.join(str(error).split())}") from error


def max_positions(checkpoint: Checkpoint) -> int | None:
    """The longest context config.json allows, or None where it does not say."""
    return longest_context(read_config(checkpoint))
