"""Options from Python: the same limits as on the command line, named as the functions have them."""

from __future__ import annotations

from typing import Any

import pytest

from latentfold.convert import InputError
from latentfold.convert.plan.config import ConversionConfig
from latentfold.eval import EvaluationConfig

BAD: list[tuple[dict[str, Any], str]] = [
    ({"target": "bogus"}, r"^target bogus: expected auto, deepseek or native$"),
    ({"engine": "vllm"}, r"^engine vllm: expected any or transformers$"),
    ({"dtype": "bf16"}, r"^dtype bf16: expected auto, bfloat16, float32 or float16$"),
    ({"kv_rank": 0}, r"^kv_rank 0: expected a positive number$"),
    ({"rope_dim": 3}, r"^rope_dim 3: expected a positive even number"),
    ({"rope_dim": -2}, r"^rope_dim -2: expected a positive even number"),
    ({"cache_values": 2}, r"^cache_values 2: expected at least 3$"),
    ({"cache_ratio": 1.0}, r"^cache_ratio 1\.0: expected a share between 0 and 1$"),
    ({"cache_ratio": float("nan")}, r"^cache_ratio nan: expected a share between 0 and 1$"),
    ({"cache_ratio": 0.5, "kv_rank": 8}, r"^expected one of cache_values, cache_ratio, sizes, and kv_rank"),
    ({"seq_len": 8}, r"^seq_len 8: expected at least 16$"),
    ({"queries": 0}, r"^queries 0: expected at least 1$"),
    ({"seed": -1}, r"^seed -1: expected 0 to"),
    ({"device": "bogus"}, r"^device bogus: not available here"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[str(options) for options, _ in BAD])
def test_limits(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ConversionConfig("source", None, **options)


def test_no_repr_shows_the_token() -> None:
    """Configs end up in logs and notebooks."""
    for config in (ConversionConfig("a", None, token="hf_secret"), EvaluationConfig(token="hf_secret")):
        assert config.token == "hf_secret" and "hf_secret" not in repr(config)
