"""How much of a layer is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class LayerSize(NamedTuple):
    """What a converted layer caches per token.

    Attributes:
        kv_rank: values of the latent, `kv_lora_rank`.
        rope_dim: rotated values, `qk_rope_head_dim`.
    """

    kv_rank: int
    rope_dim: int

    @property
    def values(self) -> int:
        """All of them."""
        return self.kv_rank + self.rope_dim

    def __str__(self) -> str:
        return f"{self.kv_rank} + {self.rope_dim}"


Sizes = Sequence[LayerSize | None]
"""The size of each layer; None for one that is left as it is."""


def uniform(sizes: Sizes) -> LayerSize | None:
    """The one size that every layer has, or None where layers differ or some are left as they are."""
    return sizes[0] if len(set(sizes)) == 1 else None
