"""Windows of tokens: exactly those of the whole text, from no more of it than is needed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from latentfold.convert.errors import InputError
from latentfold.convert.text.documents import Document, default_calibration
from latentfold.convert.text.windows import CHARACTERS, MARGIN, LeadingTokens, leading_tokens, make_windows, tokenize
from tests.conftest import TEXT, tiny_tokenizer

WORDS = random.Random(0)
PROSE = " ".join(
    "".join(WORDS.choice("aeiounrstlmdhc") for _ in range(WORDS.randint(1, 9))) + WORDS.choice(["", "", "", ",", ".\n"])
    for _ in range(3000)
)
CORPUS = [TEXT, PROSE, "def f(x):\n    return x ** 2  # 345\n" * 20, "aaa ACGT ACGGT tokens tokenized"]
VOCABULARY = 400


def wrapped(tokenizer: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def trained_bpe(pre: Any, normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet() if normalizer is None else []
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False, initial_alphabet=alphabet)
    )
    return tokenizer


def smollm2_like() -> PreTrainedTokenizerFast:
    """Digits apart, then words, then merges of bytes."""
    return wrapped(
        trained_bpe(
            pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
        )
    )


def llama3_like() -> PreTrainedTokenizerFast:
    """Words by a pattern that looks ahead, merges of bytes, a token before every text."""
    pattern = Regex(
        r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = trained_bpe(pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), byte_level]))
    tokenizer.add_special_tokens(["<s>"])
    first = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", first)])
    return wrapped(tokenizer, bos_token="<s>")


def llama2_like() -> PreTrainedTokenizerFast:
    """Merges across the whole text: nothing divides it into words beforehand."""
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words = trained_bpe(pre_tokenizers.Metaspace(), normalizers.NFKC())
    words.normalizer, words.pre_tokenizer = spaces, None
    return wrapped(words)


def unigram() -> PreTrainedTokenizerFast:
    """As SentencePiece's: the likeliest way to divide a word."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCABULARY, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"]
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return wrapped(tokenizer, unk_token="<unk>")


def unigram_of_whole_texts() -> PreTrainedTokenizerFast:
    """The likeliest way to divide the text: what follows may change all that comes before."""
    tokenizer = Tokenizer(models.Unigram([("<unk>", -9.0), ("a", -4.0), ("aa", -5.0), ("aaa", -5.5), (" ", -3.0)], 0))
    return wrapped(tokenizer, unk_token="<unk>")


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    function.__name__: function
    for function in (tiny_tokenizer, smollm2_like, llama3_like, llama2_like, unigram, unigram_of_whole_texts)
}
TEXTS = {
    "prose": PROSE,
    "repeated prose": TEXT * 40,
    "one letter": "a" * 8001,
    "one long word": "".join(WORDS.choice("ACGT") for _ in range(9000)),
    "words after a long word": "a" * 5003 + " " + PROSE,
    "blanks": "a" + " " * 6000 + "b\r\n\r\n\t\t" * 300 + " " * 5000 + "c",
    "accents as their own characters": "e\u0301a\u0308o\u0302\u0323 " * 2000,
    "no spaces": "键和值都存在缓存里。" * 900,
    "symbols": "🙂👍🏽👩‍👩‍👧 ½ ﬁ " * 900,
    "digits": "1234567890" * 900,
    "short": "a few",
    "empty": "",
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]()


@pytest.mark.parametrize("name", TEXTS)
def test_leading_tokens_are_the_whole_texts(tokenizer: Any, name: str) -> None:
    text = TEXTS[name]
    whole = tokenize(tokenizer, text)
    for count in (1, 16, 63, 500, len(whole) - 1, len(whole), len(whole) + 1):
        if count > 0:
            assert torch.equal(LeadingTokens(tokenizer, text).first(count), whole[:count])
    growing = LeadingTokens(tokenizer, text)
    for count in range(1, len(whole) + 400, 397):
        assert torch.equal(growing.first(count), whole[:count])


def plain_windows(
    documents: list[Document], tokenizer: Any, length: int, count: int, skip: int
) -> tuple[torch.Tensor, tuple[str, ...], str]:
    """The definition: windows of the wholly tokenized documents in turn."""
    lead = torch.tensor(leading_tokens(tokenizer), dtype=torch.long)
    body = length - len(lead)
    streams = [tokenize(tokenizer, document.text)[skip:] for document in documents]
    rows = []
    for position in range(max(len(stream) // body for stream in streams)):
        for stream in streams:
            if (position + 1) * body <= len(stream):
                rows.append(torch.cat([lead, stream[position * body : (position + 1) * body]]))
    tokens = torch.stack(rows[:count])
    used = tuple(document.name for document, stream in zip(documents, streams, strict=True) if len(stream) >= body)
    return tokens, used, hashlib.sha256(tokens.numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("skip", [0, 37])
@pytest.mark.parametrize(("length", "count"), [(16, 3), (64, 1), (64, 40), (300, 7), (700, 1 << 30)])
def test_windows_are_those_of_the_whole_texts(tokenizer: Any, length: int, count: int, skip: int) -> None:
    documents = [Document(name, text) for name, text in TEXTS.items()]
    found = make_windows(
        documents, tokenizer, length=length, count=count, purpose="test", vocab_size=1 << 20, skip=skip
    )
    tokens, used, sha256 = plain_windows(documents, tokenizer, length, count, skip)
    assert torch.equal(found.tokens, tokens) and found.sources == used and found.sha256 == sha256


class Counting:
    """A tokenizer that notes how many characters it was given."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.characters = tokenizer, 0

    def __call__(self, text: str, **options: Any) -> Any:
        self.characters += len(text)
        return self.tokenizer(text, **options)


def test_no_more_of_a_text_is_tokenized_than_is_needed() -> None:
    """However long it is; the bundled texts are what a conversion calibrates on."""
    for documents in ([Document("long", PROSE * 1000)], default_calibration()):
        counting = Counting(smollm2_like())
        found = make_windows(documents, counting, length=512, count=8, purpose="test", vocab_size=VOCABULARY)
        assert found.tokens.shape == (8, 512)
        a_text = max(512, 8 * 512 // len(documents)) + MARGIN
        assert counting.characters < 6 * CHARACTERS * a_text * len(documents)


def test_too_short_a_text_is_refused_with_what_was_found(tokenizer: Any) -> None:
    text = TEXT[:60]
    body, found = 400 - len(leading_tokens(tokenizer)), len(tokenize(tokenizer, text))
    options: dict[str, Any] = {"length": 400, "count": 4, "purpose": "test", "vocab_size": 1 << 20}
    message = f"expected at least {body} tokens in one file, found {found};"
    with pytest.raises(InputError, match=message):
        make_windows([Document("a", "b"), Document("b", text)], tokenizer, **options)
    with pytest.raises(InputError, match=f"found {found - 5} after the 5 skipped"):
        make_windows([Document("b", text)], tokenizer, **options, skip=5)


@pytest.mark.parametrize("skip", [0, 5])
def test_a_short_text_makes_one_shorter_window_where_that_is_allowed(tokenizer: Any, skip: int) -> None:
    """Of all its tokens; a text that fills a window makes whole ones alone."""
    options: dict[str, Any] = {"count": 4, "purpose": "test", "vocab_size": 1 << 20, "skip": skip, "shorter": True}
    lead = torch.tensor(leading_tokens(tokenizer), dtype=torch.long)
    rest = tokenize(tokenizer, TEXT)[skip:]
    short = make_windows([Document("a", "b"), Document("b", TEXT)], tokenizer, length=4096, **options)
    assert torch.equal(short.tokens, torch.cat([lead, rest])[None]) and short.sources == ("b",)
    assert short.sha256 == hashlib.sha256(short.tokens.numpy().tobytes()).hexdigest()
    length = len(lead) + len(rest) - 1
    whole = make_windows([Document("b", TEXT)], tokenizer, length=length, **options)
    assert torch.equal(whole.tokens, torch.cat([lead, rest[:-1]])[None])


def test_a_window_holds_16_tokens_at_least(tokenizer: Any) -> None:
    body = 16 - len(leading_tokens(tokenizer))
    text = next(TEXT[:end] for end in range(200) if len(tokenize(tokenizer, TEXT[:end])) == body)
    options: dict[str, Any] = {"length": 400, "count": 4, "purpose": "test", "vocab_size": 1 << 20, "shorter": True}
    assert make_windows([Document("a", text)], tokenizer, **options).tokens.shape == (1, 16)
    message = rf"expected at least {body} tokens in one file, found {body - 1} after the 1 skipped; give more text$"
    with pytest.raises(InputError, match=message):
        make_windows([Document("a", text)], tokenizer, **options, skip=1)
