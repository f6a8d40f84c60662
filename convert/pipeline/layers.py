"""Pass 2: every layer measured, factorized, checked and written."""

from __future__ import annotations

import torch
from torch import Tensor

from latentfold.convert.attention.latent import LatentAttention
from latentfold.convert.calibrate.layer import LayerCalibration
from latentfold.convert.config import ConversionConfig
from latentfold.convert.factorize.layer import convert_layer
from latentfold.convert.families.reading import layer_attention
from latentfold.convert.model.streamed import StreamedModel
from latentfold.convert.model.walk import observe
from latentfold.convert.plan.plan import ConversionPlan
from latentfold.convert.targets.target import Copied, Ladder
from latentfold.convert.text.windows import Windows
from latentfold.convert.verify.written import MemoryTarget
from latentfold.convert.write.writer import CheckpointWriter


def write_layers(
    model: StreamedModel,
    plan: ConversionPlan,
    chosen: dict[str, Ladder],
    windows: Windows,
    config: ConversionConfig,
    writer: CheckpointWriter,
    target: MemoryTarget,
) -> None:
    """Pass 2: measure, factorize, check and write every layer that is not written yet."""

    class LayerObserver(LayerCalibration):
        def __init__(self, index: int) -> None:
            self.index = index
            self.ladder = chosen[plan.target.kinds[index]]
            super().__init__(
                *layer_attention(model, plan.family, plan.shape, index),
                windows.tokens.shape,
                queries=config.queries,
                seed=config.seed,
            )

        def finish(self) -> None:
            slots = self.ladder.frequencies.to(model.device)
            converted = convert_layer(self.result(), slots, plan.kv_rank)
            tensors = layer_tensors(plan, self.ladder, self.index, converted)
            layout_error = target.take(self.index, tensors, converted, slots)
            record = {"predicted_error": converted.predicted_error, "layout_error": layout_error}
            writer.write(f"layer {self.index}", tensors, record)

    def visit(index: int) -> LayerObserver | None:
        if writer.done(f"layer {index}"):
            target.skip(index)
            return None
        return LayerObserver(index)

    observe(model, windows.tokens, visit, description="2/2 converting", progress=config.progress)


def layer_tensors(plan: ConversionPlan, ladder: Ladder, index: int, converted: LatentAttention) -> dict[str, Tensor]:
    """Everything the target stores of one layer, in its stored dtype."""
    attention = plan.target.attention(index, converted, ladder, plan.checkpoint)
    tensors = {name: tensor.to("cpu", plan.dtype) for name, tensor in attention.items()}
    return tensors | _copies(plan, plan.target.copied(index))


def _copies(plan: ConversionPlan, copied: dict[str, Copied]) -> dict[str, Tensor]:
    """Tensors that go over as they are, but for the residual's factor, rounded once."""
    tensors = {}
    for name, copy in copied.items():
        part, parts = copy.part
        tensor = plan.checkpoint.tensor(copy.source).chunk(parts)[part]
        if copy.to_residual:
            tensor = tensor.to(torch.float32) * plan.target.residual
        tensors[name] = tensor.to(plan.dtype)
    return tensors
