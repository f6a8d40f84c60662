"""Our own class, opened for training and closed again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from latentfold.convert.targets.native.modeling_latentfold import LatentAttention
from latentfold.convert.targets.split import SplitLinear


def open_for_training(model: Any) -> None:
    """Part the latent's rows from the rotating keys'."""
    for module in model.modules():
        if isinstance(module, LatentAttention):
            module.kv_a_proj = SplitLinear(module.kv_a_proj, module.kv_rank)  # type: ignore[assignment]


def closed(layer: Any, module: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """What `open_for_training` parted in a layer's attention, as it is stored; names relative to the module."""
    if not isinstance(module, LatentAttention):
        return {}
    split: Any = module.kv_a_proj
    return {f"kv_a_proj.{key}": tensor for key, tensor in split.joined().items()}
