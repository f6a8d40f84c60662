"""What lies beside the weights: tokenizer, generation config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from latentfold.convert.errors import InputError
from latentfold.convert.source.checkpoint import Checkpoint

GENERATION_CONFIG = "generation_config.json"

TOKENIZER_FILES = [
    "tokenizer*.json",
    "*.model",
    "tokenizer.model.*",
    "*.tiktoken",
    "*.spm",
    "vocab.json",
    "vocab.txt",
    "vocab.bpe",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
]
"""What a tokenizer may consist of: transformers reads some, llama.cpp or vLLM others."""


def tokenizer_files(folder: Path, tokenizer: Any) -> dict[str, Path]:
    """Name (`folder/file` in a sub-folder) -> file of everything that belongs to the tokenizer loaded from a folder."""
    patterns = [*TOKENIZER_FILES, *getattr(tokenizer, "vocab_files_names", {}).values()]
    files = sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in files}


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The checkpoint's tokenizer.

    Raises:
        InputError: there is none that transformers can load.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=False)  # None would ask
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

    path = checkpoint.folder / GENERATION_CONFIG
    if not path.is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(checkpoint.folder)
    except Exception as error:  # whatever its validation meets
        raise InputError(f"{path}: not a generation config ({' '.join(str(error).split())[:150]})") from error
