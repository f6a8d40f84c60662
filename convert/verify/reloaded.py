"""Does the target's class compute what was factorized, and does the folder give back what was written?"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from latentfold.convert.errors import InputError
from latentfold.convert.model.streamed import StreamedModel
from latentfold.convert.model.walk import logits
from latentfold.convert.source.config import read_config
from latentfold.convert.source.opening import open_checkpoint
from latentfold.convert.write.recipe import Probe

RELOAD_TOLERANCE = 1e-5
"""Largest relative difference of logits between the written tensors and the reloaded checkpoint (both in float32)."""

PROBE_TOLERANCE = 1e-3
"""The same between a finished checkpoint and its record, which another machine may have made."""


def reload_difference(folder: Path, tokens: Tensor, expected: Tensor, device: torch.device) -> float:
    """Load a written checkpoint afresh, layer by layer; largest logit difference relative to the largest logit."""
    found = reloaded_logits(folder, tokens, device)
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def probe_of(tokens: Tensor, logits: Tensor) -> Probe:
    """What to compare a checkpoint with, wherever it is loaded."""
    return Probe(tuple(tokens[0].tolist()), tuple(round(x, 5) for x in logits[0].amax(-1).tolist()))


def check_probe(folder: Path, probe: Probe, device: torch.device) -> None:
    """Load a finished checkpoint and compare it with what its conversion computed.

    Raises:
        InputError: it does not load, or gives other logits.
    """
    expected = torch.tensor(probe.largest_logits)
    found = reloaded_logits(folder, torch.tensor([probe.tokens]), device)[0].amax(-1).cpu()
    difference = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    if not difference <= PROBE_TOLERANCE:
        raise InputError(
            f"{folder}: loaded here it gives other logits than when it was converted (relative difference "
            f"{difference:.1e}, allowed {PROBE_TOLERANCE:.0e}); convert again, and report this if it stays"
        )


def reloaded_logits(folder: Path, tokens: Tensor, device: torch.device) -> Tensor:
    """(N, T, V) of a folder, loaded layer by layer; tokens (N, T)."""
    checkpoint = open_checkpoint(folder)
    checkpoint.read_headers()
    model = StreamedModel(checkpoint, read_config(checkpoint), torch.float32, device)
    return logits(model, tokens)
