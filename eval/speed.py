"""Prefill and decode speed of both models under plain transformers, and the caches they fill."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from latentfold.convert.errors import InputError
from latentfold.convert.source import Checkpoint
from latentfold.eval.cache import held_bytes
from latentfold.eval.models import is_out_of_memory, loaded, max_positions
from latentfold.eval.records import SpeedPoint


@dataclass(frozen=True)
class _Speed:
    """One model at one point: tokens per second, and bytes of its cache after the prefill."""

    prefill: float | None = None
    decode: float | None = None
    cache: float | None = None


def measure_speed(
    original: Checkpoint,
    converted: Checkpoint,
    *,
    contexts: Sequence[int],
    batches: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    repeats: int = 3,
    decode_tokens: int = 16,
    seed: int = 0,
    progress: bool = True,
) -> tuple[SpeedPoint, ...]:
    """Median tokens per second for every context and batch.

    A prefill is one forward pass over `batch` x `context` random tokens that fills the cache and computes the last
    position's logits only; decoding is `decode_tokens` passes of one token a sequence on that cache. Each repeat does
    both from scratch, so every decode starts from the same context; one more repeat before them warms up, untimed.
    Choosing tokens is not part of it.

    One model is in memory at a time: what runs out of memory does so on its own account.

    Measured is what `from_pretrained` gives: transformers' sdpa attention and growing cache. Its MLA expands the cached
    latents to all heads at every step, where an engine with MLA kernels absorbs the up-projections into queries and
    outputs and reads the latents alone. The decode speed found here is not that of such an engine; the cache is.

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
    points = [(context, batch) for context in contexts for batch in batches]
    found: list[list[_Speed]] = []
    with tqdm(total=len(pair) * len(points), desc="measuring speed", unit="point", disable=not progress) as bar:
        for checkpoint in pair:
            speeds = []
            with loaded(checkpoint, dtype, device) as model:
                for context, batch in points:
                    generator = torch.Generator().manual_seed(seed)
                    shape = (batch, context + decode_tokens)
                    tokens = torch.randint(model.config.vocab_size, shape, generator=generator).to(device)
                    speeds.append(_speed(model, tokens, context, repeats))
                    bar.update()
            found.append(speeds)
    return tuple(
        SpeedPoint(context, batch, a.prefill, b.prefill, a.decode, b.decode, a.cache, b.cache)
        for (context, batch), a, b in zip(points, *found, strict=True)
    )


def _speed(model: Any, tokens: Tensor, context: int, repeats: int) -> _Speed:
    """Measure one point; nothing where memory runs out."""
    try:
        runs = [_run(model, tokens, context) for _ in range(1 + repeats)][1:]
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return _Speed()
    prefill, decode, cache = zip(*runs, strict=True)
    batch, length = tokens.shape
    return _Speed(
        prefill=batch * context / median(prefill),
        decode=batch * (length - context) / median(decode),
        cache=float(cache[0]),
    )


@torch.no_grad()
def _run(model: Any, tokens: Tensor, context: int) -> tuple[float, float, int]:
    """Prefill the first `context` of (B, T) tokens, decode the rest: seconds of both, bytes of the cache between."""
    start = _now(tokens.device)
    cache = model(tokens[:, :context], use_cache=True, logits_to_keep=1).cache
    prefill = _now(tokens.device) - start
    held = held_bytes(cache)
    start = _now(tokens.device)
    for step in tokens[:, context:].split(1, dim=1):
        model(step, cache=cache, use_cache=True, logits_to_keep=1)
    return prefill, _now(tokens.device) - start, held


def _now(device: torch.device) -> float:
    """Seconds on a clock, once the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
