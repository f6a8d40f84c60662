"""Projections whose rows are of different kinds, apart for as long as they are trained.

Shape legend
    D  what is read    r, s  rows of the two kinds
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SplitLinear(nn.Module):
    """One projection as two: an optimizer that moves a tensor by its own size would ruin the smaller kind of row.

    Attributes:
        latent: (D) -> (r).  rope: (D) -> (s).
    """

    def __init__(self, whole: nn.Linear, rows: int) -> None:
        super().__init__()
        self.latent, self.rope = _part(whole, slice(0, rows)), _part(whole, slice(rows, None))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.latent(x), self.rope(x)], dim=-1)

    def joined(self) -> dict[str, Tensor]:
        """`weight`, and `bias` where there is one, of the whole."""
        found = {"weight": torch.cat([self.latent.weight, self.rope.weight])}
        if self.latent.bias is not None:
            found["bias"] = torch.cat([self.latent.bias, self.rope.bias])
        return found


def _part(whole: nn.Linear, rows: slice) -> nn.Linear:
    weight = whole.weight.detach()[rows].clone()
    part = nn.Linear(weight.shape[1], weight.shape[0], bias=whole.bias is not None, device="meta")
    part.weight = nn.Parameter(weight)
    if whole.bias is not None:
        part.bias = nn.Parameter(whole.bias.detach()[rows].clone())
    return part
