"""The conversion itself: two passes over the source, one layer in memory at a time.

Pass 1 looks only at rotations and chooses frequencies: one ladder for the whole model, or what the target can hold.
Pass 2 measures each layer, factorizes it and writes it. Both run the *original* layers, so no layer is calibrated on
another's error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from latentfold.convert.attention.sizes import LayerSize
from latentfold.convert.pipeline.estimate import SizeEstimate, survey
from latentfold.convert.pipeline.ladders import Scored, score_ladders
from latentfold.convert.pipeline.layers import copies, write_layers
from latentfold.convert.pipeline.prepare import Job
from latentfold.convert.pipeline.record import beginnings, recipe
from latentfold.convert.pipeline.small_files import write_config, write_source_files
from latentfold.convert.progress import Progress
from latentfold.convert.targets.target import Ladder
from latentfold.convert.verify.reloaded import RELOAD_TOLERANCE, probe_of, reload_difference
from latentfold.convert.verify.written import MemoryTarget
from latentfold.convert.write.output import locked_output
from latentfold.convert.write.recipe import RECIPE, CheckRecord, Recipe, read_recipe
from latentfold.convert.write.writer import CheckpointWriter


@dataclass(frozen=True)
class ConversionResult:
    """What a conversion wrote.

    Attributes:
        path: the checkpoint folder.
        recipe: the contents of its latentfold.json.
    """

    path: Path
    recipe: Recipe


def run(job: Job, progress: Progress) -> ConversionResult:
    """Do the work of a prepared conversion; continues an interrupted run of the same recipe.

    Raises:
        InputError: another run holds the output, there is no room for it, it holds an interrupted run of other
            options, or a tensor of the source holds infinite or undefined values.
        RuntimeError: attention computes something else than its family's description says, or the written checkpoint
            does not give the logits of the tensors it was written from; nothing is left looking finished.
    """
    request, source = job.plan.request, job.plan.checkpoint.folder
    out, needed = request.output_path, request.calibration_files
    with locked_output(out, source, overwrite=request.overwrite, needed=needed):
        return _run(job, out, progress)


def _run(job: Job, out: Path, progress: Progress) -> ConversionResult:
    request = job.plan.request
    job, estimates = _sized(job, progress)
    start = beginnings(job.plan, job.windows)
    key = asdict(start) | {"source_files": job.plan.checkpoint.stamps()}
    # whichever runs first, survey or pass 1, has read every tensor once before anything is written
    begun = CheckpointWriter.continues(out, key) or (CheckpointWriter.is_interrupted(out) and not request.overwrite)
    scored = None if estimates or begun else score_ladders(job, progress)
    writer = CheckpointWriter(out, job.plan.tensors, job.plan.shards, key, overwrite=request.overwrite)
    if writer.moving:
        writer.finish()
        return ConversionResult(out, read_recipe(out))
    write_source_files(job.plan, job.tokenizer, writer)
    if estimates:
        writer.write("split", {}, [asdict(size) for size in estimates])
    chosen = _ladders(job, writer, scored, progress)
    write_config(job.plan, chosen, writer)
    if not writer.done("outer"):
        writer.write("outer", copies(job.plan, job.plan.target.outer()))
    target = MemoryTarget(job.plan.target, chosen, writer, device=request.torch_device, seed=request.seed)
    write_layers(job, chosen, writer, target, progress)
    writer.write_index()
    check = _checked(job, writer, target)
    found = recipe(start, job.plan, chosen, writer.records, check, writer.hashes())
    writer.write_text(RECIPE, json.dumps(found.to_dict(), indent=2) + "\n")
    writer.finish()
    return ConversionResult(out, found)


def _sized(job: Job, progress: Progress) -> tuple[Job, list[SizeEstimate]]:
    """The job at the size that a survey finds best, where one was left to choose."""
    plan = job.plan
    if not plan.candidates:
        return job, []
    estimates: list[SizeEstimate] = []
    size = _interrupted_size(job)
    if size is None:
        estimates = survey(job, plan.candidates, progress)
        cheapest = min(estimates, key=lambda size: size.expected_error)
        size = LayerSize(cheapest.kv_rank, cheapest.rope_dim)
    if size in plan.candidates:  # else the writer refuses an interrupted run of other options
        job = replace(job, plan=plan.at(size))
    return job, estimates


def _interrupted_size(job: Job) -> LayerSize | None:
    """The size of an interrupted run that is to be continued: no second survey, nor one before a refusal."""
    request = job.plan.request
    key = CheckpointWriter.interrupted_key(request.output_path)
    if key is None or request.overwrite:
        return None
    return LayerSize(key["options"]["kv_rank"], key["options"]["rope_dim"])


def _ladders(job: Job, writer: CheckpointWriter, scored: Scored | None, progress: Progress) -> Mapping[str, Ladder]:
    """The ladder of each kind of layer, as pass 1 found it, now or in an interrupted run, or is still to find it."""
    if not writer.done("ladder"):
        found = scored or score_ladders(job, progress)
        record = {
            kind: [(ladder.data, str(ladder), score) for ladder, score in scored] for kind, scored in found.items()
        }
        writer.write("ladder", {}, record)
    target = job.plan.target
    return {kind: target.ladder(kind, scored[0][0]) for kind, scored in writer.records["ladder"].items()}


def _checked(job: Job, writer: CheckpointWriter, target: MemoryTarget) -> CheckRecord:
    """What the written checkpoint is held to.

    Raises:
        RuntimeError: reloaded, it gives other logits than its tensors gave when they were written.
    """
    logits = target.logits()
    difference = reload_difference(writer.folder, target.tokens, logits, job.plan.request.torch_device)
    if not difference <= RELOAD_TOLERANCE:
        raise RuntimeError(
            f"{writer.out}: reloaded logits differ from those of the written tensors by {difference:.1e} "
            f"(allowed {RELOAD_TOLERANCE:.0e}); the checkpoint was not finished"
        )
    layers = [writer.records[f"layer {i}"] for i in job.plan.target.converted]
    return CheckRecord(
        largest_layout_error=max(layer["layout_error"] for layer in layers),
        reload_logit_difference=difference,
        probe=probe_of(target.tokens, logits),
    )
