"""Documents to token windows."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from latentfold.convert.errors import InputError
from latentfold.convert.text.documents import Document

DEFAULT_WINDOW = 4096
"""Tokens of a window, where a model takes as many."""

SHORTEST_WINDOW = 16

CHARACTERS = 6
"""Of a text for each token wanted, to begin with; prose takes 3 to 5."""

BEFORE_BLANK = re.compile(r"(?<=\S)(?=\s)")
"""Where a text may be cut: how a long word is divided, its last letter may decide."""

MARGIN = 256
"""Tokens before the end of a part of a text that are not trusted: some depend on what follows."""


@dataclass(frozen=True)
class Windows:
    """Equally long token windows and where they come from.

    Attributes:
        tokens: (N, T) int64.
        sources: names of the texts used.
        sha256: of all tokens used, so that a run can be told from another.
    """

    tokens: Tensor
    sources: tuple[str, ...]
    sha256: str


def leading_tokens(tokenizer: Any) -> list[int]:
    """Tokens the tokenizer puts before every text (BOS, for most Llama tokenizers)."""
    ids = tokenizer("x", add_special_tokens=True)["input_ids"]
    plain = tokenizer("x", add_special_tokens=False)["input_ids"]
    for start in range(len(ids) - len(plain) + 1):
        if ids[start : start + len(plain)] == plain:
            return list(ids[:start])
    return []


def tokenize(tokenizer: Any, text: str) -> Tensor:
    """Token ids of a text without special tokens, (N,)."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.long)


class LeadingTokens:
    """The first tokens of a text, from no more of it than is needed.

    A leading part of the text is tokenized, then a longer one, both of whole words. As far as they agree, but for
    `MARGIN`, the end of the part makes no difference, so these are the whole text's tokens; else a longer part is
    taken, at last the text.
    """

    def __init__(self, tokenizer: Any, text: str) -> None:
        self._tokenizer, self._text = tokenizer, text
        self._tokens = torch.zeros(0, dtype=torch.long)
        self._characters = self._sure = 0

    def first(self, count: int) -> Tensor:
        """The whole text's first `count` token ids, or all where it has fewer."""
        while self._sure < count and self._characters < len(self._text):
            end = BEFORE_BLANK.search(self._text, max(CHARACTERS * (count + MARGIN), self._characters * 3 // 2))
            self._characters = end.start() if end else len(self._text)
            found = tokenize(self._tokenizer, self._text[: self._characters])
            self._sure = len(found)
            if self._characters < len(self._text):
                self._sure = max(0, _agreement(found, self._tokens) - MARGIN)
            self._tokens = found
        return self._tokens[: min(count, self._sure)]


def _agreement(a: Tensor, b: Tensor) -> int:
    """How many leading elements are the same."""
    shorter = min(len(a), len(b))
    return int((a[:shorter] == b[:shorter]).cumprod(0).sum())


def make_windows(
    documents: Sequence[Document],
    tokenizer: Any,
    *,
    length: int,
    count: int,
    purpose: str,
    vocab_size: int,
    skip: int = 0,
    shorter: bool = False,
) -> Windows:
    """Up to `count` windows of `length` tokens, taken from the documents in turn so that each is represented.

    Each window starts with the tokenizer's own leading tokens, as text does in use; `skip` tokens of each text are
    passed over first. Where no document fills a window and it may be `shorter`, all tokens of the longest one make one.

    Raises:
        InputError: no document fills a window, or one of `SHORTEST_WINDOW` tokens; or a token is none of the model's.
    """
    lead = leading_tokens(tokenizer)
    body = length - len(lead)
    streams = [LeadingTokens(tokenizer, document.text) for document in documents]
    share = -(-count // len(documents))
    longest = max(0, max(len(stream.first(skip + share * body)) for stream in streams) - skip)
    if shorter:
        body = min(body, max(longest, SHORTEST_WINDOW - len(lead)))
    if longest < body:
        skipped = f" after the {skip} skipped" if skip else ""
        raise InputError(
            f"{purpose} text is too short: expected at least {body} tokens in one file, found {longest}{skipped}; "
            f"give more text{'' if shorter else ' or a smaller seq_len'}"
        )
    chunks: list[Tensor] = []
    for position in range(count):
        wanted = skip + max(position + 1, share) * body
        found = [stream.first(wanted)[skip + position * body :][:body] for stream in streams]
        whole = [chunk for chunk in found if len(chunk) == body]
        chunks += whole
        if len(chunks) >= count or not whole:
            break
    tokens = torch.stack([torch.cat([torch.tensor(lead, dtype=torch.long), chunk]) for chunk in chunks[:count]])
    largest = int(tokens.max())
    if largest >= vocab_size:
        raise InputError(
            f"{purpose} text: the tokenizer gives token {largest}, the model has {vocab_size}; "
            "expected the model's own tokenizer"
        )
    used = tuple(d.name for d, s in zip(documents, streams, strict=True) if len(s.first(skip + body)) == skip + body)
    return Windows(tokens, used, hashlib.sha256(tokens.numpy().tobytes()).hexdigest())
