"""The original's attention on a sequence, to be reproduced.

Shape legend
    T  tokens of a sequence    M  sampled query positions    D  hidden size
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from latentfold.convert.attention.weights import AttentionWeights


@dataclass(frozen=True)
class AttentionSample:
    """The original's attention on one sequence.

    Attributes:
        x: (T, D) its normed input.
        positions: (M,) sampled queries.  output: (M, D) its output there.
        weight: (M,) of each sample.
    """

    x: Tensor
    positions: Tensor
    output: Tensor
    weight: Tensor

    @classmethod
    def take(
        cls, weights: AttentionWeights, x: Tensor, stream: Tensor, output: Tensor, positions: Tensor
    ) -> AttentionSample:
        """From (T, D) input, residual stream and output; a sample counts by what the next norm makes of its error."""
        output = output[positions]
        added, factor = weights.added(output)
        power = (stream[positions] + added).square().sum(-1)
        return cls(x, positions, output, factor.square() / power.clamp_min(1e-20))


def sample_count(layer_width: int, windows: int) -> int:
    """Queries a window that give every feature a few samples."""
    return max(1024, -(-4 * layer_width // windows))
