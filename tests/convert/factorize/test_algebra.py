"""Exactness of every algebraic step, in float64.

Shape legend: H query heads, G KV heads, d head size, n = d/2, S slots, r latent rank, D hidden, T tokens.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from latentfold.convert.attention.latent import LatentAttention, latent_attention
from latentfold.convert.attention.linalg import solve_right, square_roots
from latentfold.convert.attention.pairs import complex_pair_moment, rotations, to_complex_pairs, to_real_pairs
from latentfold.convert.attention.weights import AttentionWeights
from latentfold.convert.calibrate.moments import LatentAccumulator, choose_pools
from latentfold.convert.calibrate.probe import AttentionProbe, query_positions
from latentfold.convert.calibrate.samples import AttentionSample
from latentfold.convert.calibrate.statistics import RopeStatistics
from latentfold.convert.factorize.latent import factorize
from latentfold.convert.factorize.output import refit_output
from latentfold.convert.factorize.rope import SlotFit, choose_pairs, fit_slots
from latentfold.convert.targets.deepseek.ladders import Ladder, ladders
from latentfold.convert.targets.deepseek.layout import attention_tensors
from latentfold.convert.targets.deepseek.norm import LATENT_EPS, largest_energy, neutral_norm, residual_scale
from tests.attentions import D_HEAD, FREQUENCIES, HIDDEN, TOKENS, H, attention, random_inputs, random_weights


def calibrated(w: AttentionWeights, budget: int = 1 << 30) -> LatentAccumulator:
    probe = AttentionProbe(w, FREQUENCIES)
    moments = LatentAccumulator(w, TOKENS, budget)
    for seed in range(12):
        x = random_inputs(100 + seed)
        moments.add(x, probe(x, x, query_positions(TOKENS, 16, seed), seed))
    return moments


def converted(w: AttentionWeights, slots: Tensor, rank: int, budget: int = 1 << 30) -> LatentAttention:
    rope, latent = calibrated(w, budget).result()
    return factorize(latent, w, fit_slots(rope, FREQUENCIES, slots), rank)


@pytest.mark.parametrize("budget", [1 << 30, 1])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_full_size_is_the_identity(kv_heads: int, budget: int) -> None:
    """Every pair of every KV head keeps its rotation, the latent holds all of V; with pooled moments too."""
    w, x = random_weights(kv_heads), random_inputs()
    slots = FREQUENCIES.repeat_interleave(kv_heads)
    layer = converted(w, slots, min(kv_heads * D_HEAD, HIDDEN), budget)
    expected = attention(w, FREQUENCIES, x)
    assert (latent_attention(layer, slots, x) - expected).abs().max() <= 1e-10 * expected.abs().max()
    assert sum(layer.predicted_error.values()) < 1e-12


def test_one_slot_less_is_not() -> None:
    """The test above can fail."""
    w, x = random_weights(2), random_inputs()
    slots = FREQUENCIES.repeat_interleave(2)[:-1]
    layer = converted(w, slots, 16)
    expected = attention(w, FREQUENCIES, x)
    assert (latent_attention(layer, slots, x) - expected).norm() > 1e-4 * expected.norm()


def test_more_rank_and_better_slots_lower_the_error() -> None:
    w, x = random_weights(2), random_inputs()
    expected = attention(w, FREQUENCIES, x)

    def error(slots: Tensor, rank: int) -> float:
        return float((latent_attention(converted(w, slots, rank), slots, x) - expected).norm() / expected.norm())

    full = FREQUENCIES.repeat_interleave(2)
    assert error(full, 16) < error(full, 12) < error(full, 6)
    assert error(full, 16) < error(FREQUENCIES, 24) < error(FREQUENCIES[:2], 24)


def refitted(w: AttentionWeights, layer: LatentAttention, slots: Tensor) -> LatentAttention:
    samples = []
    for seed in range(12):
        x = random_inputs(100 + seed)
        positions = query_positions(TOKENS, 20, seed)
        samples.append(AttentionSample.take(w, x, x, attention(w, FREQUENCIES, x), positions))
    return refit_output(layer, slots, samples)


def test_refit_keeps_what_is_exact() -> None:
    w, slots = random_weights(2), FREQUENCIES.repeat_interleave(2)
    layer = converted(w, slots, 16)
    again = refitted(w, layer, slots)
    assert (again.o - layer.o).abs().max() <= 1e-10 * layer.o.abs().max()
    assert again.predicted_error["output"] < 1e-20


def test_refit_finds_a_lost_output_projection() -> None:
    w, slots = random_weights(2), FREQUENCIES.repeat_interleave(2)
    layer = converted(w, slots, 16)
    again = refitted(w, replace(layer, o=torch.zeros_like(layer.o)), slots)
    x, expected = random_inputs(), attention(w, FREQUENCIES, random_inputs())
    assert (latent_attention(again, slots, x) - expected).norm() < 0.1 * expected.norm()


def test_refit_lowers_the_error_and_predicts_it() -> None:
    """On inputs it has not seen, over several: a reduced layer gets better, about as good as it says."""
    w, slots = random_weights(4), FREQUENCIES[:2]
    layer = converted(w, slots, 10)
    again = refitted(w, layer, slots)
    inputs = [random_inputs(seed) for seed in range(8)]

    def error(layer: LatentAttention) -> float:
        lost = power = 0.0
        for x in inputs:
            expected = attention(w, FREQUENCIES, x)
            weight = 1 / (x + expected).square().sum(-1, keepdim=True)
            lost += float((weight * (latent_attention(layer, slots, x) - expected).square()).sum())
            power += float((weight * expected.square()).sum())
        return lost / power

    assert error(again) < 0.96 * error(layer)
    assert again.predicted_error["output"] == pytest.approx(error(again), rel=0.25)


def test_without_rotation_the_latent_alone_is_exact() -> None:
    w, x = random_weights(2), random_inputs()
    still = torch.zeros_like(FREQUENCIES)
    probe, moments = AttentionProbe(w, still), LatentAccumulator(w, TOKENS)
    for seed in range(12):
        sample = random_inputs(100 + seed)
        moments.add(sample, probe(sample, sample, query_positions(TOKENS, 16, seed), seed))
    rope, latent = moments.result()
    slots = torch.ones(1, dtype=torch.float64)  # a stock layer cannot be without one
    layer = factorize(latent, w, fit_slots(rope, still, slots, lost=0.0), min(2 * 2 * D_HEAD, HIDDEN))
    expected = attention(w, still, x)
    assert (latent_attention(layer, slots, x) - expected).abs().max() <= 1e-9 * expected.abs().max()


@pytest.mark.parametrize("rank", [1, 7, 20])
def test_without_rotation_the_error_is_the_discarded_spectrum(rank: int) -> None:
    """Under one statistic for everything, the whitened squared error of [K; V] is the sum of dropped eigenvalues."""
    w = random_weights(2)
    rope, latent = calibrated(w).result()
    identity = torch.eye(D_HEAD, dtype=torch.float64).expand(H, -1, -1)
    w = replace(w, o=identity.contiguous(), scale=1.0)  # every head's values as they are
    moment = latent.moment
    stats = replace(
        latent,
        key_moment=moment.expand_as(latent.key_moment),
        value_moment=moment.expand_as(latent.value_moment),
        query_moment=identity,
        overlap=torch.eye(H, dtype=torch.float64),
    )
    fit = fit_slots(rope, torch.zeros_like(FREQUENCIES), torch.zeros(0, dtype=torch.float64))
    layer = factorize(stats, w, fit, rank)
    both = torch.cat([stats.keys[w.group], stats.values[w.group]]).flatten(0, 1)  # (2 H d, E)
    spectrum = torch.linalg.eigvalsh(both @ moment @ both.T)
    lost = (layer.predicted_error["key"] + layer.predicted_error["value"]) * stats.output_power
    assert lost == pytest.approx(float(spectrum[:-rank].sum()), rel=1e-8)
    rows = torch.cat([layer.k_up, layer.v_up]).flatten(0, 1) @ layer.latent
    left = both @ stats.projection - rows
    x = torch.cat([random_inputs(100 + seed) for seed in range(12)])  # what `moment` was taken from
    assert float((x @ left.T).square().sum() / len(x)) == pytest.approx(lost, rel=1e-8)


def test_stock_layer_computes_the_factorization() -> None:
    """Layout, folded softmax scale, neutral norm, residual scale: the stock class against equation (2)."""
    w, x = random_weights(2), random_inputs()
    for parameters in (
        {"rope_type": "default", "rope_theta": 77.0},
        {
            "rope_type": "yarn",
            "rope_theta": 77.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    ):
        ladder = Ladder(parameters, 4)
        layer = converted(w, ladder.frequencies, 9)
        config = DeepseekV3Config(
            hidden_size=HIDDEN,
            num_attention_heads=H,
            num_key_value_heads=H,
            q_lora_rank=None,
            kv_lora_rank=9,
            qk_nope_head_dim=D_HEAD,
            qk_rope_head_dim=4,
            v_head_dim=D_HEAD,
            rope_parameters=parameters,
        )
        config._attn_implementation = "sdpa"
        stock = DeepseekV3Attention(config, 0).double().eval()
        gain = torch.rand(HIDDEN, dtype=torch.float64) + 0.5
        tensors = attention_tensors(layer, ladder, gain, 0.25, torch.float64)
        stock.load_state_dict(tensors)
        # the norm is the identity for what an RMS norm can produce: |x_hat|^2 = D, times gain
        normed = x / x.square().mean(-1, keepdim=True).sqrt() * gain
        positions = torch.arange(TOKENS)[None]
        rotary = DeepseekV3RotaryEmbedding(config)(normed[None], positions)
        with torch.no_grad():
            found = stock(hidden_states=normed[None], position_embeddings=rotary, attention_mask=None)[0][0]
        expected = 0.25 * latent_attention(layer, ladder.frequencies, normed)
        assert (found - expected).norm() <= 3e-6 * expected.norm()  # rotary and norm compute in float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neutral_norm_holds_for_every_possible_token(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 16, generator=generator, dtype=torch.float64) * 3
    gain = torch.rand(16, generator=generator, dtype=torch.float64) * 5
    s, weight, correction = neutral_norm(largest_energy(rows, gain), dtype)
    assert math.log2(s).is_integer()
    # the worst token of all: along the top right-singular vector, as long as an RMS norm can make it
    worst = torch.linalg.svd(rows * gain).Vh[0] * 4.0 * gain
    c = rows @ worst
    normed = s * c * torch.rsqrt((s * c).square().mean() + LATENT_EPS) * weight * correction
    assert (normed - c).norm() <= 1e-8 * c.norm()
    assert (normed - c).norm() > 0


def test_residual_scale() -> None:
    assert residual_scale(1e-6, torch.bfloat16) == 1.0
    assert residual_scale(1e-5, torch.float32) == pytest.approx(math.sqrt(0.1))
    assert residual_scale(1e-5, torch.bfloat16) in (0.25, 0.5)


def test_complex_pairs_and_moments() -> None:
    x = torch.randn(2, D_HEAD, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(to_real_pairs(to_complex_pairs(x)), x)
    flat = x.flatten(0, 1)
    z = to_complex_pairs(x).flatten(0, 1)
    assert torch.allclose(complex_pair_moment(flat @ flat.T, 2), z @ z.mH)


def test_rotations() -> None:
    found = rotations(3, torch.tensor([0.0, 0.5], dtype=torch.float64))
    assert torch.equal(found[:, 0], torch.ones(3, dtype=torch.complex128))
    assert torch.allclose(found[:, 1], torch.exp(0.5j * torch.arange(3, dtype=torch.float64)))


def rotation_error_by_sampling(stats: RopeStatistics, fit: SlotFit, pairs: Tensor) -> float:
    """The weighted squared error of equation (1) of `rope`, summed over distances with its constants in place."""
    heads, n = stats.query_power.shape
    items = stats.key_moment.shape[0]
    group = torch.arange(heads) // (heads * n // items)
    weight = stats.distance / stats.distance.sum(1, keepdim=True)
    total = 0.0
    for h in range(heads):
        for j in range(n):
            own = torch.zeros(items, dtype=torch.complex128)
            own[int(group[h]) * n + j] = 1
            still = fit.mean_pair[h, j].conj() * own - (fit.coefficients[h, j] * fit.mean_slot[h]).conj() @ fit.keys
            for t in range(weight.shape[1]):
                turned = torch.exp(-1j * pairs[j] * t) * own
                carried = (fit.coefficients[h, j] * torch.exp(1j * fit.frequencies * t)).conj() @ fit.keys
                left = turned - carried - still  # as a map of the keys
                total += float(weight[h, t] * stats.query_power[h, j] * (left @ stats.key_moment @ left.conj()).real)
    return total


def test_rotating_error_is_what_it_says() -> None:
    """The closed form against a sum over distances, head by head and pair by pair."""
    rope, _ = calibrated(random_weights(2)).result()
    slots = torch.tensor([1.0, 0.4, 0.05], dtype=torch.float64)
    fit = fit_slots(rope, FREQUENCIES, slots)
    assert fit.rotating_error == pytest.approx(rotation_error_by_sampling(rope, fit, FREQUENCIES), rel=1e-6)


def test_influence_is_the_derivative_of_the_output() -> None:
    """E[(q.Du)^2] over random directions against the change of the output for a small change D of the keys' map."""
    w, x = random_weights(1), random_inputs()
    probe = AttentionProbe(w, torch.zeros_like(FREQUENCIES))  # without rotation a change of the map is one of W_K
    positions = torch.tensor([5, 17, 39])
    delta = torch.randn(D_HEAD, HIDDEN, generator=torch.Generator().manual_seed(5), dtype=torch.float64) / 1e4
    still = torch.zeros_like(FREQUENCIES)
    true = 0.0
    for h in range(H):
        before = AttentionWeights(w.q[h : h + 1], w.k, w.v, w.o[h : h + 1], w.scale)
        after = AttentionWeights(w.q[h : h + 1], w.k + delta, w.v, w.o[h : h + 1], w.scale)
        moved = attention(after, still, x) - attention(before, still, x)
        true += float((moved[positions].square().sum(-1) / x[positions].square().sum(-1)).sum())
    estimate, seeds = 0.0, 3000
    for seed in range(seeds):
        seen = probe(x, x, positions, seed)
        u = seen.influence @ x  # (H, M, D)
        estimate += float((w.scale * (seen.queries * (u @ delta.T)).sum(-1)).square().sum()) / seeds
    assert estimate == pytest.approx(true, rel=0.1)


def test_errors_before_a_norm_count_relative_to_the_output() -> None:
    """`felt_o`, the factor of `added` and the sampled weight together are the derivative of what is added."""
    generator = torch.Generator().manual_seed(3)
    gain = torch.rand(HIDDEN, generator=generator, dtype=torch.float64) + 0.5
    w, x = replace(random_weights(2), output_gain=gain), random_inputs()
    output = attention(w, FREQUENCIES, x)[:9]
    added, factor = w.added(output)
    assert torch.allclose(added, torch.nn.functional.rms_norm(output, (HIDDEN,), gain))
    error = torch.randn(output.shape, generator=generator, dtype=torch.float64) / 1e6
    error -= output * (error * output).sum(-1, keepdim=True) / output.square().sum(-1, keepdim=True)
    moved, _ = w.added(output + error)
    assert torch.allclose(moved - added, gain * error * factor[:, None], rtol=1e-4, atol=1e-11)
    seen = AttentionProbe(w, FREQUENCIES)(x, x, torch.arange(9), 0)
    assert torch.allclose(seen.weight, factor.square() / x[:9].square().sum(-1))
    assert torch.allclose(seen.outputs * factor[:, None], added)
    assert torch.allclose(w.felt_o, gain[:, None] * w.o)


def test_chosen_pairs_are_the_best() -> None:
    """Dynamic programming against every choice of distinct pairs, by what `fit_slots` makes of it."""
    rope, _ = calibrated(random_weights(1)).result()
    found = choose_pairs(rope, FREQUENCIES, 2)
    scores = {
        pairs: fit_slots(rope, FREQUENCIES, FREQUENCIES[list(pairs)]).objective
        for pairs in itertools.combinations(range(len(FREQUENCIES)), 2)
    }
    assert scores[tuple(found.tolist())] <= 1.02 * min(scores.values())
    assert max(scores.values()) > 1.2 * min(scores.values())  # it matters


@pytest.mark.parametrize("count", [3, 6, 8])
def test_chosen_pairs_share_slots_as_far_as_they_go(count: int) -> None:
    rope, _ = calibrated(random_weights(2)).result()
    found = choose_pairs(rope, FREQUENCIES, count)
    assert len(found) == count and found.tolist() == sorted(found.tolist())
    still = torch.cat([FREQUENCIES[:2], torch.zeros(2, dtype=torch.float64)])
    assert set(choose_pairs(rope, still, 3).tolist()) <= {0, 1}  # what does not rotate needs no slot


def test_pools_follow_the_budget() -> None:
    one = 2 * 10 * 10 * 8
    assert choose_pools(4, 2, 10, 4 * one) == [0, 1, 2, 3]
    assert choose_pools(4, 2, 10, 2 * one) == [0, 0, 1, 1]
    assert choose_pools(4, 2, 10, one) == [0, 0, 0, 0]


def test_singular_moments() -> None:
    """Dependent heads and few tokens: nothing blows up, and directions that no token took keep a little weight."""
    a = torch.randn(6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moment = a @ a.T
    root, inverse = square_roots(moment)
    assert torch.allclose(root @ root.T, moment, atol=1e-7)
    assert torch.allclose(inverse @ root, torch.eye(6, dtype=torch.float64))
    assert torch.linalg.eigvalsh(root @ root.T)[0] > 1e-9
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    solution = solve_right(moment, x @ moment, 0.0)
    assert torch.allclose(solution @ moment, x @ moment)
    assert solution.abs().max() < 1e3


def test_ladders_hold_the_sources_own_frequencies() -> None:
    """theta' = theta keeps every other frequency, theta' = theta^(1/2) the fast half; llama3 gets a bent ladder."""
    rope = {"rope_type": "default", "rope_theta": 1e5}
    found = ladders(rope, 64, 32, 8192)
    source = 1.0 / 1e5 ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    bases = {round(math.log(f.parameters["rope_theta"]) / math.log(1e5), 6): f for f in found}
    assert torch.allclose(bases[1.0].frequencies, source[::2], rtol=1e-5)
    assert torch.allclose(bases[0.5].frequencies, source[:16], rtol=1e-5)
    bent = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    yarns = [f for f in ladders(bent, 128, 64, 131072) if f.parameters["rope_type"] == "yarn"]
    assert yarns and all(f.parameters["beta_fast"] == 4.0 and f.parameters["beta_slow"] == 1.0 for f in yarns)
    assert yarns[0].softmax_factor == pytest.approx((0.1 * math.log(8) + 1) ** 2)


def test_linear_ladder_scales_all_but_the_first_slot() -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    source = 0.25 / 1e4 ** (torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    yarn = next(f for f in ladders(rope, 16, 16, 4096) if f.parameters["rope_type"] == "yarn")
    assert torch.allclose(yarn.frequencies[1:], source[1:], rtol=1e-5)
