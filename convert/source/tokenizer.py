"""What lies beside the weights: tokenizer, generation config."""

from __future__ import annotations

from typing import Any

from latentfold.convert.errors import InputError
from latentfold.convert.source.checkpoint import Checkpoint


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The checkpoint's tokenizer.

    Raises:
        InputError: there is none that transformers can load.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(checkpoint.folder)
    except Exception as error:  # a damaged tokenizer raises whatever its parser meets
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"{checkpoint.name}: expected a tokenizer beside the weights, found none usable ({reason})"
        ) from error


def load_generation_config(checkpoint: Checkpoint) -> Any | None:
    """The checkpoint's generation config, or None.

    Raises:
        InputError: there is one that cannot be read.
    """
    from transformers import GenerationConfig

    path = checkpoint.folder / "generation_config.json"
    if not path.is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(checkpoint.folder)
    except Exception as error:  # whatever its validation meets
        raise InputError(f"{path}: not a generation config ({' '.join(str(error).split())[:150]})") from error
