"""What calibration hands to factorization.

Shape legend
    T  distances    H  query heads    G  KV heads    d  head size    n  d/2, rotary pairs    I  G n, pairs of all heads
    E  moment space    P  pools of heads    Z  what the latent's map reads
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LatentStatistics:
    """Second moments of one layer in E-space.

    Attributes:
        keys: (G, d, E) and values (G, d, E): linear maps from the E-space.
        projection: (E, Z), the E-space vector of what the latent's map reads.
        pool: (H,) pool of each head.
        key_moment: (P, E, E), N: how errors of a key's map reach the output, normalized to trace 1.
        value_moment: (P, E, E): of the attention-averaged vector, which is what W_O receives.
        moment: (E, E): plain average over tokens.
        query_moment: (H, d, d): Q_h, total sensitivity included.
        overlap: (H, H): how far two heads attend to the same tokens, E[p_h . p_h'] normalized to 1 on the diagonal.
        output_power: E|attention output|^2, to make errors relative.
    """

    keys: Tensor
    values: Tensor
    projection: Tensor
    pool: Tensor
    key_moment: Tensor
    value_moment: Tensor
    moment: Tensor
    query_moment: Tensor
    overlap: Tensor
    output_power: float


@dataclass(frozen=True)
class RopeStatistics:
    """What one layer's attention says about its rotary pairs.

    Attributes:
        distance: (H, T) sensitivity of each head at each distance, not normalized.
        query_power: (H, n) sensitivity-weighted mean of |q_j|^2 (before RoPE).
        key_moment: (I, I) complex, E[k k^H] of all pairs, pooled over heads.
    """

    distance: Tensor
    query_power: Tensor
    key_moment: Tensor
