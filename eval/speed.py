"""Prefill and decode speed of both models under plain transformers, and the caches they fill."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from latentfold.convert.errors import InputError
from latentfold.convert.model.whole import is_out_of_memory, loaded
from latentfold.convert.progress import Progress, silent
from latentfold.convert.source.checkpoint import Checkpoint
from latentfold.convert.source.config import max_positions
from latentfold.eval.cache import held_bytes
from latentfold.eval.records import SpeedPoint

REPEATS = 3


class _Run(NamedTuple):
    """One prefill and the decoding after it, in seconds, and bytes of the cache between them."""

    prefill: float
    decode: float
    cache: int


def measure_speed(
    original: Checkpoint,
    converted: Checkpoint,
    *,
    contexts: Sequence[int],
    batches: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    repeats: int = REPEATS,
    decode_tokens: int = 16,
    seed: int = 0,
    progress: Progress = silent,
) -> tuple[SpeedPoint, ...]:
    """Median tokens per second for every context and batch.

    A prefill is one forward pass over `batch` x `context` random tokens that fills the cache and computes the last
    position's logits only; decoding is `decode_tokens` passes of one token a sequence on that cache. Each repeat does
    both from scratch, so every decode starts from the same context, and once before, untimed, to warm up. Choosing
    tokens is not part of it.

    The models take turns, repeat by repeat, so that a machine that slows down slows both. Only one is in memory at a
    time: what runs out of memory does so on its own account.

    Measured is what `from_pretrained` gives: transformers' sdpa attention and growing cache. Its DeepSeek class expands
    the cached latents to all heads at every step, where an engine with MLA kernels (and latentfold's own class) absorbs
    the up-projections into queries and outputs and reads the latents alone. The decode speed found here is not that of
    such an engine; the cache is.

    Args:
        contexts, batches: tokens a sequence, and sequences.
        repeats: timed repeats of a point.
        decode_tokens: tokens a sequence that a repeat decodes; at a model's longest context they run past it, which
            costs the same.
        seed: of the random tokens.

    Returns:
        A point for each context and batch, contexts outermost.

    Raises:
        InputError: a number below 1, a context that a model does not take, or weights that do not fit in memory.
    """
    if min([*contexts, *batches, repeats, decode_tokens]) < 1:
        raise InputError(
            f"speed: contexts {list(contexts)}, batches {list(batches)}, {repeats} repeats, {decode_tokens} decoded "
            "tokens: expected each to be at least 1"
        )
    pair = (original, converted)
    for checkpoint in pair:
        limit = max_positions(checkpoint)
        if limit is not None and max(contexts, default=0) > limit:
            raise InputError(
                f"speed: context {max(contexts)}: {checkpoint.name} takes at most {limit} positions; "
                "expected a shorter context"
            )
    points = list(dict.fromkeys(product(contexts, batches)))
    runs: list[dict[tuple[int, int], list[_Run] | None]] = [{point: [] for point in points} for _ in pair]
    done, total = 0, repeats * len(pair) * len(points)
    for _ in range(repeats):
        for checkpoint, found in zip(pair, runs, strict=True):
            with loaded(checkpoint, dtype, device) as model:
                for point in points:
                    found[point] = _repeat(model, point, decode_tokens, seed, found[point])
                    done += 1
                    progress("measuring speed", done, total, "runs")
    return tuple(_speed_point(point, decode_tokens, *(found[point] for found in runs)) for point in points)


def _repeat(
    model: Any, point: tuple[int, int], decode_tokens: int, seed: int, runs: list[_Run] | None
) -> list[_Run] | None:
    """`runs` and one more; None from the first time on that memory runs out."""
    if runs is None:
        return None
    context, batch = point
    generator = torch.Generator().manual_seed(seed)
    try:
        tokens = torch.randint(model.config.vocab_size, (batch, context + decode_tokens), generator=generator)
        tokens = tokens.to(model.device)
        _run(model, tokens, context)
        return [*runs, _run(model, tokens, context)]
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None


def _speed_point(
    point: tuple[int, int], decode_tokens: int, original: list[_Run] | None, converted: list[_Run] | None
) -> SpeedPoint:
    """Medians of both models' runs."""
    context, batch = point

    def rate(tokens: int, seconds: Sequence[float]) -> float | None:
        return batch * tokens / median(seconds) if seconds else None

    a, b = original or [], converted or []
    return SpeedPoint(
        context=context,
        batch=batch,
        prefill_original=rate(context, [run.prefill for run in a]),
        prefill_converted=rate(context, [run.prefill for run in b]),
        decode_original=rate(decode_tokens, [run.decode for run in a]),
        decode_converted=rate(decode_tokens, [run.decode for run in b]),
        cache_original=float(a[0].cache) if a else None,
        cache_converted=float(b[0].cache) if b else None,
    )


@torch.no_grad()
def _run(model: Any, tokens: Tensor, context: int) -> _Run:
    """Prefill the first `context` of (B, T) tokens, then decode the rest."""
    start = _now(tokens.device)
    cache = model(tokens[:, :context], use_cache=True, logits_to_keep=1).cache
    prefill = _now(tokens.device) - start
    held = held_bytes(cache)
    start = _now(tokens.device)
    for step in tokens[:, context:].split(1, dim=1):
        model(step, cache=cache, use_cache=True, logits_to_keep=1)
    return _Run(prefill, _now(tokens.device) - start, held)


def _now(device: torch.device) -> float:
    """Seconds on a clock, once the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
