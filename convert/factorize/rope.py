"""Decoupled RoPE: which few rotating keys replace all the rotated pairs of all KV heads.

Shape legend
    H  query heads            G  KV heads            h in g: query head h reads KV head g = h // (H/G)
    d  head size              n  d/2, rotary pairs per head; pair j is the complex number k[j] + i k[j+n]
    S  slots (2S = qk_rope_head_dim)                 I  G*n, the items: (g, j) flattened, j fastest
    T  distances 0 .. T-1

A score of the source is  sum_j Re(q_j conj(k_j) e^{i w_j t})  at distance t. The target has S complex keys
z_s = sum_i U[s, i] k_i shared by all heads, rotating with the frequencies v_s, and per query head free
coefficients a[h, j, s]:

    conj(k_j) e^{i w_j t}  ~  sum_s a[h, j, s] conj(z_s) e^{i v_s t}  +  (something that does not rotate)      (1)

Everything that does not rotate goes to the latent ("nope") part of the score, which carries the mean of what is
left over: kappa_j = conj(phi(w_j)) k_j - sum_s conj(a_js phi(v_s)) z_s, with phi(f) = E_t[e^{ift}] under the
distances that head h is sensitive to. Minimizing the error of (1), weighted by what a query of that size does to the
attention output, is a bilinear least-squares problem: linear in `a` for given U, linear in U for given `a`.
TransMLA's RoRoPE and FreqFold (arXiv:2502.07864) are the special case of real U, one slot per pair, a = 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from latentfold.convert.attention.linalg import solve_right
from latentfold.convert.attention.pairs import rotations, to_complex_pairs, to_real_pairs
from latentfold.convert.calibrate.statistics import RopeStatistics

FLOOR = 1e-10
"""Least weight of a pair, relative to the largest in its cluster."""

CLUSTER = 8
"""Neighbouring pairs that may share slots, at least."""


@dataclass(frozen=True)
class SlotFit:
    """The solution of (1) for one layer.

    Attributes:
        keys: (S, I) complex U, slot keys from the items.
        coefficients: (H, n, S) complex a.
        frequencies: (S,) v.
        mean_pair: (H, n) complex phi_h(w_j).
        mean_slot: (H, S) complex phi_h(v_s).
        objective: what was minimized: weighted squared error of (1) plus `lost` times what is left to the latent,
            in units of `RopeStatistics.query_power` times key power.
        rotating_error: the error of (1) alone, with a lossless latent.
    """

    keys: Tensor
    coefficients: Tensor
    frequencies: Tensor
    mean_pair: Tensor
    mean_slot: Tensor
    objective: float
    rotating_error: float


@dataclass(frozen=True)
class _Kernels:
    """R(f, f') = E_t[e^{i(f-f')t}] minus a multiple of the product of the means, per head."""

    turning: Tensor  # (n,)          1, or 0 for pairs that do not rotate: they are the latent's alone
    pair_pair: Tensor  # (H, n)      R(w_j, w_j)
    pair_slot: Tensor  # (H, n, S)   R(w_j, v_s)
    slot_slot: Tensor  # (H, S, S)   R(v_s', v_s)
    mean_pair: Tensor  # (H, n)      phi(w_j)
    mean_slot: Tensor  # (H, S)      phi(v_s)

    @classmethod
    def raw(cls, distance: Tensor, pairs: Tensor, slots: Tensor) -> _Kernels:
        """Nothing subtracted yet: the non-rotating part is not modelled at all."""
        distance = distance / distance.sum(1, keepdim=True).clamp_min(1e-300)
        pair_turns, slot_turns = rotations(distance.shape[1], pairs), rotations(distance.shape[1], slots)

        def against_slots(turns: Tensor) -> Tensor:
            return (distance[:, None, :] * turns.T) @ slot_turns.conj()

        mean_pair = distance.to(pair_turns.dtype) @ pair_turns
        return cls(
            turning=(pairs != 0).to(torch.float64),
            pair_pair=torch.ones(distance.shape[0], len(pairs), dtype=torch.float64, device=pairs.device),
            pair_slot=against_slots(pair_turns),
            slot_slot=against_slots(slot_turns),
            mean_pair=torch.where(pairs == 0, torch.ones_like(mean_pair), mean_pair),
            mean_slot=distance.to(slot_turns.dtype) @ slot_turns,
        )

    def centred(self, lost: float) -> _Kernels:
        """With a non-rotating part of which the latent loses the share `lost`.

        0: the latent is lossless and slots need only explain what rotates; 1: there is no latent.
        """
        keep = 1.0 - lost
        means = keep * self.mean_slot.conj()[..., None, :]
        return replace(
            self,
            pair_pair=self.turning * (self.pair_pair - keep * self.mean_pair.abs().square()),
            pair_slot=self.turning[:, None] * (self.pair_slot - self.mean_pair[..., :, None] * means),
            slot_slot=self.slot_slot - self.mean_slot[..., :, None] * means,
        )


def _own(x: Tensor, group: Tensor, n: int) -> Tensor:
    """(m, I) -> (H, m, n): for each query head the columns of its own KV head."""
    return x.reshape(x.shape[0], x.shape[1] // n, n).transpose(0, 1)[group]


def _initial_keys(stats: RopeStatistics, kernels: _Kernels, pairs: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Each rotating pair joins the nearest slot at least as fast; a slot's key is its cluster's top eigenvector.

    Slots of equal frequency (possible in targets that store their frequencies) take successive eigenvectors.
    Returns U (S, I) and a (H, n, S).
    """
    heads, n = stats.query_power.shape
    items = stats.key_moment.shape[-1]
    kv_heads = items // n
    group = torch.arange(heads, device=pairs.device) // (heads // kv_heads)
    keys = torch.zeros(len(slots), items, dtype=torch.complex128, device=pairs.device)
    coefficients = torch.zeros(heads, n, len(slots), dtype=torch.complex128, device=pairs.device)
    if not len(slots):
        return keys, coefficients
    distinct = torch.unique(slots).flip(0)
    faster = distinct[None, :] >= pairs[:, None] * (1 - 1e-6)
    gap = (distinct[None, :] - pairs[:, None]).abs().masked_fill(~faster, torch.inf)
    choice = torch.where(faster.any(1), gap.argmin(1), torch.zeros(n, dtype=torch.long, device=pairs.device))
    choice[pairs == 0] = -1
    for c, frequency in enumerate(distinct):
        members = torch.nonzero(choice == c).flatten()
        if not len(members):
            continue
        copies = torch.nonzero(slots == frequency).flatten()
        fold, root, index, explained = _cluster(stats, kernels, pairs, members, int(copies[0]), frequency)
        _, vectors = torch.linalg.eigh(explained)
        for rank, s in enumerate(copies[: len(index)]):
            u = vectors[:, -1 - rank]
            key = u.conj() * root
            size = key.abs().max()
            keys[s, index] = key / size
            beta = (size * u / root).reshape(kv_heads, len(members))  # k_i ~ beta_i z
            coefficients[:, members, s] = fold * beta.conj()[group]
    return keys, coefficients


def _cluster(
    stats: RopeStatistics, kernels: _Kernels, pairs: Tensor, members: Tensor, slot: int, frequency: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What one slot can carry of some pairs (C,) of all KV heads.

    Returns:
        fold: (H, C) how far each pair goes along with the slot's rotation.
        root: (G C,) the weight of each item.  index: (G C,) which items those are.
        explained: (G C, G C) hermitian; a slot key of the direction u carries u^H explained u of the weighted power.
    """
    heads, n = stats.query_power.shape
    kv_heads = stats.key_moment.shape[-1] // n
    group = torch.arange(heads, device=pairs.device) // (heads // kv_heads)
    variance = kernels.slot_slot[:, slot, slot].real.clamp_min(1e-12)  # (H,)
    fold = kernels.pair_slot[:, members, slot] / variance[:, None]
    exact = (pairs[members] - frequency).abs() <= 1e-9 * frequency
    fold = torch.where(exact[None, :], torch.ones_like(fold), fold)
    gain = stats.query_power[:, members] * fold.abs().square() * variance[:, None]
    per_group = torch.zeros(kv_heads, len(members), dtype=torch.float64, device=pairs.device)
    per_group.index_add_(0, group, gain)
    index = (torch.arange(kv_heads, device=pairs.device)[:, None] * n + members[None, :]).flatten()
    # pairs that no query uses keep a little weight: where there are slots enough they too shall turn
    root = per_group.flatten().clamp_min(FLOOR * float(per_group.max()) or 1.0).sqrt()
    return fold, root, index, root[:, None] * stats.key_moment[index][:, index] * root[None, :]


def choose_pairs(stats: RopeStatistics, pairs: Tensor, count: int, *, lost: float = 0.05) -> Tensor:
    """(count,) pairs whose frequencies, repeated ones included, make the best slots for `fit_slots` to start from.

    Neighbouring pairs are gathered into clusters, which rotate in slots of their fastest pair's frequency; a cluster
    has as many slots as it is worth. What k slots carry of a cluster is the sum of k eigenvalues, so the best clusters
    are found exactly, by dynamic programming over the pairs.

    Args:
        pairs: (n,) the source's inverse frequencies; 0 for pairs that do not rotate.
        count: at most the number of rotating pairs of all KV heads.
        lost: see `fit_slots`.

    Returns:
        Indices into `pairs`, fastest first.
    """
    pairs = pairs.to(torch.float64)
    turning = torch.nonzero(pairs).flatten()
    order = turning[pairs[turning].argsort(descending=True)]
    kernels = _Kernels.raw(stats.distance, pairs, pairs).centred(lost)
    longest = max(CLUSTER, -(-2 * len(order) // max(count, 1)))
    worth: dict[tuple[int, int], list[float]] = {}
    for first in range(len(order)):
        slot = int(order[first])
        for last in range(first + 1, min(first + longest, len(order)) + 1):
            *_, explained = _cluster(stats, kernels, pairs, order[first:last], slot, pairs[slot])
            carried = torch.linalg.eigvalsh(explained).flip(0)[:count].clamp_min(0)
            worth[first, last] = carried.cumsum(0).tolist()
    # best[j][s]: the most that s slots carry of the first j pairs, and the last cluster (first, slots) of that choice
    best: list[list[tuple[float, tuple[int, int] | None]]] = [[(0.0, None)] * (count + 1)]
    for last in range(1, len(order) + 1):
        row = list(best[-1])
        for first in range(max(0, last - longest), last):
            for slots, carried in enumerate(worth[first, last], 1):
                for total in range(slots, count + 1):
                    if (value := best[first][total - slots][0] + carried) > row[total][0]:
                        row[total] = value, (first, slots)
        best.append(row)
    chosen: list[int] = []
    last = len(order)
    while len(chosen) < count and (cluster := best[last][count - len(chosen)][1]):
        last, slots = cluster
        chosen += [last] * slots
    return order[torch.tensor(sorted(chosen), dtype=torch.long, device=pairs.device)]


def _normal_equations(keys: Tensor, pairs: Tensor, group: Tensor, kernels: _Kernels) -> tuple[Tensor, Tensor]:
    """Cross moments c (H, n, S) and Gram matrices (H, S, S) with a Gram = c at the optimum of (1).

    `pairs` (I, I) is E[k k^H], `group` (H,) the KV head of each query head.
    """
    cross = keys @ pairs  # (S, I): E[z k^H]
    gram = (cross @ keys.mH).mT * kernels.slot_slot
    return _own(cross, group, kernels.pair_slot.shape[1]).mT * kernels.pair_slot, gram


def _solve_coefficients(
    previous: Tensor, keys: Tensor, pairs: Tensor, group: Tensor, kernels: _Kernels, ridge: float
) -> Tensor:
    """Least squares for a[h, j, :], pulled towards `previous` so that an exact solution stays exact."""
    c, gram = _normal_equations(keys, pairs, group, kernels)
    return previous + solve_right(gram, c - previous @ gram, ridge)


def _error(a: Tensor, keys: Tensor, pairs: Tensor, group: Tensor, kernels: _Kernels, query_power: Tensor) -> float:
    """Weighted squared error of (1) under `kernels`."""
    c, gram = _normal_equations(keys, pairs, group, kernels)
    explained = 2 * (a * c.conj()).real.sum(-1) - ((a @ gram) * a.conj()).real.sum(-1)
    power = pairs.diagonal().real.reshape(-1, a.shape[1])[group]  # (H, n): E|k_j|^2
    return max(0.0, float((query_power * (power * kernels.pair_pair - explained)).sum()))


def fit_slots(
    stats: RopeStatistics,
    pairs: Tensor,
    slots: Tensor,
    *,
    lost: float = 0.05,
    ridge: float = 1e-6,
) -> SlotFit:
    """Solve (1) for one layer.

    Args:
        stats: pooled statistics, `key_moment` of shape (I, I).
        pairs: (n,) the source's inverse frequencies w.
        slots: (S,) the target's inverse frequencies v.
        lost: share of the non-rotating part that the latent is expected to lose, in [0, 1].
        ridge: relative damping of the coefficients (towards a cluster's own, never towards zero).
    """
    pairs, slots = pairs.to(torch.float64), slots.to(torch.float64)
    heads, n = stats.query_power.shape
    items = stats.key_moment.shape[-1]
    group = torch.arange(heads, device=pairs.device) // (heads * n // items)
    raw = _Kernels.raw(stats.distance, pairs, slots)
    kernels, lossless = raw.centred(lost), raw.centred(0.0)
    keys, a = _initial_keys(stats, kernels, pairs, slots)
    if len(slots):
        a = _solve_coefficients(a, keys, stats.key_moment, group, kernels, ridge)
    return SlotFit(
        keys=keys,
        coefficients=a,
        frequencies=slots,
        mean_pair=kernels.mean_pair,
        mean_slot=kernels.mean_slot,
        objective=_error(a, keys, stats.key_moment, group, kernels, stats.query_power),
        rotating_error=_error(a, keys, stats.key_moment, group, lossless, stats.query_power),
    )


def slot_keys(fit: SlotFit, keys: Tensor) -> Tensor:
    """(G, d, E) linear maps of the keys -> (S, E) complex maps of the slot keys z."""
    return fit.keys @ to_complex_pairs(keys).flatten(0, 1)


def constant_keys(fit: SlotFit, keys: Tensor) -> Tensor:
    """(G, d, E) maps of the keys -> (H, d, E) real maps of kappa, the part of each head's key that stays still."""
    pairs = to_complex_pairs(keys)  # (G, n, E)
    heads = fit.mean_pair.shape[0]
    own = pairs.repeat_interleave(heads // pairs.shape[0], 0)
    carried = (fit.coefficients * fit.mean_slot[:, None, :]).conj() @ slot_keys(fit, keys)
    return to_real_pairs(fit.mean_pair.conj()[..., None] * own - carried)


def slot_queries(fit: SlotFit, queries: Tensor) -> Tensor:
    """(H, d, D) linear maps of the queries -> (H, S, D) complex maps of the rotating part of each head's query."""
    return torch.einsum("hjs,hjx->hsx", fit.coefficients, to_complex_pairs(queries))
