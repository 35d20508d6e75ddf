"""The mathematics of rules and attacks, each piece against its definition."""

import math

import numpy as np
import pytest
import torch

from dfl_lightning.functional.deviation import deviation_interval, krum_deviation
from dfl_lightning.functional.distances import squared_distances
from dfl_lightning.functional.screening import screen, threshold_factor
from dfl_lightning.functional.selection import krum_scores
from dfl_lightning.functional.sketch import CountSketch
from dfl_lightning.functional.weights import metropolis, own_and_mean, uniform


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def a_graph(nodes, chance=0.5, seed=0):
    upper = (torch.rand(nodes, nodes, generator=torch.Generator().manual_seed(seed)) < chance).triu(1)
    return upper | upper.T


# Distances


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5, 997])
@pytest.mark.parametrize("rows", [1, 2, 9, 33])
def test_distances_and_norms_equal_their_definition(rows, columns):
    x = normal(rows, columns) + 3
    got, points = squared_distances(x), x.numpy()
    want = np.array([[((a - b) ** 2).sum() for b in points] for a in points])
    np.testing.assert_allclose(got[:, :-1].numpy(), want, rtol=1e-11, atol=1e-11 * columns)
    np.testing.assert_allclose(got[:, -1].numpy(), (points**2).sum(1), rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [5, 16, 37])
def test_distances_are_symmetric_to_the_bit_zero_to_oneself_and_never_negative(rows, dtype):
    x = normal(rows, 1001, dtype=dtype) + 10
    x[-1] = x[0]
    squared = squared_distances(x)[:, :-1]
    assert squared.dtype == torch.float64
    assert torch.equal(squared, squared.T)
    assert not squared.diagonal().any()
    assert (squared >= 0).all()


@pytest.mark.parametrize("position", [0, 4, 8])
def test_small_distances_survive_beside_a_row_a_million_times_larger_and_far_from_the_origin(position):
    x = 100 + 0.01 * normal(9, 1000)
    x[position] *= 1e6
    others = [row for row in range(9) if row != position]
    got = squared_distances(x.float(), 9)[:, :-1]
    want = squared_distances(x.float().double())[:, :-1]
    torch.testing.assert_close(got[others][:, others], want[others][:, others], rtol=1e-4, atol=0)
    torch.testing.assert_close(got[position], want[position], rtol=1e-4, atol=0)


def test_forged_rows_cannot_choose_the_centre():
    x = 0.01 * normal(5, 400).float() + 100
    forged = torch.full((20, 400), 1e12)
    squared = squared_distances(torch.cat([x, forged]), 5)[:5, :5]
    torch.testing.assert_close(squared, squared_distances(x.double())[:, :-1], rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("broken", "value"),
    [(broken, value) for broken in ([0], [3], [0, 4]) for value in (math.nan, math.inf, -math.inf)]
    + [([1, 2, 3], math.nan)]
    + [([1, 2, 3], value) for value in (math.inf, -math.inf)],
)
def test_a_broken_row_spoils_only_what_belongs_to_it(broken, value):
    x = normal(5, 100)
    clean = squared_distances(x)
    x[broken, 7] = value
    got, sane = squared_distances(x), [row for row in range(5) if row not in broken]
    torch.testing.assert_close(got[sane][:, [*sane, 5]], clean[sane][:, [*sane, 5]], rtol=1e-11, atol=1e-11)
    assert not got[broken][:, sane].isfinite().any()
    assert not got[broken, -1].isfinite().any()


# Screening


def plain_screen(distances, bounds, candidates, fallback):
    accepted = np.zeros(distances.shape, bool)
    for i in range(len(distances)):
        open_ = [j for j in range(len(distances)) if candidates[i, j] and np.isfinite(distances[i, j])]
        chosen = [j for j in open_ if distances[i, j] <= bounds[i]]
        if open_ and not chosen and fallback:
            chosen = [min(open_, key=lambda j: (distances[i, j], j))]
        accepted[i, chosen] = True
    return accepted


@pytest.mark.parametrize("fallback", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_screening_equals_a_plain_loop_with_ties_and_broken_distances(seed, fallback):
    draw = torch.Generator().manual_seed(seed)
    distances = torch.randint(1, 5, (12, 12), generator=draw).double()
    distances[torch.rand(12, 12, generator=draw) < 0.2] = math.nan
    distances[torch.rand(12, 12, generator=draw) < 0.2] = math.inf
    bounds, candidates = torch.randint(0, 3, (12,), generator=draw).double(), a_graph(12, seed=seed)
    want = plain_screen(distances.numpy(), bounds.numpy(), candidates.numpy(), fallback)
    assert torch.equal(screen(distances, bounds, candidates, fallback), torch.from_numpy(want))


def test_the_threshold_falls_from_gamma_by_kappa_over_the_run():
    for index in range(11):
        assert threshold_factor(0.3, 1.7, index, 10) == pytest.approx(0.3 * math.exp(-1.7 * index / 10), rel=1e-15)
    assert threshold_factor(0.3, 0.0, 9, 10) == 0.3


# Weights


@pytest.mark.parametrize("make", [uniform, metropolis, lambda links: own_and_mean(links, 0.25)])
@pytest.mark.parametrize("links", [a_graph(9), a_graph(9, 0.0), a_graph(9, 1.0), a_graph(1)], ids=str)
def test_weights_are_nonnegative_sum_to_one_and_vanish_off_the_graph(make, links):
    weights = make(links)
    assert weights.dtype == torch.float64
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(1), torch.ones(len(links), dtype=torch.float64), rtol=1e-15, atol=1e-15)
    assert not weights[~links & ~torch.eye(len(links), dtype=torch.bool)].any()
    assert (weights[links] > 0).all()


def test_metropolis_weights_are_doubly_stochastic_and_equal_their_formula():
    links = a_graph(9)
    weights, degree = metropolis(links), links.sum(1).tolist()
    torch.testing.assert_close(weights, weights.T, rtol=0, atol=0)
    for i, j in links.nonzero().tolist():
        assert weights[i, j] == pytest.approx(1 / (1 + max(degree[i], degree[j])), rel=1e-15)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 0.3, 0.9])
def test_the_own_model_weighs_alpha_to_the_last_bit_and_one_where_nobody_was_accepted(alpha):
    weights = own_and_mean(torch.tensor([[False, True], [False, False]]), alpha)
    assert weights.tolist() == [[alpha, 1 - alpha], [0, 1]]


# Sketches


def test_a_sketch_equals_its_definition_and_adds_up_over_blocks():
    rows, sketch = normal(3, 500), CountSketch(500, 32, seed=1)
    want = np.zeros((3, 32))
    for column, slot in enumerate(sketch.slots.tolist()):
        want[:, slot % 32] += (1 if slot < 32 else -1) * rows[:, column].numpy()
    np.testing.assert_allclose(sketch(rows).numpy(), want, rtol=1e-12, atol=1e-12)
    blocks = [slice(0, 100), slice(100, 333), slice(333, 500)]
    torch.testing.assert_close(sum(sketch(rows[:, block], block) for block in blocks), sketch(rows))


def test_given_tables_are_the_hash_and_the_signs():
    draw = np.random.default_rng(0)
    buckets, signs, vector = draw.integers(0, 7, 60), draw.choice([-1, 1], 60), draw.normal(size=60)
    sketch = CountSketch.from_tables(torch.from_numpy(buckets), torch.from_numpy(signs), 7)
    want = np.bincount(buckets, weights=signs * vector, minlength=7)
    np.testing.assert_allclose(sketch(torch.from_numpy(vector)[None])[0].numpy(), want, rtol=1e-12, atol=1e-13)


def test_sketches_are_linear():
    x, y, sketch = normal(4, 300, seed=1), normal(4, 300, seed=2), CountSketch(300, 16)
    torch.testing.assert_close(sketch(2 * x - 3 * y), 2 * sketch(x) - 3 * sketch(y), rtol=1e-12, atol=1e-12)


def test_who_shares_a_seed_shares_a_sketch_and_nobody_else():
    tables = [CountSketch(1000, 50, seed).slots for seed in (1, 1, 2)]
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], tables[2])


def test_hash_and_sign_are_uniform_and_independent():
    counts = CountSketch(200_000, 10).slots.bincount(minlength=20).double()
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 45  # chi square of 19 degrees: 45 is passed once in 1,400 draws


def test_squared_distances_of_sketches_are_unbiased_with_the_known_variance():
    difference, size, seeds = normal(200), 20, 600
    truth = float(difference.square().sum())
    estimates = torch.stack([CountSketch(200, size, seed)(difference[None]).square().sum() for seed in range(seeds)])
    variance = 2 * (truth**2 - float(difference.pow(4).sum())) / size
    assert abs(float(estimates.mean()) - truth) < 4 * math.sqrt(variance / seeds)
    assert float(estimates.var()) == pytest.approx(variance, rel=0.3)


# Selection and deviation


def plain_krum(squared, byzantine):
    n = len(squared)
    return [sum(sorted(squared[i][j] for j in range(n) if j != i)[: max(n - byzantine - 2, 1)]) for i in range(n)]


@pytest.mark.parametrize(("nodes", "byzantine"), [(3, 0), (3, 1), (7, 2), (10, 2), (5, 4)])
def test_krum_scores_equal_a_plain_loop(nodes, byzantine):
    squared = squared_distances(normal(2 * nodes, 30))[:, :-1].view(2, nodes, 2 * nodes)[0, :, :nodes]
    scores = krum_scores(squared, byzantine)
    np.testing.assert_allclose(scores.numpy(), plain_krum(squared.tolist(), byzantine), rtol=1e-12)
    several = krum_scores(squared[:, :, None].expand(-1, -1, 2), byzantine)  # further dimensions are other problems
    assert torch.allclose(several, scores[:, None].expand(-1, 2), rtol=1e-12)
    everybody = torch.ones(nodes, dtype=torch.bool)
    assert torch.allclose(krum_scores(squared, byzantine, everybody), scores, rtol=1e-12)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("honest", "byzantine"), [(1, 1), (2, 1), (5, 2), (8, 2), (7, 5), (3, 6)])
def test_the_deviation_from_krum_is_the_first_halving_that_krum_picks(honest, byzantine, seed):
    dim, n = 20, honest + byzantine
    reference = normal(dim, seed=seed)
    models = reference + 0.3 + 0.5 * normal(honest, dim, seed=seed + 100)
    direction = (models.mean(0) - reference).sign()
    vectors = torch.cat([models - reference, direction[None]])
    far = krum_deviation(vectors @ vectors.T, byzantine, dim)

    points = models.numpy()
    between = [[float(((a - b) ** 2).sum()) for b in points] for a in points]
    near = [sum(sorted(row[:i] + row[i + 1 :])[: max(n - byzantine - 2, 1)]) for i, row in enumerate(between)]
    longest = max(float(np.linalg.norm(a - reference.numpy())) for a in points)
    expected = math.sqrt(min(near) / (max(n - 2 * byzantine - 1, 1) * dim)) + longest / math.sqrt(dim)
    declared = min(byzantine, max((n - 3) // 2, 0))
    while expected > 1e-5:
        sent = np.concatenate([points, np.repeat((reference - expected * direction).numpy()[None], byzantine, 0)])
        scores = plain_krum([[float(((a - b) ** 2).sum()) for b in sent] for a in sent], declared)
        if scores.index(min(scores)) >= honest:
            break
        expected /= 2
    assert far == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("honest", "byzantine"), [(0, 1), (3, 0)])
def test_the_deviation_from_krum_needs_both_sides(honest, byzantine):
    with pytest.raises(ValueError, match="needs an honest model and an attacker"):
        krum_deviation(torch.eye(honest + 1, dtype=torch.float64), byzantine, 5)


@pytest.mark.parametrize(
    ("sign", "highest", "lowest", "interval"),
    [
        (-1, 3.0, 1.0, (3.0, 6.0)),
        (-1, -2.0, -4.0, (-2.0, -1.0)),
        (-1, 0.0, -4.0, (0.0, 0.0)),
        (1, 3.0, 1.0, (0.5, 1.0)),
        (1, -2.0, -4.0, (-8.0, -4.0)),
        (1, 3.0, 0.0, (0.0, 0.0)),
    ],
)
def test_the_deviation_from_the_trimmed_mean_lies_beyond_the_honest_extremes(sign, highest, lowest, interval):
    ends = deviation_interval(torch.tensor([highest]), torch.tensor([lowest]), torch.tensor([float(sign)]))
    assert tuple(end.item() for end in ends) == interval
