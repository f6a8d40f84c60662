"""Tiny models made on the spot: random weights, a byte-level tokenizer, every attention shape."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

# an in-process huggingface_hub must not look anything up while tests run; it reads this at import
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_HUB_DISABLE_XET", "1")

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from latentfold.convert.model.streamed import StreamedModel
from latentfold.convert.source.config import read_config
from latentfold.convert.source.opening import open_checkpoint

TEXT = """The keys of a model are cached with its values, one pair a head, one row a token. A reader who asks how
much of that is needed will find that most rows lie close to a plane. "Then why keep them all?" she said. Nobody knew.
def read(rows): return [row for row in rows if row.kept]  # 12 of 345
"""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

TINY_SIZES = ["--kv-rank", "8", "--rope-dim", "4", "--calibration-tokens", "512", "--seq-len", "64", "--quiet"]
"""Options of `latentfold convert` that suit tiny models."""

MakeModel = Callable[..., Path]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and a few special ones."""
    special = ["<s>", "</s>", "<pad>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(special + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=4096
    )


SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_parameters": DEFAULT_ROPE,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
"""A model of a few thousand weights."""


def tiny_config(**changes: Any) -> LlamaConfig:
    """A Llama of a few thousand weights."""
    return LlamaConfig(**(deepcopy(SIZES) | {"rms_norm_eps": 1e-5} | changes))


def save_tiny(
    folder: Path, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB", seed: int = 0, **changes: Any
) -> Path:
    """Write a random tiny Llama with its tokenizer."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(tiny_config(**changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # enough spread for attention to be far from uniform, gains that are not one
            parameter.normal_(1.0, 0.2) if "norm" in name else parameter.normal_(0.0, 0.25)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def make_model(tmp_path: Path) -> Iterator[MakeModel]:
    """A function that writes a tiny model and returns its folder."""
    count = 0

    def make(**changes: Any) -> Path:
        nonlocal count
        count += 1
        return save_tiny(tmp_path / f"source{count}", **changes)

    yield make


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """A short calibration text."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 8, encoding="utf-8")
    return path


@pytest.fixture
def options(text_file: Path) -> dict[str, Any]:
    """Conversion options that suit tiny models."""
    return {"calibration": (str(text_file),), "calibration_tokens": 512, "seq_len": 64, "progress": False}


def load(folder: Path, **options: Any) -> Any:
    """Load a checkpoint with plain transformers."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


def streamed(folder: Path) -> StreamedModel:
    """A checkpoint to be run layer by layer."""
    checkpoint = open_checkpoint(folder)
    checkpoint.read_headers()
    return StreamedModel(checkpoint, read_config(checkpoint), torch.float32, torch.device("cpu"))


def random_tokens(rows: int = 2, length: int = 24, seed: int = 1) -> torch.Tensor:
    """(rows, length) token ids of the tiny vocabulary, no special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 259, (rows, length), generator=generator)
