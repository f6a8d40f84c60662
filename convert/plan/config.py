"""What a conversion is asked to do, validated once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from latentfold.convert.attention.sizes import LayerSize
from latentfold.convert.calibrate.probe import Sampling
from latentfold.convert.choices import ENGINES
from latentfold.convert.dtypes import DTYPES
from latentfold.convert.errors import InputError
from latentfold.convert.model.devices import resolve_device
from latentfold.convert.targets.registry import TARGETS
from latentfold.convert.text.windows import DEFAULT_WINDOW


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
        sizes: the size of each layer, None for one that is left as it is. Instead of all these.
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
    """

    source: str
    output: str | None
    revision: str | None = None
    token: str | None = field(default=None, repr=False)  # a secret
    kv_rank: int | None = None
    rope_dim: int | None = None
    cache_values: int | None = None
    cache_ratio: float | None = None
    sizes: tuple[LayerSize | None, ...] | None = None
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

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("target", self.target, ("auto", *TARGETS)),
            ("engine", self.engine, ENGINES),
            ("dtype", self.dtype, ("auto", *DTYPES)),
        ):
            if value not in choices:
                raise InputError(f"{name} {value}: expected {', '.join(choices[:-1])} or {choices[-1]}")
        if self.kv_rank is not None and self.kv_rank < 1:
            raise InputError(f"kv_rank {self.kv_rank}: expected a positive number")
        if self.rope_dim is not None and (self.rope_dim < 0 or self.rope_dim % 2):
            raise InputError(f"rope_dim {self.rope_dim}: expected a positive even number (two values a frequency)")
        given = [value is not None for value in (self.cache_values, self.cache_ratio, self.sizes)]
        if sum([*given, self.kv_rank is not None or self.rope_dim is not None]) > 1:
            raise InputError("expected one of cache_values, cache_ratio, sizes, and kv_rank with rope_dim")
        if self.cache_values is not None and self.cache_values < 3:
            raise InputError(f"cache_values {self.cache_values}: expected at least 3")
        if self.cache_ratio is not None and not 0 < self.cache_ratio < 1:
            raise InputError(f"cache_ratio {self.cache_ratio}: expected a share between 0 and 1")
        if self.seq_len is not None and self.seq_len < 16:
            raise InputError(f"seq_len {self.seq_len}: expected at least 16")
        if self.queries < 1:
            raise InputError(f"queries {self.queries}: expected at least 1")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed {self.seed}: expected 0 to 2^63 - 1")
        resolve_device(self.device)

    def window(self, max_positions: int) -> int:
        """Tokens of a calibration window for a model that takes `max_positions`.

        Raises:
            InputError: the model does not take as many, or `calibration_tokens` are fewer.
        """
        length = self.seq_len or min(DEFAULT_WINDOW, max_positions)
        if length > max_positions:
            raise InputError(f"seq_len {length}: the model takes at most {max_positions} positions")
        if self.calibration_tokens < length:
            raise InputError(
                f"calibration_tokens {self.calibration_tokens}: expected at least one window, seq_len {length}"
            )
        return length

    @property
    def sampling(self) -> Sampling:
        """Which queries are looked at."""
        return Sampling(self.queries, self.seed)

    @property
    def torch_device(self) -> torch.device:
        """The device to compute on."""
        return resolve_device(self.device)

    @property
    def calibration_files(self) -> list[Path]:
        """The texts to calibrate on, where they are the user's own."""
        return [Path(file) for file in self.calibration]

    @property
    def output_path(self) -> Path:
        """Where the checkpoint goes."""
        assert self.output is not None
        return Path(self.output)
