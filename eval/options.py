"""What an evaluation is asked to do."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from latentfold.convert.errors import InputError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _check_options(
    *,
    dtype: str,
    seq_len: int | None,
    windows: int,
    skip: int | None,
    seed: int,
    continuations: bool,
    prompts: Sequence[str],
    speed: bool,
    contexts: Sequence[int],
    batches: Sequence[int],
    tasks: Sequence[str],
    include_path: str | None,
    limit: int | None,
    batch_size: int,
    stream: bool,
) -> None:
    """Refuse options that mean nothing, alone or together.

    Raises:
        InputError: naming the option, what was expected and what was found.
    """
    if dtype not in DTYPES:
        raise InputError(f"--dtype {dtype}: expected {', '.join(DTYPES)}")
    if (seq_len is not None and seq_len < 16) or windows < 1 or (skip or 0) < 0:
        raise InputError(
            f"--seq-len {seq_len}, --windows {windows}, --skip {skip}: expected at least 16 tokens, 1 window, 0 skipped"
        )
    counts = {
        "--contexts": contexts,
        "--batches": batches,
        "--batch-size": [batch_size],
        "--limit": [] if limit is None else [limit],
    }
    for option, given in counts.items():
        for count in given:
            if not 1 <= count < 2**31:
                raise InputError(f"{option} {count}: expected {'at least 1' if count < 1 else 'less than 2^31'}")
    if not 0 <= seed < 2**32:
        raise InputError(f"--seed {seed}: expected 0 to 2^32 - 1")
    idle = {
        "--prompt is for --continuations": prompts and not continuations,
        "--contexts is for --speed": contexts and not speed,
        "--batches is for --speed": tuple(batches) != (1,) and not speed,
        "--include-path is for --tasks": include_path and not tasks,
        "--limit is for --tasks": limit is not None and not tasks,
        "--batch-size is for --tasks": batch_size != 1 and not tasks,
    }
    for message, ignored in idle.items():
        if ignored:
            raise InputError(message)
    if stream and (continuations or speed or tasks):
        raise InputError("--stream: continuations, speed and tasks need the whole original; leave it out")
