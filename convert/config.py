"""What a conversion is asked to do, validated once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from latentfold.convert.errors import InputError
from latentfold.convert.model.devices import resolve_device

DEFAULT_WINDOW = 4096

PORTABLE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

OUTPUT_DTYPES = PORTABLE_DTYPES | {"float16": torch.float16}

TARGETS = ("auto", "deepseek", "native")

ENGINES = ("any", "transformers")


@dataclass(frozen=True)
class ConversionConfig:
    """Options of `convert_checkpoint`; every default is what the command line uses.

    Attributes:
        source: folder or Hub id.
        output: folder to write; must not exist, be empty, or `overwrite` be set. None: nothing will be written.
        revision: branch, tag or commit of a Hub id.
        token: Hub token; None means the stored one.
        kv_rank: kv_lora_rank of the result; None: as `inspect` proposes.
        rope_dim: qk_rope_head_dim of the result; None: as `inspect` proposes.
        cache_values: values to cache per token and layer; how many of them rotate is chosen by a survey of a few
            layers. Instead of kv_rank and rope_dim.
        cache_ratio: the same as a share of the source's.
        calibration: text or jsonl files; empty: the bundled text.
        calibration_tokens: tokens to calibrate on, at most.
        seq_len: tokens of a calibration window; None: 4096, or what the model takes.
        queries: query positions looked at in each window.
        seed: of the sampled positions.
        device: torch device, or "auto".
        target: "deepseek" (the stock class that every engine loads), "native" (our own class, for what that one
            cannot hold), or "auto": the first wherever it fits.
        engine: what has to load the stock class: "any" engine, or "transformers" alone, whose class has biases too.
        dtype: "bfloat16", "float32", or "auto" (the source's; in the stock class float16 becomes bfloat16); for
            "native" also "float16".
        max_shard_size: as in transformers, "5GB".
        stream: keep no copy of a Hub source: fetch its shards when they are needed and delete them (slower).
        overwrite: replace what `output` holds, once the new checkpoint is complete.
        progress: show progress on stderr.
    """

    source: str
    output: str | None
    revision: str | None = None
    token: str | None = None
    kv_rank: int | None = None
    rope_dim: int | None = None
    cache_values: int | None = None
    cache_ratio: float | None = None
    calibration: tuple[str, ...] = ()
    calibration_tokens: int = 28672
    seq_len: int | None = None
    queries: int = 128
    seed: int = 0
    device: str = "auto"
    target: str = "auto"
    engine: str = "any"
    dtype: str = "auto"
    max_shard_size: str = "5GB"
    stream: bool = False
    overwrite: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise InputError(f"--target {self.target}: expected {', '.join(TARGETS[:-1])} or {TARGETS[-1]}")
        if self.engine not in ENGINES:
            raise InputError(f"--engine {self.engine}: expected {' or '.join(ENGINES)}")
        if self.dtype == "float16" and self.target != "native":
            raise InputError(
                "--dtype float16: the latent norm is made neutral with values float16 cannot hold; "
                "use bfloat16 or float32, or --target native"
            )
        if self.dtype not in {"auto", *OUTPUT_DTYPES}:
            raise InputError(f"--dtype {self.dtype}: expected auto, bfloat16 or float32 (--target native: or float16)")
        if self.kv_rank is not None and self.kv_rank < 1:
            raise InputError(f"--kv-rank {self.kv_rank}: expected a positive number")
        if self.rope_dim is not None and (self.rope_dim < 0 or self.rope_dim % 2):
            raise InputError(f"--rope-dim {self.rope_dim}: expected a positive even number (two values a frequency)")
        given = [self.cache_values is not None, self.cache_ratio is not None]
        if sum([*given, self.kv_rank is not None or self.rope_dim is not None]) > 1:
            raise InputError("expected one of --cache-values, --cache-ratio, and --kv-rank with --rope-dim")
        if self.cache_values is not None and self.cache_values < 3:
            raise InputError(f"--cache-values {self.cache_values}: expected at least 3")
        if self.cache_ratio is not None and not 0 < self.cache_ratio < 1:
            raise InputError(f"--cache-ratio {self.cache_ratio}: expected a share between 0 and 1")
        if self.seq_len is not None and self.seq_len < 16:
            raise InputError(f"--seq-len {self.seq_len}: expected at least 16")
        if self.queries < 1:
            raise InputError(f"queries {self.queries}: expected at least 1")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"--seed {self.seed}: expected 0 to 2^63 - 1")
        resolve_device(self.device)

    def window(self, max_positions: int) -> int:
        """Tokens of a calibration window for a model that takes `max_positions`.

        Raises:
            InputError: the model does not take as many, or `calibration_tokens` are fewer.
        """
        length = self.seq_len or min(DEFAULT_WINDOW, max_positions)
        if length > max_positions:
            raise InputError(f"--seq-len {length}: the model takes at most {max_positions} positions")
        if self.calibration_tokens < length:
            raise InputError(
                f"--calibration-tokens {self.calibration_tokens}: expected at least one window, --seq-len {length}"
            )
        return length

    @property
    def torch_device(self) -> torch.device:
        """The device to compute on."""
        return resolve_device(self.device)

    @property
    def output_path(self) -> Path:
        """Where the checkpoint goes."""
        assert self.output is not None
        return Path(self.output)
