"""Pass 2: every layer measured, factorized, checked and written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from latentfold.convert.calibrate.layer import calibrate
from latentfold.convert.factorize.layer import convert_layer
from latentfold.convert.families.reading import layer_attention
from latentfold.convert.model.walk import Visit, Walk
from latentfold.convert.pipeline.prepare import Job
from latentfold.convert.plan.plan import ConversionPlan
from latentfold.convert.progress import Progress
from latentfold.convert.targets.target import Copied, Ladder
from latentfold.convert.verify.written import MemoryTarget
from latentfold.convert.write.writer import CheckpointWriter


def write_layers(
    job: Job, chosen: Mapping[str, Ladder], writer: CheckpointWriter, target: MemoryTarget, progress: Progress
) -> None:
    """Measure, factorize, check and write every layer that is not written yet."""
    plan = job.plan
    for visit in Walk(job.model, job.windows.tokens, progress=progress, stage="2/2 converting"):
        index, step = visit.index, f"layer {visit.index}"
        if writer.done(step):
            target.advance(index)
        elif plan.sizes[index] is None:
            writer.write(step, copies(plan, plan.target.copied(index)))
            target.advance(index)
        else:
            writer.write(step, *_converted(job, visit, chosen[plan.target.kind(index)], target))


def _converted(
    job: Job, visit: Visit, ladder: Ladder, target: MemoryTarget
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """One layer's tensors, and what is to be noted of it.

    A function of its own: what was learned of a layer is gone before the next one's turn.
    """
    plan, index, tokens = job.plan, visit.index, job.windows.tokens
    size = plan.sizes[index]
    assert size is not None
    weights, pairs = layer_attention(job.model, plan.family, plan.shape, index)
    layer = calibrate(visit.observe(plan.family.attention), weights, pairs, tokens.shape, plan.request.sampling)
    slots = ladder.frequencies.to(job.model.device)
    converted, _ = convert_layer(layer, size.kv_rank, frequencies=slots)
    attention = plan.target.attention(index, converted, ladder, plan.checkpoint)
    tensors = {name: tensor.to("cpu", plan.target.dtype) for name, tensor in attention.items()}
    tensors |= copies(plan, plan.target.copied(index))
    layout_error = target.take(index, tensors, converted, slots)
    return tensors, {"predicted_error": converted.predicted_error, "layout_error": layout_error}


def copies(plan: ConversionPlan, copied: Mapping[str, Copied]) -> dict[str, Tensor]:
    """Tensors that go over as they are, but for the residual's factor, rounded once."""
    tensors = {}
    for name, copy in copied.items():
        part, parts = copy.part
        tensor = plan.checkpoint.tensor(copy.source).chunk(parts)[part]
        if copy.to_residual:
            tensor = tensor.to(torch.float32) * plan.target.residual
        tensors[name] = tensor.to(plan.target.dtype)
    return tensors
