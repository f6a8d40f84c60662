"""A record of a conversion, made up but plausible: SmolLM2-135M at a third of its cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from latentfold.convert.attention.sizes import LayerSize
from latentfold.convert.write.recipe import (
    CalibrationRecord,
    Change,
    CheckRecord,
    HealingPoint,
    HealingRecord,
    LadderRecord,
    LayerRecord,
    OptionsRecord,
    Probe,
    Recipe,
    SourceRecord,
)

LAYERS = 30

RECIPE = Recipe(
    latentfold="0.1.0",
    source=SourceRecord(
        name="org/Small-Model",
        revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
        model_type="llama",
        tensors=272,
        license="apache-2.0",
        language=["en", "de"],
    ),
    options=OptionsRecord(
        kv_rank=96,
        rope_dim=32,
        cache_values=None,
        cache_ratio=None,
        calibration=("/home/me/my texts.txt",),
        calibration_tokens=8192,
        seq_len=2048,
        queries=128,
        seed=3,
        device="auto",
        target="deepseek",
        engine="any",
        dtype="bfloat16",
        max_shard_size="5GB",
    ),
    sizes=(LayerSize(96, 32),) * LAYERS,
    calibration=CalibrationRecord(("/home/me/my texts.txt",), (4, 2048), "c" * 64),
    residual_scale=0.25,
    versions={"torch": "2.13.0", "transformers": "5.24.0"},
    cache_values=Change(384 * LAYERS, 128 * LAYERS),
    parameters=Change(134515008, 166700160),
    untied_parameters=28311552,
    ladder=LadderRecord({"rope_type": "default", "rope_theta": 100000.0}, 0.01, ()),
    split=None,
    layers=(LayerRecord(0.01, 0.02, 0.03, 0.04),) * LAYERS,
    check=CheckRecord(1e-3, 1e-7, Probe((1, 2), (0.5, 0.25))),
    files={"model.safetensors": "f" * 64},
)

HEALING = HealingRecord(
    latentfold="0.1.0",
    versions={"torch": "2.13.0", "transformers": "5.24.0"},
    teacher="org/Small-Model",
    revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
    texts=("/home/me/my texts.txt",),
    sha256="a" * 64,
    seq_len=1024,
    batch_tokens=2048,
    train="all",
    rate=1e-3,
    seed=7,
    dtype="bfloat16",
    minutes=10.0,
    curve=tuple(
        HealingPoint(step, 2048 * step, 3.85 * step, divergence, nll)
        for step, divergence, nll in (
            (0, 0.5367, 3.6269),
            (25, 0.4203, 3.4372),
            (52, 0.3731, 3.3901),
            (78, 0.3684, 3.3829),
            (104, 0.3271, 3.3542),
            (130, 0.3193, 3.3468),
            (156, 0.3197, 3.3471),
        )
    ),
    best=5,
)
"""Ten minutes, the last of which gained nothing."""


def recipe_of(**source: Any) -> Recipe:
    """`RECIPE` of another source."""
    return replace(RECIPE, source=replace(RECIPE.source, **source))
