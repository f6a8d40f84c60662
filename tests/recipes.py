"""A record of a conversion, made up but plausible: SmolLM2-135M at a third of its cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from latentfold.convert.attention.sizes import LayerSize
from latentfold.convert.write.recipe import (
    CalibrationRecord,
    Change,
    CheckRecord,
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


def recipe_of(**source: Any) -> Recipe:
    """`RECIPE` of another source."""
    return replace(RECIPE, source=replace(RECIPE.source, **source))
