"""`latentfold.json`: everything it takes to repeat a conversion, and what it found."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from latentfold.convert.checkpoint import PARTIAL, CheckpointWriter, sha256
from latentfold.convert.config import ConversionConfig
from latentfold.convert.corpus import Windows
from latentfold.convert.errors import InputError
from latentfold.convert.plan import ConversionPlan
from latentfold.convert.source import card_metadata, public_name, read_json
from latentfold.convert.targets.target import Ladder

RECIPE = "latentfold.json"


def fingerprint(recipe: dict[str, Any]) -> str:
    """SHA-256 over the names and hashes of the checkpoint's files: which conversion an evaluation speaks of."""
    return hashlib.sha256(json.dumps(recipe["files"], sort_keys=True).encode()).hexdigest()


def fingerprint_now(folder: Path, recipe: dict[str, Any]) -> str:
    """`fingerprint` of the files as they are: another one where they were changed after the conversion."""
    names = [name for name in recipe["files"] if (folder / name).is_file()]
    return fingerprint({"files": {name: sha256(folder / name) for name in names}})


def read_recipe(folder: Path) -> dict[str, Any]:
    """The record of a finished conversion.

    Raises:
        InputError: no such folder, not a converted checkpoint, an unfinished one, or a damaged record.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    if (folder / PARTIAL).exists():
        raise InputError(f"{folder}: an unfinished conversion; repeat its command to finish it")
    if not (folder / RECIPE).is_file():
        raise InputError(f"{folder}: no {RECIPE}; expected a folder that latentfold convert wrote")
    recipe = read_json(folder / RECIPE)
    missing = [key for key in ("source", "options", "calibration", "check", "files") if key not in recipe]
    if missing:
        raise InputError(f"{folder / RECIPE}: has no {', '.join(missing)}; convert again")
    if not all(isinstance(recipe[key], dict) for key in ("source", "options", "calibration", "check", "files")):
        raise InputError(f"{folder / RECIPE}: not the record of a conversion; convert again")
    return recipe


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
