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

import torch
from torch import Tensor

from latentfold.convert.attention.latent import LatentAttention
from latentfold.convert.attention.linalg import by_pool, metric_root, solve_right, square_roots
from latentfold.convert.attention.weights import AttentionWeights
from latentfold.convert.calibrate.statistics import LatentStatistics
from latentfold.convert.factorize.rope import SlotFit, constant_keys, slot_keys, slot_queries


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
