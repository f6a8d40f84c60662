"""A layer's attention head by head, whatever its family calls it.

Shape legend
    T  tokens    M  query positions    D  hidden size    H  query heads    G  KV heads    d  head size
    X  what the projections read: x (D), or [x; 1] where they have biases (D + 1, the bias last)
    Z  what the latent's map reads: X, or keys and values where a norm stands between x and the keys (2 G d)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class HeadNorm:
    """RMSNorm of queries or keys.

    Attributes:
        gain: (d,) for each head alone, or (heads, d) for all heads as one vector.
    """

    gain: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """(.., heads, d) -> the same shape."""
        return self.gain * x * torch.rsqrt(x.square().mean(tuple(range(-self.gain.dim(), 0)), keepdim=True) + self.eps)


@dataclass(frozen=True)
class AttentionWeights:
    """One attention layer, head by head: all that a family's attention is, whatever it is called there.

    q, k are in rotate-half layout; a layer that rotates part of a head has pairs of frequency 0. A bias of the values
    is a constant of the output, since attention weights sum to one: it is part of `o_bias`.

    Attributes:
        q: (H, d, X).  k: (G, d, X).  v: (G, d, X).  o: (H, D, d).
        scale: softmax scale.
        has_bias: the projections read [x; 1]: X = D + 1.
        o_bias: (D,) or None.
        q_norm, k_norm: what projected queries and keys go through before they rotate.
        softcap: scores become softcap * tanh(score / softcap).
        window: how many tokens a query sees, its own included; None: all.
        output_gain: (D,) of the RMSNorm that the output goes through before it is added; None: it is added as it is.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    scale: float
    has_bias: bool = False
    o_bias: Tensor | None = None
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    softcap: float | None = None
    window: int | None = None
    output_gain: Tensor | None = None

    def to(self, dtype: torch.dtype) -> AttentionWeights:
        """The same in another dtype."""
        parts: dict[str, Any] = {name: getattr(self, name).to(dtype) for name in ("q", "k", "v", "o")}
        for name in ("o_bias", "output_gain"):
            if (vector := getattr(self, name)) is not None:
                parts[name] = vector.to(dtype)
        for name in ("q_norm", "k_norm"):
            if norm := getattr(self, name):
                parts[name] = replace(norm, gain=norm.gain.to(dtype))
        return replace(self, **parts)

    @property
    def has_norm(self) -> bool:
        """Whether keys are something else than a linear map of what is read."""
        return self.q_norm is not None or self.k_norm is not None

    def inputs(self, x: Tensor) -> Tensor:
        """What the projections read: (.., D) -> (.., X)."""
        return nn.functional.pad(x, (0, 1), value=1.0) if self.has_bias else x

    def queries(self, x: Tensor) -> Tensor:
        """(M, D) -> (H, M, d), before rotation."""
        queries = torch.einsum("hde,me->hmd", self.q, self.inputs(x))
        return queries if self.q_norm is None else self.q_norm(queries.transpose(0, 1)).transpose(0, 1)

    def keys(self, x: Tensor) -> Tensor:
        """(T, D) -> (T, G, d), before rotation."""
        keys = torch.einsum("gde,te->tgd", self.k, self.inputs(x))
        return keys if self.k_norm is None else self.k_norm(keys)

    def values(self, x: Tensor) -> Tensor:
        """(T, D) -> (T, G, d)."""
        return torch.einsum("gde,te->tgd", self.v, self.inputs(x))

    def latent_inputs(self, x: Tensor) -> Tensor:
        """What the latent's map reads: (T, D) -> (T, Z)."""
        if not self.has_norm:
            return self.inputs(x)
        return torch.cat([self.keys(x).flatten(1), self.values(x).flatten(1)], dim=1)

    def visible(self, queries: Tensor, tokens: Tensor) -> Tensor:
        """(M, T), True where the query at a position sees the token at another."""
        seen = tokens <= queries[:, None]
        return seen if self.window is None else seen & (tokens > queries[:, None] - self.window)

    def capped(self, scores: Tensor) -> Tensor:
        """Scores as the softmax gets them."""
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    @property
    def felt_o(self) -> Tensor:
        """(H, D, d), the output projection in the units in which its errors count: those of the residual stream."""
        return self.o if self.output_gain is None else self.output_gain[:, None] * self.o

    def added(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """What is added to the stream for outputs (M, D), and the factor (M,) from them to it but for the gain."""
        if self.output_gain is None:
            return output, output.new_ones(len(output))
        factor = torch.rsqrt(output.square().mean(-1) + 1e-30)
        return self.output_gain * output * factor[:, None], factor

    @property
    def group(self) -> Tensor:
        """(H,) KV head of each query head."""
        heads, kv_heads = self.q.shape[0], self.k.shape[0]
        return torch.arange(heads, device=self.q.device) // (heads // kv_heads)
