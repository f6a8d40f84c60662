"""What an evaluation is asked to do, validated once."""

from __future__ import annotations

from dataclasses import dataclass, field

from latentfold.convert.dtypes import DTYPES
from latentfold.convert.errors import InputError


@dataclass(frozen=True)
class EvaluationConfig:
    """Options of `evaluate`; every default is what the command line uses.

    Attributes:
        text: text or jsonl files, or data sets as `hf:DATASET[:CONFIG[:SPLIT]]`; default: the opening of a novel
            bundled for evaluation only.
        seq_len: tokens of a window, 4096 or what the models take by default; perplexity is reported by position.
        windows: windows of each text, at most.
        skip: tokens to pass over at the start of each text; default 0, and 1000 of the bundled novel.
        continuations: let both models continue `prompts` greedily (default: four bundled ones). Loads them whole.
        speed: time prefill and decoding over `contexts` (tokens; default 512 to the window length, doubling) and
            `batches` (sequences), in the dtype the models are stored in. Loads them whole.
        tasks: names of lm-evaluation-harness tasks; `include_path`: a folder with more of them; `limit`: samples of
            each, at most; `batch_size`: requests at a time. Loads the models whole.
        device, dtype: where and in what the models run.
        seed: of the random tokens that speed is measured with, and of the harness.
        revision: of the original, if it is a Hub id.
        stream: keep no copy of the original: fetch its shards when they are needed and delete them.
        token: Hub token.

    Raises:
        InputError: an option means nothing, alone or beside the others.
    """

    text: tuple[str, ...] = ()
    seq_len: int | None = None
    windows: int = 4
    skip: int | None = None
    continuations: bool = False
    prompts: tuple[str, ...] = ()
    speed: bool = False
    contexts: tuple[int, ...] = ()
    batches: tuple[int, ...] = (1,)
    tasks: tuple[str, ...] = ()
    include_path: str | None = None
    limit: int | None = None
    batch_size: int = 1
    device: str = "auto"
    dtype: str = "float32"
    seed: int = 0
    revision: str | None = None
    stream: bool = False
    token: str | None = field(default=None, repr=False)  # a secret

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InputError(f"dtype {self.dtype}: expected {', '.join(DTYPES)}")
        if self.seq_len is not None and self.seq_len < 16:
            raise InputError(f"seq_len {self.seq_len}: expected at least 16 tokens")
        if self.windows < 1:
            raise InputError(f"windows {self.windows}: expected at least 1 window")
        if (self.skip or 0) < 0:
            raise InputError(f"skip {self.skip}: expected at least 0 skipped")
        counts = {
            "contexts": self.contexts,
            "batches": self.batches,
            "batch_size": (self.batch_size,),
            "limit": () if self.limit is None else (self.limit,),
        }
        for option, given in counts.items():
            for count in given:
                if not 1 <= count < 2**31:
                    raise InputError(f"{option} {count}: expected {'at least 1' if count < 1 else 'less than 2^31'}")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed {self.seed}: expected 0 to 2^32 - 1")
        idle = {
            "`prompts` is for `continuations`": self.prompts and not self.continuations,
            "`contexts` is for `speed`": self.contexts and not self.speed,
            "`batches` is for `speed`": tuple(self.batches) != (1,) and not self.speed,
            "`include_path` is for `tasks`": self.include_path and not self.tasks,
            "`limit` is for `tasks`": self.limit is not None and not self.tasks,
            "`batch_size` is for `tasks`": self.batch_size != 1 and not self.tasks,
        }
        for message, ignored in idle.items():
            if ignored:
                raise InputError(message)
        if self.stream and (self.continuations or self.speed or self.tasks):
            raise InputError("stream: continuations, speed and tasks need the whole original; leave it out")
