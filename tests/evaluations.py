"""Example evaluations, made up but plausible: SmolLM2-135M at a third of its cache, or any other gap."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

from latentfold.convert.write.recipe import Recipe
from latentfold.eval.records import (
    Agreement,
    CachePoint,
    CacheSize,
    Continuation,
    Curve,
    Evaluation,
    LayerError,
    Nll,
    SpeedPoint,
    TaskScore,
    TextResult,
)

NOVEL = "Persuasion (1817), bundled"
VALUES, LAYERS, BYTES = (384, 128), 30, 2
"""Cached values per token and layer of the original and the converted model, layers, bytes a value."""


def text_result(
    name: str = NOVEL, *, gap: float = 0.53, original: float = 3.41, windows: int = 4, window_length: int = 4096
) -> TextResult:
    """One text; both losses fall with context, the gap grows with it."""
    length = window_length - 1
    edges = [0, *(edge for edge in (512, 1024, 2048, 4096, 8192, 16384) if edge < length), length]

    def losses(context: float) -> tuple[float, float]:
        share = math.log2(1 + context) / math.log2(1 + length)
        return original + 0.9 * (1 - share) ** 2, gap * (0.65 + 0.4 * share)

    def row(start: int, end: int) -> Nll:
        loss, difference = losses((start + end) / 2)
        return Nll(start, end, windows * (end - start), loss, loss + difference, difference, 0.02 * abs(gap) + 0.001)

    contexts = [(2**i + 2 ** (i + 1)) / 2 for i in range(length.bit_length() - 1)]
    return TextResult(
        name=name,
        sha256=hashlib.sha256(name.encode(errors="replace")).hexdigest(),
        windows=windows,
        window_length=window_length,
        skipped_tokens=1000 if name == NOVEL else 0,
        overall=Nll(0, length, windows * length, original, original + gap, gap, 0.02 * abs(gap)),
        by_position=tuple(row(start, end) for start, end in pairwise(edges)),
        curve=Curve(tuple(contexts), tuple(losses(c)[0] for c in contexts), tuple(sum(losses(c)) for c in contexts)),
        agreement=Agreement(
            kl=1.06 * abs(gap),
            kl_standard_error=0.008,
            kl_quantiles={"0.5": 0.6 * abs(gap), "0.9": 2.4 * abs(gap), "0.99": 6.1 * abs(gap)},
            top1=min(1.0, max(0.0, 1 - 0.8 * gap)),
        ),
    )


def macro(texts: tuple[TextResult, ...]) -> tuple[Nll, Agreement]:
    """The average that counts every text alike."""
    n = len(texts)
    rows, agreements = [text.overall for text in texts], [text.agreement for text in texts]

    def mean(values: list[float]) -> float:
        return sum(values) / n

    def error(values: list[float | None]) -> float:
        return math.sqrt(sum((value or 0) ** 2 for value in values)) / n

    overall = Nll(
        start=0,
        end=max(row.end for row in rows),
        predictions=sum(row.predictions for row in rows),
        original=mean([row.original for row in rows]),
        converted=mean([row.converted for row in rows]),
        gap=mean([row.gap for row in rows]),
        gap_standard_error=error([row.gap_standard_error for row in rows]),
    )
    return overall, Agreement(
        kl=mean([a.kl for a in agreements]),
        kl_standard_error=error([a.kl_standard_error for a in agreements]),
        kl_quantiles={q: mean([a.kl_quantiles[q] for a in agreements]) for q in agreements[0].kl_quantiles},
        top1=mean([a.top1 for a in agreements]),
    )


def full_evaluation(*, gap: float = 0.53, texts: tuple[TextResult, ...] = (), **changes: Any) -> Evaluation:
    """Everything measured, on one text unless `texts` are given; `changes` replace fields."""
    texts = texts or (text_result(gap=gap),)
    overall, agreement = macro(texts)
    sizes = [float(values * LAYERS * BYTES) for values in VALUES]
    contexts = (512, 1024, 2048, 4096)

    def speed(context: int, batch: int) -> SpeedPoint:
        work, memory = 1 + context / 4096, context * batch
        return SpeedPoint(
            context=context,
            batch=batch,
            prefill_original=2900 / work,
            prefill_converted=2300 / work,
            decode_original=batch * 31 / work if memory < 16384 else None,
            decode_converted=batch * 34 / work**0.5,
            cache_original=sizes[0] * memory if memory < 16384 else None,
            cache_converted=sizes[1] * memory,
        )

    evaluation = Evaluation(
        original="HuggingFaceTB/SmolLM2-135M-Instruct",
        converted="smollm2-mla",
        texts=texts,
        overall=overall,
        agreement=agreement,
        layers=tuple(
            LayerError(
                layer=i,
                scores=0.16 + 0.1 * math.sin(i),
                values=0.22 + 0.08 * math.cos(2 * i),
                output=0.36 + 0.13 * math.sin(i + 0.5),
                predicted=0.34 + 0.12 * math.sin(i),
            )
            for i in range(LAYERS)
        ),
        cache_original=CacheSize(sizes[0], sizes[0]),
        cache_converted=CacheSize(sizes[1], sizes[1]),
        cache_by_context=tuple(CachePoint(c, sizes[0] * c, sizes[1] * c) for c in contexts),
        continuations=(
            Continuation(
                prompt="Once upon a time there was a lighthouse keeper who",
                original=" lived alone on a rock and counted the ships that passed. Every night he lit the lamp.",
                converted=" lived alone on a small island. He had a dog, and the dog was afraid of the sea.",
                shared_tokens=4,
                tokens=24,
            ),
            Continuation(
                prompt="def fibonacci(n):",
                original="\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
                converted="\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
                shared_tokens=32,
                tokens=32,
            ),
        ),
        speed=tuple(speed(context, batch) for batch in (1, 8) for context in (512, 1024, 2048)),
        tasks=(
            TaskScore("arc_easy", "acc_norm", True, 2376, 0.4861, 0.0103, 0.4263, 0.0101),
            TaskScore("lambada_openai", "perplexity", False, 5153, 16.42, 0.55, 29.13, 1.04),
            TaskScore("private_task", "score", None, None, 0.61, None, 0.55, None),
        ),
        provenance={
            "command": "latentfold eval HuggingFaceTB/SmolLM2-135M-Instruct smollm2-mla --speed --continuations",
            "created": "2026-11-30T12:30:00+00:00",
            "dtype": "float32",
            "device": "cpu",
            "seed": 0,
            "versions": {"latentfold": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"},
            "python": "3.11.7",
            "machine": "x86_64, 2 cores, 2 threads",
            "revisions": {"original": "12fd25f77366fa6b3b4b768ec3050bf629380bac", "converted": None},
            "fingerprint": hashlib.sha256(b"smollm2-mla").hexdigest(),
            "speed": {"dtype": "bfloat16", "repeats": 5},
        },
    )
    return replace(evaluation, **changes)


def healed_evaluation(recipe: Recipe) -> Evaluation:
    """Everything measured, on a model whose record this is."""
    evaluation = full_evaluation(gap=0.14)
    tokens, seconds = recipe.trained
    healed = {"tokens": tokens, "minutes": seconds / 60}
    return replace(evaluation, provenance=evaluation.provenance | {"healed": healed})


def bare_evaluation(**changes: Any) -> Evaluation:
    """The least an evaluation holds: one short text, and whatever may be unmeasured unmeasured."""
    text = text_result("notes.txt", gap=0.1, windows=1, window_length=64)
    rows = tuple(replace(row, gap_standard_error=None) for row in text.by_position)
    text = replace(
        text,
        overall=replace(text.overall, gap_standard_error=None),
        by_position=rows,
        agreement=replace(text.agreement, kl_standard_error=None),
    )
    full = full_evaluation()
    provenance = {key: value for key, value in full.provenance.items() if key not in ("fingerprint", "speed")}
    evaluation = replace(
        full,
        texts=(text,),
        overall=text.overall,
        agreement=text.agreement,
        layers=None,
        cache_original=replace(full.cache_original, measured=None),
        cache_converted=replace(full.cache_converted, measured=None),
        cache_by_context=(),
        continuations=None,
        speed=None,
        tasks=None,
        provenance=provenance | {"revisions": {"original": None, "converted": None}, "fingerprint": None},
    )
    return replace(evaluation, **changes)
