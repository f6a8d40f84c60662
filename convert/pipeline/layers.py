"""Pass 2: every layer measured, factorized, checked and written."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from latentfold.convert.calibrate.layer import calibrate
from latentfold.convert.factorize.layer import convert_layer
from latentfold.convert.families.reading import layer_attention
from latentfold.convert.model.walk import Walk
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
    plan, model, tokens = job.plan, job.model, job.windows.tokens
    for visit in Walk(model, tokens, progress=progress, stage="2/2 converting"):
        index, size, step = visit.index, plan.sizes[visit.index], f"layer {visit.index}"
        if writer.done(step):
            target.advance(index)
            continue
        tensors, record = copies(plan, plan.target.copied(index)), None
        if size is not None:
            weights, pairs = layer_attention(model, plan.family, plan.shape, index)
            calls = visit.observe(plan.family.attention)
            layer = calibrate(calls, weights, pairs, tokens.shape, plan.request.sampling)
            ladder = chosen[plan.target.kind(index)]
            slots = ladder.frequencies.to(model.device)
            converted, _ = convert_layer(layer, size.kv_rank, frequencies=slots)
            attention = plan.target.attention(index, converted, ladder, plan.checkpoint)
            tensors = {name: tensor.to("cpu", plan.target.dtype) for name, tensor in attention.items()} | tensors
            layout_error = target.take(index, tensors, converted, slots)
            record = {"predicted_error": converted.predicted_error, "layout_error": layout_error}
        writer.write(step, tensors, record)
        if size is None:
            target.advance(index)


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
