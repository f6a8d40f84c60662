"""What a conversion leaves in latentfold.json."""

from __future__ import annotations

import platform
from dataclasses import fields
from importlib.metadata import version
from typing import Any

import torch

from latentfold.convert.config import ConversionConfig
from latentfold.convert.files import public_name
from latentfold.convert.plan.plan import ConversionPlan
from latentfold.convert.source.licence import card_metadata
from latentfold.convert.targets.target import Ladder
from latentfold.convert.text.windows import Windows
from latentfold.convert.write.writer import CheckpointWriter


def starting_recipe(config: ConversionConfig, plan: ConversionPlan, windows: Windows) -> dict[str, Any]:
    """Everything the written tensors depend on."""
    hidden = {"token", "progress", "overwrite", "output", "source", "revision", "stream"}
    options = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in hidden}
    headers = plan.checkpoint.headers
    card = card_metadata(plan.checkpoint.folder)
    return {
        "latentfold": version("latentfold"),
        "source": {
            "name": public_name(plan.checkpoint.name),
            "revision": plan.checkpoint.revision,
            "model_type": plan.config.model_type,
            "tensors": len(headers),
        }
        | {key: card.get(key) for key in ("license", "license_name", "license_link", "language")},
        "options": options
        | {
            "calibration": [public_name(name) for name in options["calibration"]],
            "target": plan.target.name,
            "engine": plan.target.engine,
            "kv_rank": plan.kv_rank,
            "rope_dim": plan.rope_dim,
            "seq_len": plan.seq_len,
            "dtype": str(plan.dtype).removeprefix("torch."),
        },
        "calibration": {
            "texts": [public_name(name) for name in windows.sources],
            "windows": list(windows.tokens.shape),
            "sha256": windows.sha256,
        },
        "residual_scale": plan.target.residual,
        "versions": {name: version(name) for name in ("torch", "transformers", "safetensors")}
        | {"python": platform.python_version()},
    }


def finished_recipe(
    recipe: dict[str, Any], plan: ConversionPlan, chosen: dict[str, Ladder], writer: CheckpointWriter
) -> dict[str, Any]:
    """The recipe with what the conversion found."""
    layers = [writer.records[f"layer {i}"] for i in range(plan.shape.num_layers)]
    ladders = writer.records["ladder"]
    source = sum(torch.Size(shape).numel() for shape in plan.target.expected.values())
    converted = sum(torch.Size(t.shape).numel() for t in plan.tensors.values())
    return recipe | {
        "cache_values": {"source": plan.shape.cache_values, "converted": plan.cache_values},
        "parameters": {"source": source, "converted": converted},
        "ladder": {
            "rope_parameters": plan.target.rope_parameters(chosen),
            "expected_rotation_error": sum(scored[0][2] for scored in ladders.values()),
            "candidates": [
                {"rope": label, "expected_rotation_error": score} | ({"layers": kind} if len(ladders) > 1 else {})
                for kind, scored in ladders.items()
                for _, label, score in scored
            ],
        },
        "split": writer.records.get("split"),
        "layers": [record["predicted_error"] for record in layers],
        "check": {"largest_layout_error": max(record["layout_error"] for record in layers)},
    }
