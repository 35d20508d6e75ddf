"""Rules that make one vector of n, and gradient splitting around them, against plain loops over nodes and groups."""

import itertools
import math

import numpy as np
import pytest
import torch
from numpy.linalg import norm

from callbacks.aggregators import GAS, RFA, Bucketing, Bulyan, DnC, Median, MultiKrum, TrimmedMean
from dfl_lightning import Round, UserError
from dfl_lightning.functional.sorting import ascending
from dfl_lightning.functional.splitting import split_coordinates

FRACTION = 0.3

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:DnC would leave out")]


# The plain rules: a list of vectors and f -> one vector


def krum_order(vectors, f, among):
    def score(a):
        near = sorted(norm(vectors[a] - vectors[b]) ** 2 for b in among if b != a)
        return sum(near[: max(len(among) - f - 2, 1)])

    scores = {a: score(a) for a in among}
    best = []
    while len(best) < len(among):
        left = [a for a in among if a not in best]
        least = min(scores[a] for a in left)
        best.append(next(a for a in left if scores[a] <= least * (1 + 1e-6)))
    return best


def multi_krum(vectors, f):
    n = len(vectors)
    return np.mean([vectors[a] for a in krum_order(vectors, f, range(n))[: n - f]], 0) if n > 1 else vectors[0]


def around_median(vectors, count):
    out = np.empty_like(vectors[0])
    for column in range(len(out)):
        values = sorted(vector[column] for vector in vectors)
        middle = np.median(values)
        out[column] = np.mean(sorted(values, key=lambda value: (abs(value - middle), value))[:count])
    return out


def bulyan(vectors, f, oneshot=False):
    left, chosen = list(range(len(vectors))), []
    if oneshot:
        chosen = krum_order(vectors, f, left)[: len(vectors) - 2 * f]
    while len(chosen) < len(vectors) - 2 * f:
        chosen.append(krum_order(vectors, f, left)[0] if len(left) > 1 else left[0])
        left.remove(chosen[-1])
    return around_median([vectors[a] for a in chosen], len(vectors) - 4 * f)


def median(vectors, f):
    return np.median(vectors, 0)


def trimmed_mean(vectors, f):
    return np.sort(vectors, 0)[f : len(vectors) - f].mean(0)


def divide_and_conquer(vectors, f, c=1.0):
    centred = np.array(vectors) - np.mean(vectors, 0)
    direction = np.linalg.svd(centred, full_matrices=False)[2][0]
    outlying = (centred @ direction) ** 2
    keep = max(1, len(vectors) - math.floor(c * f + 1e-9))
    return np.mean([vectors[a] for a in np.argsort(outlying, kind="stable")[:keep]], 0)


def geometric_median(vectors, f):
    z = np.mean(vectors, 0)
    for _ in range(3):
        weights = [1 / max(1e-6, norm(vector - z)) for vector in vectors]
        z = sum(w * vector for w, vector in zip(weights, vectors)) / sum(weights)
    return z


CASES = {
    "MultiKrum": (MultiKrum, {}, multi_krum, lambda n: (n - 3) // 2),
    "Bulyan": (Bulyan, {}, bulyan, lambda n: (n - 3) // 4),
    "Bulyan oneshot": (
        Bulyan,
        {"selection": "oneshot"},
        lambda v, f: bulyan(v, f, oneshot=True),
        lambda n: (n - 3) // 4,
    ),
    "Median": (Median, {}, median, lambda n: n - 1),
    "TrimmedMean": (TrimmedMean, {}, trimmed_mean, lambda n: (n - 1) // 2),
    "DnC 1": (DnC, {"c": 1.0}, divide_and_conquer, lambda n: n - 1),
    "DnC 4": (DnC, {"c": 4.0}, lambda v, f: divide_and_conquer(v, f, 4.0), lambda n: n - 1),
    "RFA": (RFA, {}, geometric_median, lambda n: n - 1),
}
WITHOUT_F = (Median, RFA)


def make(name):
    kind, options, _, _ = CASES[name]
    return kind(**options) if kind in WITHOUT_F else kind(**options, byzantine_fraction=FRACTION, on_invalid="clamp")


def sights(round, arena):
    """For each node the vectors that it combines, and how many it must distrust."""
    vectors = arena.all_rows(round)
    for i in range(arena.N):
        rows = [int(round.sent[i, j]) for j in range(arena.N) if round.neighbours[i, j] or i == j]  # by sender
        usable = [row for row in rows if arena.usable(vectors[row])]
        f = max(0, math.ceil(FRACTION * (len(rows) - 1) - 1e-9) - (len(rows) - len(usable)))
        yield i, usable, vectors, f


@pytest.mark.parametrize("width", [16_384, 64])
@pytest.mark.parametrize("name", CASES)
def test_a_rule_equals_a_plain_loop_in_every_neighbourhood(name, width, arena, attack, monkeypatch):
    monkeypatch.setattr("dfl_lightning.round.WIDTH", width)
    _, _, plain, capacity = CASES[name]
    rows, neighbours = arena.world(4, chance=0.9)
    rows[6] += 0.3  # no ties, of which an even median has no order
    round = arena.a_round(rows, neighbours, attack)
    everyone = list(sights(round, arena))
    make(name).on_aggregate(round)
    for i, usable, vectors, f in everyone:
        f = min(f, capacity(len(usable)))
        want = vectors[i] if f < 0 else plain([vectors[row] for row in usable], f)
        np.testing.assert_allclose(round._rows[i].numpy(), want, rtol=1e-7, atol=1e-7)


def plain_gas(vectors, f, base, base_f, groups):
    scores = [
        sum(norm((vector - middle)[g]) for g, middle in groups_of(vectors, base, base_f, groups)) for vector in vectors
    ]
    order = sorted(range(len(vectors)), key=lambda a: (float(f"{scores[a]:.6g}"), a))[: len(vectors) - f]
    return np.mean([vectors[a] for a in order], 0), scores


def groups_of(vectors, base, f, groups):
    for group in groups:
        middle = np.zeros_like(vectors[0])
        middle[group] = base([vector[group] for vector in vectors], f)
        yield group, middle


@pytest.mark.parametrize(
    ("splits", "how"), [(1, "balanced"), (7, "balanced"), (300, "balanced"), (7, "chunk"), (2, "layer")]
)
@pytest.mark.parametrize("name", CASES)
def test_splitting_equals_a_plain_loop_over_groups(name, splits, how, arena, monkeypatch):
    monkeypatch.setattr("callbacks.aggregators.gas.SCRATCH", 3000)  # several chunks of groups
    _, _, plain, capacity = CASES[name]
    rows, neighbours = arena.world(5, dim=300, chance=0.9)
    rows[6] += 0.3
    round = arena.a_round(rows, neighbours, arena.ATTACKS["near"])
    round.layers = [100, 200]
    order = torch.randperm(300, generator=torch.Generator().manual_seed(9))
    monkeypatch.setattr(torch, "randperm", lambda n, generator=None: order[:n])
    everyone = list(sights(round, arena))
    rule = GAS(make(name), num_splits=splits, split=how, byzantine_fraction=FRACTION, on_invalid="clamp")
    rule.on_aggregate(round)
    if how == "layer":
        groups = [np.arange(100), np.arange(100, 300)]
    elif how == "chunk":
        groups = [part.numpy() for part in order.split(-(-300 // splits))]
    else:
        groups = np.array_split(order.numpy(), splits)
    assert round.accepted.any()
    for i, usable, vectors, f in everyone:
        chosen = [vectors[row] for row in usable]
        want, _ = plain_gas(chosen, min(f, len(chosen) - 1), plain, max(min(f, capacity(len(chosen))), 0), groups)
        np.testing.assert_allclose(round._rows[i].numpy(), want, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", ["MultiKrum", "Bulyan", "Median", "TrimmedMean", "DnC 1", "RFA"])
def test_a_rule_on_buckets_is_the_rule_on_their_means(name, arena):
    rows, _ = arena.world(6)
    rows, complete = rows + 0.1 * torch.arange(9)[:, None], ~torch.eye(9, dtype=torch.bool)
    rule = Bucketing(make(name), size=2, byzantine_fraction=0.1, on_invalid="clamp")
    new, _ = rule(rows, complete, seed=3)
    source = Round(rows.clone(), complete, torch.zeros(9).bool(), seed=3).generator("plan")
    order = torch.randperm(9, generator=source)
    means = torch.stack([part.mean(0) for part in rows[order].split(2)])
    _, _, plain, capacity = CASES[name]
    want = plain(list(means.numpy()), min(1, capacity(5)))
    np.testing.assert_allclose(new[0].numpy(), want, rtol=1e-7, atol=1e-7)


def test_bucketing_composes_inside_splitting(arena):
    rows, _ = arena.world(7)
    rule = GAS(Bucketing(Median()), num_splits=20, byzantine_fraction=0.2, on_invalid="clamp")
    rows[8] = 40.0
    new, accepted = rule(rows)
    assert new.isfinite().all()
    assert not accepted[:8, 8].any()


@pytest.mark.parametrize("n", [1, 2, 3, 7, 10, 33, 130])
def test_the_sorting_network_sorts_to_the_bit(n):
    values = torch.randn(n, 50, generator=torch.Generator().manual_seed(n)).round(decimals=1)
    want = values.sort(0).values
    for low, high in itertools.combinations(sorted({0, n // 3, n // 2, n}), 2):
        assert torch.equal(torch.stack(ascending(values, low, high)), want[low:high])


@pytest.mark.parametrize(("dim", "groups"), [(7, 3), (12, 4), (5, 5), (9, 1), (100, 33)])
def test_every_coordinate_is_in_one_group_and_sizes_differ_by_at_most_one(dim, groups):
    order = torch.randperm(dim)
    parts = [group for part in split_coordinates(order, groups, "balanced", [dim]) for group in part]
    assert len(parts) == groups
    assert torch.cat(parts).sort().values.tolist() == list(range(dim))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("make_rule", "sentence"),
    [
        (lambda: GAS(Median(), num_splits=0), "aggregator.num_splits is 0"),
        (lambda: GAS(Median(), split="halves"), "aggregator.split is"),
        (lambda: Bucketing(Median(), size=0), "aggregator.size is 0"),
        (lambda: Bulyan(selection="twice"), "aggregator.selection is"),
        (lambda: DnC(c=0), "aggregator.c is 0"),
        (lambda: DnC(iterations=0), "aggregator.iterations is 0"),
    ],
)
def test_impossible_settings_are_refused(make_rule, sentence):
    with pytest.raises(UserError, match=sentence):
        make_rule()
