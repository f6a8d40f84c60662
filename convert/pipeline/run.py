"""The conversion itself: two passes over the source, one layer in memory at a time.

Pass 1 looks only at rotations and chooses frequencies: one ladder for the whole model, or what the target can hold.
Pass 2 measures each layer, factorizes it and writes it. Both run the *original* layers, so no layer is calibrated on
another's error.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from latentfold.convert.config import ConversionConfig
from latentfold.convert.model.streamed import StreamedModel
from latentfold.convert.pipeline.estimate import SizeEstimate, survey
from latentfold.convert.pipeline.ladders import score_ladders
from latentfold.convert.pipeline.layers import _copies, write_layers
from latentfold.convert.pipeline.prepare import prepare
from latentfold.convert.pipeline.record import finished_recipe, starting_recipe
from latentfold.convert.pipeline.small_files import write_config, write_source_files
from latentfold.convert.plan.plan import ConversionPlan, make_plan
from latentfold.convert.plan.sizes import candidate_splits
from latentfold.convert.text.windows import Windows
from latentfold.convert.verify.reloaded import RELOAD_TOLERANCE, probe_record, reload_difference
from latentfold.convert.verify.written import MemoryTarget
from latentfold.convert.write.output import locked_output
from latentfold.convert.write.recipe import RECIPE
from latentfold.convert.write.writer import CheckpointWriter


@dataclass(frozen=True)
class ConversionResult:
    """What a conversion wrote.

    Attributes:
        path: the checkpoint folder.
        recipe: the contents of its latentfold.json.
    """

    path: Path
    recipe: dict[str, Any]


def convert_checkpoint(source: str, output: str, **options: Any) -> ConversionResult:
    """Convert an MHA/GQA checkpoint to MLA.

    Args:
        source: folder or Hub id.
        output: folder to write.
        **options: any other field of `ConversionConfig`.

    Returns:
        The path and the recipe (also in the folder's latentfold.json).

    Raises:
        InputError: anything about the input that stands in the way; nothing has been written.
        RuntimeError: attention computes something else than its family's description says, or the written checkpoint
            does not give the logits of the tensors it was written from; nothing is left looking finished.

    Example:
        >>> convert_checkpoint("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-mla", kv_rank=96, rope_dim=32)
    """
    config = ConversionConfig(source=source, output=output, **options)
    plan, tokenizer, windows = prepare(config)
    return run(config, plan, tokenizer, windows)


def run(config: ConversionConfig, plan: ConversionPlan, tokenizer: Any, windows: Windows) -> ConversionResult:
    """Do the work of a prepared conversion; continues an interrupted run of the same recipe.

    Raises:
        InputError: another run holds the output, or there is no room for it.
    """
    with locked_output(config, plan.checkpoint):
        return _run(config, plan, tokenizer, windows)


def _run(config: ConversionConfig, plan: ConversionPlan, tokenizer: Any, windows: Windows) -> ConversionResult:
    model = StreamedModel(plan.checkpoint, plan.config, torch.float32, config.torch_device)
    estimates: list[SizeEstimate] = []
    if candidates := candidate_splits(config, plan.shape):
        sizes = _interrupted_sizes(config)
        if sizes is None:
            estimates = survey(model, plan, windows, config, candidates)
            cheapest = min(estimates, key=lambda size: size.expected_error)
            sizes = cheapest.kv_rank, cheapest.rope_dim
        if sizes in candidates:  # else the writer refuses an interrupted run of other options
            divided = replace(config, kv_rank=sizes[0], rope_dim=sizes[1], cache_values=None, cache_ratio=None)
            plan = make_plan(divided, plan.checkpoint)
    recipe = starting_recipe(config, plan, windows)
    key = recipe | {"source_files": plan.checkpoint.stamps()}
    writer = CheckpointWriter(config.output_path, plan.tensors, plan.shards, key, overwrite=config.overwrite)
    if writer.moving:
        writer.finish()
        return ConversionResult(config.output_path, json.loads((config.output_path / RECIPE).read_text("utf-8")))
    write_source_files(plan, tokenizer, writer)
    if estimates:
        writer.write("split", {}, [asdict(size) for size in estimates])
    if not writer.done("ladder"):
        found = score_ladders(model, plan, windows, config)
        record = {
            kind: [(ladder.data, str(ladder), score) for ladder, score in scored] for kind, scored in found.items()
        }
        writer.write("ladder", {}, record)
    chosen = {kind: plan.target.ladder(kind, scored[0][0]) for kind, scored in writer.records["ladder"].items()}
    write_config(plan, chosen, writer)
    if not writer.done("outer"):
        writer.write("outer", _copies(plan, plan.target.outer()))
    target = MemoryTarget(plan.target, chosen, writer, device=config.torch_device, seed=config.seed)
    write_layers(model, plan, chosen, windows, config, writer, target)
    logits = target.logits()
    recipe = finished_recipe(recipe, plan, chosen, writer)
    writer.write_index()
    difference = reload_difference(writer.folder, target.tokens, logits, config.torch_device)
    if not difference <= RELOAD_TOLERANCE:
        raise RuntimeError(
            f"{config.output}: reloaded logits differ from those of the written tensors by {difference:.1e} "
            f"(allowed {RELOAD_TOLERANCE:.0e}); the checkpoint was not finished"
        )
    recipe["check"] |= {"reload_logit_difference": difference, "probe": probe_record(target.tokens, logits)}
    recipe["files"] = writer.hashes()
    writer.write_text(RECIPE, json.dumps(recipe, indent=2) + "\n")
    writer.finish()
    return ConversionResult(config.output_path, recipe)


def _interrupted_sizes(config: ConversionConfig) -> tuple[int, int] | None:
    """(kv_rank, rope_dim) of an interrupted run that is to be continued: no second survey, nor one before a refusal."""
    key = CheckpointWriter.interrupted_key(config.output_path)
    if key is None or config.overwrite:
        return None
    return key["options"]["kv_rank"], key["options"]["rope_dim"]
