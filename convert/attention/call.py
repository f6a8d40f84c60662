"""A layer's attention, as a model computed it on text.

Shape legend
    T  tokens of a window    D  hidden size
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AttentionCall(NamedTuple):
    """What attention was called with and what it gave in one window.

    Attributes:
        window: which.
        x: (T, D) attention's normed input.
        stream: (T, D) the residual stream before the layer.
        output: (T, D) attention's output.
    """

    window: int
    x: Tensor
    stream: Tensor
    output: Tensor
