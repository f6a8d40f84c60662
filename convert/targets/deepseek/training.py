"""The stock class, opened for training and closed again.

Shape legend
    D  hidden size    r  kv_lora_rank

Its latent norm is neutral because the latent's rows are tiny (`norm`): so tiny that no optimizer could move them beside
the rotating keys' rows in the same tensor. For training the norm is taken out and the rows are what they would be
without it; afterwards the scale is chosen again for the rows as they have become.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from latentfold.convert.targets.deepseek.norm import LATENT_EPS, largest_energy, neutral_norm
from latentfold.convert.targets.split import SplitLinear


def open_for_training(model: Any) -> None:
    """Take the neutral latent norm out, and part the latent's rows from the rotating keys'."""
    for module in model.modules():
        if isinstance(module, DeepseekV3Attention):
            split = SplitLinear(module.kv_a_proj_with_mqa, module.kv_lora_rank)
            gain = module.kv_a_layernorm.weight.detach() / math.sqrt(LATENT_EPS)  # norm(c) = gain c, c being tiny
            split.latent.weight.data.mul_(gain[:, None])
            opened: Any = module
            opened.kv_a_proj_with_mqa, opened.kv_a_layernorm = split, nn.Identity()


def closed(layer: Any, module: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """A layer's attention as it is stored, with a neutral norm again; names relative to the module.

    Args:
        layer: the decoder layer, for the gain of its input norm.  module: its attention.  dtype: it will be stored in.
    """
    if not isinstance(module, DeepseekV3Attention):
        return {}
    split: Any = module.kv_a_proj_with_mqa
    rows = split.latent.weight.detach().double()
    gain = layer.input_layernorm.weight.detach().double()
    s, weight, correction = neutral_norm(largest_energy(rows, gain), dtype)
    whole = split.joined()
    whole["weight"] = torch.cat([s * rows, split.rope.weight.detach().double()])
    return {f"kv_a_proj_with_mqa.{key}": tensor for key, tensor in whole.items()} | {
        "kv_a_layernorm.weight": torch.full((len(rows),), weight),
        "kv_b_proj.weight": module.kv_b_proj.weight.detach().double() * correction,
    }
