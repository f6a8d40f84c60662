"""Does the target's class compute what was factorized, and does the folder give back what was written?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from latentfold.convert.checkpoint import CheckpointWriter
from latentfold.convert.config import ConversionConfig
from latentfold.convert.errors import InputError
from latentfold.convert.factorize import LatentAttention, latent_attention
from latentfold.convert.layers import StreamedModel, attention_inputs
from latentfold.convert.plan import ConversionPlan, read_config
from latentfold.convert.source import open_checkpoint
from latentfold.convert.targets.target import Ladder

PROBE_TOKENS = 48
LAYOUT_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest relative difference of a written layer's attention output from its own factorization, by stored dtype."""
RELOAD_TOLERANCE = 1e-5
"""Largest relative difference of logits between the written tensors and the reloaded checkpoint (both in float32)."""
PROBE_TOLERANCE = 1e-3
"""The same between a finished checkpoint and its record, which another machine may have made."""


class _Tensors:
    """A few tensors in memory, read as a checkpoint is."""

    def __init__(self) -> None:
        self.headers: dict[str, Any] = {}  # names are not looked up: the writer's are the model's own
        self.held: dict[str, Tensor] = {}

    def tensor(self, name: str) -> Tensor:
        return self.held[name]


class MemoryTarget:
    """The converted model as it is being written: a few tokens follow the conversion, layer by layer.

    Each new layer's attention in the target's class, from the rounded tensors, is compared with its own factorization
    (a wrong layout shows here, at once), and the tokens' logits are what the reloaded checkpoint has to give.
    """

    def __init__(
        self, config: ConversionConfig, plan: ConversionPlan, chosen: dict[str, Ladder], writer: CheckpointWriter
    ) -> None:
        data = plan.target.config(chosen)
        self.dtype, self.residual = plan.dtype, plan.target.residual
        self.tensors, self.writer = _Tensors(), writer
        self.model = StreamedModel(self.tensors, AutoConfig.for_model(**data), torch.float32, config.torch_device)
        generator = torch.Generator().manual_seed(config.seed)
        self.tokens = torch.randint(plan.shape.vocab_size, (1, PROBE_TOKENS), generator=generator)
        self.outer = list(plan.target.outer())
        self.tensors.held = self._outer()
        self.hidden, self.kwargs = self.model.begin(self.tokens)

    def _outer(self) -> dict[str, Tensor]:
        return {name: tensor for prefix in self.outer for name, tensor in self.writer.read(prefix).items()}

    def take(self, index: int, tensors: dict[str, Tensor], converted: LatentAttention, frequencies: Tensor) -> float:
        """Run the tokens through a freshly converted layer; the relative error of its layout.

        Raises:
            RuntimeError: the target's class does not compute what was factorized.
        """
        self.tensors.held = tensors
        with self.model.layer(index) as layer:
            self.hidden, x, output = attention_inputs(layer, self.hidden, self.kwargs[index])
        expected = self.residual * latent_attention(converted, frequencies, x[0])
        error = float((output[0].to(expected) - expected).norm() / expected.norm().clamp_min(1e-30))
        if not error <= LAYOUT_TOLERANCE[self.dtype]:
            raise RuntimeError(
                f"layer {index}: the written attention differs from its factorization by {error:.1e} "
                f"(allowed {LAYOUT_TOLERANCE[self.dtype]:.0e} in {self.dtype}); please report this"
            )
        return error

    def skip(self, index: int) -> None:
        """Run the tokens through a layer that an interrupted run has already written."""
        self.tensors.held = self.writer.read(f"{self.model.layers_name}.{index}.")
        with self.model.layer(index) as layer:
            self.hidden, _, _ = attention_inputs(layer, self.hidden, self.kwargs[index])

    def logits(self) -> Tensor:
        """(1, PROBE_TOKENS, V) of the tensors as written."""
        self.tensors.held = self._outer()
        with torch.no_grad(), self.model.head() as head:
            return head(self.hidden)


def reload_difference(folder: Path, tokens: Tensor, logits: Tensor, device: torch.device) -> float:
    """Load a written checkpoint afresh, layer by layer; largest logit difference relative to the largest logit."""
    found = _reloaded_logits(folder, tokens, device)
    return float((found - logits).abs().max() / logits.abs().max().clamp_min(1e-30))


def probe_record(tokens: Tensor, logits: Tensor) -> dict[str, Any]:
    """What the checkpoint has to give again wherever it is loaded: each probe token's largest logit."""
    return {"tokens": tokens[0].tolist(), "largest_logits": [round(x, 5) for x in logits[0].amax(-1).tolist()]}


def check_probe(folder: Path, recipe: dict[str, Any], device: torch.device) -> None:
    """Load a finished checkpoint and compare it with what its conversion computed.

    Raises:
        InputError: it does not load, or gives other logits.
    """
    probe = recipe["check"].get("probe")
    if probe is None:
        raise InputError(f"{folder}: its record has no logits to compare with; convert again")
    expected = torch.tensor(probe["largest_logits"])
    found = _reloaded_logits(folder, torch.tensor([probe["tokens"]]), device)[0].amax(-1).cpu()
    difference = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    if not difference <= PROBE_TOLERANCE:
        raise InputError(
            f"{folder}: loaded here it gives other logits than when it was converted (relative difference "
            f"{difference:.1e}, allowed {PROBE_TOLERANCE:.0e}); convert again, and report this if it stays"
        )


def _reloaded_logits(folder: Path, tokens: Tensor, device: torch.device) -> Tensor:
    checkpoint = open_checkpoint(folder)
    checkpoint.read_headers()
    model = StreamedModel(checkpoint, read_config(checkpoint), torch.float32, device)
    with torch.no_grad():
        return model.logits(tokens)
