"""The joint latent: one small vector per token from which every head reads its still keys and its values.

Shape legend
    D  hidden size    H  query heads    G  KV heads    d  head size    S  rope slots    r  kv_lora_rank
    E  the space in which moments are kept: either y = [k_1..k_G; v_1..v_G] (E = 2Gd) or x itself (E = D)
    P  pools: heads that share one set of moments (P = H, G or 1, whatever memory allows)
    X  what the projections read: x itself (X = D), or [x; 1] where they have biases (X = D + 1, the bias last)
    Z  what the latent's map reads: X, or y where a norm stands between x and the keys (Z = 2Gd)

Keys and values are linear maps of the E-space, k_g = K_g s and v_g = V_g s. The latent is c = A s; each query head h
reads B^K_h c and B^V_h c. A constant in the keys is left out of both: only slot keys need it. Both errors are measured
in what they do to the attention output, so K and V need no balance between them:

    sum_h scale^2 tr(Q_h D_h N_h D_h^T)  +  sum_h tr(W_O,h^T W_O,h E_h[(v - B^V_h c)(v - B^V_h c)^T])

with D_h = C_h - B^K_h A the error of the map to kappa_h, the key that does not rotate (`rope.constant_keys`), Q_h and
N_h the two factors of how such an error reaches the output (`calibrate`, equation 2), E_h the moment of what W_O
receives. N ignores by itself a constant added to all keys of a head, as softmax does. V is not centred either:
for engines other than transformers the stock target has no o_proj bias to give its mean back.
Whitening by data moments follows SVD-LLM (arXiv:2403.07378) and CARE (arXiv:2603.17946); the sensitivity weights are
this project's (docs/method.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from latentfold.convert.linalg import by_pool, metric_root, solve_right, square_roots
from latentfold.convert.rope import SlotFit, constant_keys, slot_keys, slot_queries


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
class LatentAttention:
    """A layer factorized to MLA, in float64, in no target's particular layout.

    Attributes:
        latent: (r, Z) rows of the down projection.
        rope_key: (S, Z) complex rows of the shared rotating key.
        q_nope: (H, d, X).  q_rope: (H, S, X) complex. With q/k-norm maps of each head's normed query: X = d.
        k_up: (H, d, r).  v_up: (H, d, r).
        o: (H, D, d).
        scale: softmax scale that the target has to apply.
        source: the layer it was made from, for what stays as it was.
        predicted_error: relative squared error of the attention output expected from the statistics, split into
            `rope`, `key` and `value`; `refit.refit_output` adds `output`, found on samples left out.
    """

    latent: Tensor
    rope_key: Tensor
    q_nope: Tensor
    q_rope: Tensor
    k_up: Tensor
    v_up: Tensor
    o: Tensor
    scale: float
    source: AttentionWeights
    predicted_error: dict[str, float]


def latent_rows(
    stats: LatentStatistics, weights: AttentionWeights, still_keys: Tensor, rank: int
) -> tuple[Tensor, Tensor]:
    """A (r, E) with E[c c^T] = 1 under the plain moment, and its pooled reader E[s c^T] (E, r).

    K and V have different statistics, one whitening must serve both: whiten with the plain moment and scale each block
    so that its weight under that moment equals its weight under its own. Values that several heads read lose the same
    thing at once: their errors add up in the output as far as the heads attend to the same tokens.
    """
    root, inverse = square_roots(stats.moment)
    value_metric = weights.felt_o.mT @ weights.felt_o  # (H, d, d)
    key_root, value_root = metric_root(stats.query_moment), metric_root(value_metric)
    key_rows = weights.scale * key_root @ still_keys  # (H, d, E)
    value_rows = value_root @ stats.values[weights.group]
    whitened_keys = key_rows.flatten(0, 1) @ root
    whitened_values = stats.values.flatten(0, 1) @ root  # (G d, e)
    together = shared_value_metric(weights, stats.overlap)
    gram = torch.zeros(root.shape[1], root.shape[1], dtype=root.dtype, device=root.device)
    for block, rows, moments in (
        (whitened_keys.T @ whitened_keys, key_rows, stats.key_moment),
        (whitened_values.T @ together @ whitened_values, value_rows, stats.value_moment),
    ):
        own = (by_pool(rows, moments, stats.pool) * rows).sum()
        trace = (rows.flatten(0, 1) @ root).square().sum()
        if trace > 0:
            gram += block * (own.clamp_min(0) / trace)
    _, vectors = torch.linalg.eigh(gram)
    basis = vectors[:, -rank:].flip(1)
    rows = basis.T @ inverse
    missing = rank - rows.shape[0]  # fewer data directions than asked for: the rest of the latent stays empty
    if missing > 0:
        rows = torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])
        basis = torch.cat([basis, basis.new_zeros(basis.shape[0], missing)], dim=1)
    return rows, root @ basis


def shared_value_metric(weights: AttentionWeights, overlap: Tensor) -> Tensor:
    """(G d, G d): sum over pairs of heads of overlap_hh' W_O,h^T W_O,h', gathered by the KV heads they read."""
    heads, _, size = weights.o.shape
    flat = weights.felt_o.transpose(0, 1).flatten(1)  # (D, H d)
    pairs = (flat.T @ flat).view(heads, size, heads, size) * overlap[:, None, :, None]
    kv_heads = len(weights.k)
    grouped = pairs.view(kv_heads, heads // kv_heads, size, kv_heads, heads // kv_heads, size)
    return grouped.sum((1, 4)).reshape(kv_heads * size, kv_heads * size)


def readers(target: Tensor, moments: Tensor, pool: Tensor, rows: Tensor, pooled: Tensor, ridge: float) -> Tensor:
    """B_h (H, d, r): target_h ~ B_h A under each head's own moments.

    The fit is `target_h pooled`, the solution under the plain moment, plus a ridge-damped deviation: damping never
    shrinks the reader itself, and where the pooled solution is exact it stays exact. A head's own moments come from few
    samples, so the damping is as large as an average eigenvalue of theirs.
    """
    gram = rows @ moments @ rows.T  # (P, r, r)
    base = target @ pooled
    left = by_pool(target - base @ rows, moments @ rows.T, pool)
    deviation = torch.empty_like(base)
    for p in range(len(moments)):
        deviation[pool == p] = solve_right(gram[p], left[pool == p], ridge)
    return base + deviation


def factorize(
    stats: LatentStatistics, weights: AttentionWeights, fit: SlotFit, rank: int, *, ridge: float = 1.0
) -> LatentAttention:
    """Turn one attention layer into latent attention of `rank` with the slots of `fit`.

    Raises nothing for degenerate statistics: null directions are dropped, missing latent rows are zero.
    """
    still = constant_keys(fit, stats.keys)
    rows, pooled = latent_rows(stats, weights, still, rank)
    own_values = stats.values[weights.group]
    k_up = readers(still, stats.key_moment, stats.pool, rows, pooled, ridge)
    v_up = readers(own_values, stats.value_moment, stats.pool, rows, pooled, ridge)

    def error(left: Tensor, metric: Tensor, moments: Tensor) -> float:
        return float(((metric @ left) * by_pool(left, moments, stats.pool)).sum().clamp_min(0))

    key_error = weights.scale**2 * error(still - k_up @ rows, stats.query_moment, stats.key_moment)
    value_error = error(own_values - v_up @ rows, weights.felt_o.mT @ weights.felt_o, stats.value_moment)
    power = max(stats.output_power, 1e-300)
    queries = weights.q
    if weights.has_norm:
        heads, size, _ = queries.shape
        queries = torch.eye(size, dtype=queries.dtype, device=queries.device).expand(heads, -1, -1)
    return LatentAttention(
        latent=rows @ stats.projection,
        rope_key=slot_keys(fit, stats.keys if weights.has_norm else weights.k),
        q_nope=queries,
        q_rope=slot_queries(fit, queries),
        k_up=k_up,
        v_up=v_up,
        o=weights.o,
        scale=weights.scale,
        source=weights,
        predicted_error={
            "rope": 0.5 * weights.scale**2 * fit.rotating_error / power,
            "key": key_error / power,
            "value": value_error / power,
        },
    )


@torch.no_grad()
def head_outputs(layer: LatentAttention, frequencies: Tensor, x: Tensor, positions: Tensor | None = None) -> Tensor:
    """What each head of the factorized layer delivers to W_O, computed in the dtype of x.

    Args:
        frequencies: (S,) of the slots.  x: (T, D).  positions: (M,) queries to compute; None: all.

    Returns:
        (M, H, d).
    """
    dtype, rotating = x.dtype, torch.promote_types(x.dtype, torch.complex64)
    source = layer.source.to(dtype) if layer.source.has_norm else layer.source  # else its weights are not read
    inputs = source.latent_inputs(x)  # (T, Z)
    latent = inputs @ layer.latent.to(dtype).T  # (T, r)
    tokens = torch.arange(len(x), device=x.device)
    phase = tokens.to(torch.float64)[:, None] * frequencies.to(x.device, torch.float64)
    turns = torch.polar(torch.ones_like(phase), phase).to(rotating)  # (T, S)
    z = (inputs.to(rotating) @ layer.rope_key.to(rotating).T) * turns
    where = slice(None) if positions is None else positions
    queries = source.queries(x[where]) if source.has_norm else source.inputs(x[where])[None]  # (H or 1, M, X)
    q_rope = queries.to(rotating) @ layer.q_rope.to(rotating).mT * turns[where]
    q_nope = queries @ layer.q_nope.to(dtype).mT
    k_nope = torch.einsum("her,tr->hte", layer.k_up.to(dtype), latent)
    k_rope = torch.cat([z.real, z.imag], dim=-1).expand(len(k_nope), -1, -1)
    values = torch.einsum("her,tr->hte", layer.v_up.to(dtype), latent)
    query = torch.cat([q_nope, q_rope.real, q_rope.imag], dim=-1)
    key = torch.cat([k_nope, k_rope], dim=-1)
    size = values.shape[-1]
    causal = positions is None and source.window is None and source.softcap is None
    visible = None if causal else source.visible(tokens[where], tokens)
    if source.softcap is not None:
        assert visible is not None
        heads = [
            source.capped(layer.scale * q @ k.T).masked_fill(~visible, -torch.inf).softmax(-1) @ v
            for q, k, v in zip(query, key, values, strict=True)
        ]
        return torch.stack(heads, dim=1)
    # torch's fused CPU kernel wants heads of one size and four dimensions
    padded = nn.functional.pad(values, (0, key.shape[-1] - size))
    out = nn.functional.scaled_dot_product_attention(
        query[None],
        key[None],
        padded[None],
        attn_mask=visible,
        is_causal=causal,
        scale=layer.scale,
    )
    return out[0, :, :, :size].transpose(0, 1)


def latent_attention(layer: LatentAttention, frequencies: Tensor, x: Tensor) -> Tensor:
    """The factorized layer's attention output in float64: x (T, D) -> (T, D)."""
    heads = head_outputs(layer, frequencies, x.to(torch.float64))
    out = torch.einsum("hde,the->td", layer.o, heads)
    return out if layer.source.o_bias is None else out + layer.source.o_bias
