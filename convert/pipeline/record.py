"""What a conversion leaves in latentfold.json."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import version
from typing import Any

import torch

from latentfold.convert.attention.sizes import uniform
from latentfold.convert.dtypes import dtype_name
from latentfold.convert.files import public_name
from latentfold.convert.plan.plan import ConversionPlan
from latentfold.convert.source.licence import card_metadata
from latentfold.convert.targets.target import Ladder
from latentfold.convert.text.windows import Windows
from latentfold.convert.write.recipe import (
    Beginnings,
    CalibrationRecord,
    Change,
    CheckRecord,
    LadderCandidate,
    LadderRecord,
    LayerRecord,
    OptionsRecord,
    Recipe,
    SizeRecord,
    SourceRecord,
)

CARD_KEYS = ("license", "license_name", "license_link", "language")


def beginnings(plan: ConversionPlan, windows: Windows) -> Beginnings:
    """Everything the written tensors depend on."""
    card = card_metadata(plan.checkpoint.folder)
    count, length = windows.tokens.shape
    libraries = {name: version(name) for name in ("torch", "transformers", "safetensors")}
    return Beginnings(
        latentfold=version("latentfold"),
        source=SourceRecord(
            name=public_name(plan.checkpoint.name),
            revision=plan.checkpoint.revision,
            model_type=plan.config.model_type,
            tensors=len(plan.checkpoint.headers),
            **{key: card.get(key) for key in CARD_KEYS},
        ),
        options=options(plan),
        sizes=plan.sizes,
        calibration=CalibrationRecord(
            texts=tuple(map(public_name, windows.sources)), windows=(count, length), sha256=windows.sha256
        ),
        residual_scale=plan.target.residual,
        versions=libraries | {"python": platform.python_version()},
    )


def options(plan: ConversionPlan) -> OptionsRecord:
    """The options of a conversion, every choice made but the one that a survey makes."""
    request, size = plan.request, uniform(plan.sizes)
    asked: dict[str, Any] = {field.name: getattr(request, field.name, None) for field in fields(OptionsRecord)}
    made: dict[str, Any] = {
        "kv_rank": size and size.kv_rank,
        "rope_dim": size and size.rope_dim,
        "calibration": tuple(map(public_name, request.calibration)),
        "seq_len": plan.seq_len,
        "target": plan.target.name,
        "engine": plan.target.engine,
        "dtype": dtype_name(plan.target.dtype),
    }
    return OptionsRecord(**asked | made)


def recipe(
    start: Beginnings,
    plan: ConversionPlan,
    chosen: Mapping[str, Ladder],
    records: Mapping[str, Any],
    check: CheckRecord,
    files: dict[str, str],
) -> Recipe:
    """The whole record.

    Args:
        records: what the writer noted of each step.
    """
    ladders = records["ladder"]
    layers = [records[f"layer {i}"] for i in range(plan.shape.num_layers)]
    source, written = (
        {name: torch.Size(shape).numel() for name, shape in shapes.items()}
        for shapes in (plan.target.expected, plan.target.tensors)
    )
    split = records.get("split")
    return Recipe(
        **{field.name: getattr(start, field.name) for field in fields(Beginnings)},
        cache_values=Change(*plan.cache_values),
        parameters=Change(sum(source.values()), sum(written.values())),
        untied_parameters=sum(count for name, count in written.items() if name in plan.target.tied),
        ladder=LadderRecord(
            rope_parameters=plan.target.rope_parameters(chosen),
            expected_rotation_error=sum(scored[0][2] for scored in ladders.values()),
            candidates=tuple(
                LadderCandidate(label, score, kind if len(ladders) > 1 else None)
                for kind, scored in ladders.items()
                for _, label, score in scored
            ),
        ),
        split=split and tuple(SizeRecord(**size) for size in split),
        layers=tuple(layer and LayerRecord(**layer["predicted_error"]) for layer in layers),
        check=check,
        files=files,
    )
