"""DFedAvg, BALANCE and SketchGuard against what one node does by their definitions."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.linalg import norm

from callbacks.aggregators import BALANCE, DFedAvg, SketchGuard
from dfl_lightning import UserError

K = 64

pytestmark = pytest.mark.usefixtures("one_thread")


class PlainThreshold:
    def __init__(self, gamma=2.0, kappa=1.0, alpha=0.5, threshold="model", c=3.0, fallback=None):
        self.gamma, self.kappa, self.alpha, self.threshold, self.c = gamma, kappa, alpha, threshold, c
        self.fallback = fallback or ("own" if threshold == "update" else "nearest")

    def bound(self, see):
        if self.threshold == "update":
            return self.c * see.moved
        bound = self.gamma * math.exp(-self.kappa * see.round.index / see.round.total) * norm(see.here)
        if self.threshold == "gap":
            widest, distances = 1.5, sorted(see.distances.values())
            for near, far in pairwise(distances):
                if near > 0 and far / near > widest:
                    widest, gap = far / near, near
            if widest > 1.5:
                bound = min(bound, gap)
        return bound

    def choose(self, see):
        chosen = [j for j, distance in see.distances.items() if distance <= self.bound(see)]
        if not chosen and self.fallback == "nearest":
            chosen = see.ranked(see.distances)[:1]
        return chosen

    def within(self, see, j):
        return self.bound(see.whole)

    def mix(self, see, accepted, own):
        if not accepted:
            return see.own
        return self.alpha * see.own + (1 - self.alpha) * sum(see.messages[j] for j in accepted) / len(accepted)


THRESHOLDS = {
    "wide": {"gamma": 2.0},
    "middle": {"gamma": 0.8, "kappa": 0.5, "alpha": 0.3},
    "narrow": {"gamma": 0.01},
    "narrow own": {"gamma": 0.01, "fallback": "own"},
    "update": {"threshold": "update", "c": 8.0},
    "narrow update": {"threshold": "update", "fallback": "nearest", "alpha": 0.3},
    "gap": {"threshold": "gap"},
    "wide gap": {"threshold": "gap", "gamma": 50.0},
}
CHECKS = {
    "each": {},
    "batched": {"verification": "batched"},
    "none": {"verification": "none"},
    "distance check": {"distance_check": True},
    "commit and reveal": {"commit_reveal": True},
    "everything": {"verification": "batched", "distance_check": True, "commit_reveal": True},
}
RULES = {f"BALANCE {name}": (BALANCE, options) for name, options in THRESHOLDS.items()}
RULES |= {f"SketchGuard {name}": (SketchGuard, {"sketch_size": K, **options}) for name, options in THRESHOLDS.items()}


def plain_of(name):
    return PlainThreshold(**THRESHOLDS[name.split(maxsplit=1)[1]])


@pytest.mark.parametrize("name", RULES)
def test_a_rule_equals_a_plain_loop_whatever_the_width_of_the_blocks(arena, agreed, monkeypatch, name, attack):
    kind, options = RULES[name]
    seed, width = (0, 64) if kind is BALANCE else (1, 16_384)
    monkeypatch.setattr("dfl_lightning.round.WIDTH", width)
    agreed(kind(**options), plain_of(name), arena.a_round(*arena.world(seed), attack))


LIARS = ["near", "liar", "subtle liar", "broken liar", "two-faced", "null space"]


@pytest.mark.parametrize("attack", LIARS, indirect=True)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", ["middle", "narrow", "update", "narrow update", "wide gap"])
def test_sketchguard_equals_a_plain_loop_however_it_checks_what_it_fetched(arena, agreed, name, check, attack):
    rule = SketchGuard(sketch_size=K, **THRESHOLDS[name], **CHECKS[check])
    agreed(rule, PlainThreshold(**THRESHOLDS[name]), arena.a_round(*arena.world(2, chance=0.8), attack))


@pytest.mark.parametrize("kind", [BALANCE, SketchGuard])
@pytest.mark.parametrize("threshold", ["update", "gap"])
def test_the_thresholds_beyond_the_papers_reject_what_the_published_one_accepts(arena, kind, threshold):
    attack = arena.Forger(lambda own, index: -0.8 * own)
    found = {}
    for name in ("model", threshold):
        round = arena.a_round(*arena.world(2, chance=0.8), attack, index=0)
        round._start = round._rows - (round._rows - round._rows.mean(0)).mul(0.5)
        options = {"sketch_size": K} if kind is SketchGuard else {}
        rule = kind(gamma=4.0, threshold=name, fallback="own", **options)
        rule.on_aggregate(round)
        found[name] = round.accepted, round.neighbours & round.byzantine, round.neighbours & ~round.byzantine
        found[name] = [int((round.accepted & links)[~round.byzantine].sum()) for links in found[name][1:]]
    assert found["model"][0] > 5
    assert found[threshold][0] < found["model"][0]
    assert found[threshold][1] > 0


def test_a_node_that_accepts_nobody_keeps_its_model_where_the_threshold_follows_the_update(arena):
    rows, neighbours = arena.world(chance=0.95)
    for kind in (BALANCE, SketchGuard):
        round = arena.a_round(rows, neighbours)
        round._start = rows.clone()
        kind(threshold="update").on_aggregate(round)
        equal = (rows[:, None] == rows).all(2) & neighbours  # at distance 0, which is how far the nodes moved
        assert equal.any()
        assert torch.equal(round.accepted, equal)
        assert torch.equal(round._rows, rows)
    assert kind(threshold="update").needs_start
    assert not kind(threshold="gap").needs_start


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_copy_of_the_own_model_makes_no_gap(dtype):
    for seed in range(40):
        draw = torch.Generator().manual_seed(seed)
        rows = torch.randn(2000, generator=draw, dtype=torch.float64)
        rows = rows + 0.3 * torch.randn(3 + seed % 17, 2000, generator=draw, dtype=torch.float64)
        rows[-1] = rows[0]
        _, accepted = BALANCE(threshold="gap")(rows.to(dtype))
        assert accepted[0, 1:].all()


# Averages


def plain_average(vectors, i, messages, neighbours, mixing="uniform", alpha=0.5):
    degree, friends = neighbours.sum(1), np.flatnonzero(neighbours[i])
    got, new = [messages[j] for j in friends], vectors[i]
    if mixing == "metropolis":
        for j in friends:
            new = new + (messages[j] - vectors[i]) / (1 + max(degree[i], degree[j]))
    elif got:
        own = alpha if mixing == "alpha" else 1 / (1 + len(got))
        new = own * vectors[i] + (1 - own) * sum(got) / len(got)
    return new


MIXINGS = {"uniform": {}, "metropolis": {"mixing": "metropolis"}, "alpha": {"mixing": "alpha", "alpha": 0.3}}


@pytest.mark.parametrize("mixing", MIXINGS)
def test_dfedavg_equals_a_plain_loop_and_broken_messages_make_it_nan(arena, monkeypatch, mixing, attack):
    for seed, width in ((0, 16_384), (1, 64)):
        monkeypatch.setattr("dfl_lightning.round.WIDTH", width)
        round = arena.a_round(*arena.world(seed), attack)
        vectors, neighbours = arena.all_rows(round), round.neighbours.numpy()
        DFedAvg(**MIXINGS[mixing]).on_aggregate(round)
        assert torch.equal(round.accepted, round.neighbours)
        assert torch.equal(round.received["models"], arena.D * round.neighbours.sum(1))
        for i in range(arena.N):
            messages = vectors[round.sent[i]]
            want = plain_average(vectors, i, messages, neighbours, **MIXINGS[mixing])
            if not all(arena.usable(messages[j]) for j in np.flatnonzero(neighbours[i])):
                want = np.full(arena.D, np.nan)
            np.testing.assert_allclose(round._rows[i].numpy(), want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mixing", ["uniform", "metropolis", "alpha"])
def test_under_plain_averaging_who_hears_a_broken_message_becomes_nan_and_nobody_else(arena, mixing, broken_messages):
    rows, neighbours = arena.world(1)
    round = arena.a_round(rows, neighbours, broken_messages)
    DFedAvg(mixing).on_aggregate(round)
    hears = neighbours[:, arena.BYZANTINE].any(1)
    assert hears.any()
    assert not hears.all()
    assert round._rows[hears].isnan().all()
    assert round._rows[~hears].isfinite().all()


# Who is nearest


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("kind", [BALANCE, SketchGuard])
def test_the_last_two_sane_nodes_still_find_each_other(arena, kind, value):
    rows = arena.world()[0].float()
    rows[:] = rows[0] + 0.1 * (rows - rows[0])
    rows[2:, 3] = value
    _, accepted = kind()(rows)
    assert accepted.nonzero().tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize("kind", [BALANCE, SketchGuard])
def test_of_equal_models_the_one_with_the_lowest_index_is_the_nearest(kind):
    for seed in range(40):
        draw = torch.Generator().manual_seed(seed)
        nodes = int(torch.randint(4, 20, (1,), generator=draw))
        rows = torch.randn(nodes, 1000, generator=draw, dtype=torch.float64)
        low, high, receiver = torch.randperm(nodes, generator=draw)[:3].tolist()
        rows[high] = rows[low]
        neighbours = torch.zeros(nodes, nodes, dtype=torch.bool)
        neighbours[receiver, [low, high]] = neighbours[[low, high], receiver] = True
        _, accepted = kind(gamma=1e-3)(rows, neighbours)
        assert accepted[receiver].nonzero()[:, 0].tolist() == [min(low, high)]


@pytest.mark.parametrize("kind", [BALANCE, SketchGuard])
def test_of_models_at_equal_distances_the_one_with_the_lowest_index_is_the_nearest(kind):
    own = torch.full((8,), 4.0)
    offsets = torch.tensor([0.0, 3.0, -2.0, 2.0, 2.0])
    rows = own + offsets[:, None] * torch.eye(8)[0]
    _, accepted = kind(gamma=1e-3)(rows)
    assert accepted[0].nonzero()[:, 0].tolist() == [2]


# Symmetries

few = settings(
    max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@few
@given(name=st.sampled_from(sorted(RULES)), factor=st.floats(1e-3, 1e3), seed=st.integers(0, 1000))
def test_thresholds_grow_with_the_models(arena, name, factor, seed):
    kind, options = RULES[name]
    rows, neighbours = arena.world(seed)
    rows[6] += 0.1
    start = 0.9 * rows
    new, accepted = kind(**options)(rows, neighbours, start=start)
    scaled, chosen = kind(**options)(rows * factor, neighbours, start=start * factor)
    assert torch.equal(chosen, accepted)
    torch.testing.assert_close(scaled, new * factor, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [(kind, name, value) for kind in (BALANCE, SketchGuard) for name in ("gamma", "c") for value in (0, -1, math.nan)]
    + [(kind, "kappa", value) for kind in (BALANCE, SketchGuard) for value in (-0.1, math.nan)]
    + [(kind, "alpha", value) for kind in (DFedAvg, BALANCE, SketchGuard) for value in (-0.1, 1.1, math.nan)]
    + [(kind, name, "loose") for kind in (BALANCE, SketchGuard) for name in ("threshold", "fallback", "verification")]
    + [(SketchGuard, "sketch_size", 0), (DFedAvg, "mixing", "loose")],
)
def test_an_option_out_of_range_is_named_in_the_error(kind, option, value):
    with pytest.raises(UserError, match=f"aggregator.{option} is {value!r}, but"):
        kind(**{option: value})
