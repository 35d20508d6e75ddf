"""Krum, UBAR, clipping and geometric medians, on models and on sketches, against plain loops."""

import math

import numpy as np
import pytest
import torch
from numpy.linalg import norm

from callbacks.aggregators import RFA, SCCLIP, UBAR, Krum, MultiKrum
from dfl_lightning import UserError

K = 64

pytestmark = pytest.mark.usefixtures("one_thread")


def average(vectors):
    total = np.zeros_like(vectors[0])
    for vector in vectors:
        total = total + vector
    return total / len(vectors)


class PlainKrum:
    def __init__(self, byzantine_fraction=None, on_invalid="error", m=1):
        self.options, self.m = (byzantine_fraction, lambda n, f: n >= 2 * f + 3, on_invalid), m

    def choose(self, see):
        see.f, usable = see.declared(*self.options)
        models = {**see.shown, see.i: see.here}
        if not usable:
            return [see.i]
        scores = {}
        for a in models:
            near = sorted(norm(models[a] - models[b]) ** 2 for b in models if b != a)
            scores[a] = sum(near[: len(models) - see.f - 2])
        return see.ranked(scores)[: len(models) - see.f if self.m is None else self.m]

    def mix(self, see, accepted, own):
        taken = [see.messages[j] for j in accepted] + [see.own] * own
        return average(taken) if taken else see.own


class PlainUBAR:
    def __init__(self, rho=6 / 9, alpha=0.5, fallback="min_loss"):
        self.rho, self.alpha, self.fallback = rho, alpha, fallback

    def choose(self, see):
        many = max(1, int(self.rho * see.degrees[see.i] + 1e-9))
        return see.ranked(see.distances)[:many]

    def judge(self, see, accepted):
        losses = {j: see.round.loss(torch.from_numpy(see.messages[j]), see.i) for j in accepted}
        losses = {j: loss for j, loss in losses.items() if math.isfinite(loss)}
        limit = see.round.loss(torch.from_numpy(see.own), see.i)
        kept = [j for j in losses if losses[j] <= limit or not math.isfinite(limit)]
        see.rejected, see.worse, see.alone = len(accepted) - len(losses), len(losses) - len(kept), not kept
        if losses and not kept:
            order = losses if self.fallback == "min_loss" else {j: see.distances[j] for j in losses}
            kept = see.ranked(order)[:1]
        return kept

    def mix(self, see, accepted, own):
        if not accepted:
            return see.own
        return self.alpha * see.own + (1 - self.alpha) * average([see.messages[j] for j in accepted])


class PlainSCCLIP:
    def __init__(self, tau=None, mixing="metropolis", byzantine_fraction=None, on_invalid="error"):
        needed = 2 if tau is None else 1
        self.tau, self.mixing = tau, mixing
        self.options = byzantine_fraction, lambda n, f: n >= f + needed, on_invalid

    def choose(self, see):
        see.f, usable = see.declared(*self.options)
        return list(see.shown) if usable else []

    def mix(self, see, accepted, own):
        new, see.clipped = see.own, []
        for j in accepted:
            tau = sorted(see.distances.values())[len(see.shown) - see.f - 1] if self.tau is None else self.tau
            step, length = see.messages[j] - see.own, see.distances[j]
            factor = 1 if length == 0 else min(1, tau / length)
            degrees = see.degrees[see.i], see.degrees[j] if self.mixing == "metropolis" else 0
            new = new + step * factor / (1 + max(degrees))
            see.clipped.append(factor < 1)
        return new


class PlainRFA:
    def __init__(self, iterations=3, nu=1e-6, start="mean"):
        self.iterations, self.nu, self.start = iterations, nu, start

    def choose(self, see):
        return [*see.shown, see.i]

    def mix(self, see, accepted, own):
        features = [see.shown[j] for j in accepted] + [see.here]
        z = average(features) if self.start == "mean" else np.zeros_like(see.here)
        for _ in range(self.iterations):
            weights = [1 / max(self.nu, norm(z - vector)) for vector in features]
            z = sum(weight * vector for weight, vector in zip(weights, features)) / sum(weights)
        models = [see.messages[j] for j in accepted] + [see.own]
        return sum(weight * model for weight, model in zip(weights, models)) / sum(weights)


PLAIN = {Krum: PlainKrum, MultiKrum: PlainKrum, UBAR: PlainUBAR, SCCLIP: PlainSCCLIP, RFA: PlainRFA}
RULES = {
    "Krum": (Krum, {}),
    "Krum own": (Krum, {"byzantine_fraction": 0.2, "on_invalid": "own"}),
    "Krum clamp": (Krum, {"byzantine_fraction": 0.5, "on_invalid": "clamp"}),
    "MultiKrum": (MultiKrum, {"byzantine_fraction": 0.2, "m": None}),
    "MultiKrum own": (MultiKrum, {"on_invalid": "own", "m": None}),
    "MultiKrum m": (MultiKrum, {"m": 3}),
    "UBAR": (UBAR, {}),
    "UBAR nearest": (UBAR, {"fallback": "nearest", "rho": 1.0, "alpha": 0.3}),
    "SCCLIP": (SCCLIP, {}),
    "SCCLIP uniform": (SCCLIP, {"mixing": "uniform", "byzantine_fraction": 0.5, "on_invalid": "own"}),
    "SCCLIP tau": (SCCLIP, {"tau": 20.0}),
    "SCCLIP tau uniform": (SCCLIP, {"tau": 20.0, "mixing": "uniform"}),
    "RFA": (RFA, {}),
    "RFA zeros": (RFA, {"start": "zeros", "iterations": 5, "nu": 0.1}),
}
CHECKS = {
    "batched": {"verification": "batched"},
    "none": {"verification": "none"},
    "distance check": {"distance_check": True},
    "commit and reveal": {"commit_reveal": True},
    "everything": {"verification": "batched", "distance_check": True, "commit_reveal": True},
}
LIARS = ["liar", "subtle liar", "broken liar", "two-faced", "null space"]


def both(name, **more):
    """A rule and its plain counterpart."""
    kind, options = RULES[name]
    return kind(**options, **more), PLAIN[kind](**options)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_equals_a_plain_loop_whatever_the_width_of_the_blocks(arena, agreed, monkeypatch, name, attack):
    monkeypatch.setattr("dfl_lightning.round.WIDTH", 64)
    agreed(*both(name), arena.a_round(*arena.world(1, chance=0.95), attack))


@pytest.mark.parametrize("name", RULES)
def test_a_rule_on_sketches_equals_a_plain_loop_on_sketches(arena, agreed, name, attack):
    agreed(*both(name, sketch_size=K), arena.a_round(*arena.world(0, chance=0.8), attack))


@pytest.mark.parametrize("attack", LIARS, indirect=True)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", ["Krum", "MultiKrum", "UBAR", "SCCLIP", "RFA zeros"])
def test_a_rule_equals_a_plain_loop_however_it_checks_what_it_fetched(arena, agreed, name, check, attack):
    agreed(*both(name, sketch_size=K, **CHECKS[check]), arena.a_round(*arena.world(2, chance=0.8), attack))


@pytest.mark.parametrize("more", [{}, {"sketch_size": K}], ids=["models", "sketches"])
def test_the_rounds_above_show_every_case(arena, agreed, more):
    def nodes(name):
        for attack in ("nobody", "near", "liar", "gaussian"):
            for seed in range(3):
                round = arena.a_round(*arena.world(seed, chance=0.95), arena.ATTACKS[attack])
                yield from (node for node in agreed(*both(name, **more), round) if node.see.degrees[node.see.i])

    krum = list(nodes("MultiKrum"))
    assert any(node.see.invalid for node in krum)
    assert any(node.see.f > 0 and not node.see.invalid for node in krum)
    picked = [len(node.fetched) for node in nodes("Krum")]
    assert {0, 1} == set(picked)  # the own model wins, or another
    assert sum(node.see.invalid for node in nodes("Krum own")) > 0
    ubar = list(nodes("UBAR"))
    assert all(any(getattr(node.see, case) for node in ubar) for case in ("rejected", "worse", "alone"))
    for name in ("SCCLIP", "SCCLIP tau"):
        clipped = {clipped for node in nodes(name) for clipped in node.see.clipped}
        assert clipped == {True, False}


@pytest.mark.parametrize("more", [{}, {"sketch_size": K}], ids=["models", "sketches"])
def test_of_equal_models_krum_takes_the_one_with_the_lowest_index(more):
    for seed in range(40):
        draw = torch.Generator().manual_seed(seed)
        nodes = int(torch.randint(6, 20, (1,), generator=draw))
        rows = torch.randn(nodes, 1000, generator=draw, dtype=torch.float64)
        low, high = torch.randperm(nodes, generator=draw)[:2].tolist()
        rows[low] = rows[high] = rows.mean(0)
        _, accepted = Krum(**more)(rows)
        winner = min(low, high)
        assert accepted[:, winner].sum() == accepted.sum() == nodes - 1  # which keeps its own


def test_who_keeps_nobody_by_loss_takes_the_lowest_loss_or_the_nearest_model(arena):
    rows = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)[:, None]
    loss = lambda model, node: 9.0 - float((model - rows[node]).abs()) if (model != rows[node]).any() else 0.0  # noqa: E731
    for fallback, taken in (("min_loss", 3), ("nearest", 1)):
        _, accepted = UBAR(rho=1.0, fallback=fallback)(rows, loss=loss)
        assert accepted[0].nonzero()[:, 0].tolist() == [taken]


def test_a_message_whose_loss_is_no_number_is_rejected_and_one_as_good_as_the_own_is_kept():
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.9, 0.0], [1.1, 0.2]], dtype=torch.float64)
    losses = {0: 1.0, 1: math.nan, 2: 1.0, 3: math.inf}

    def loss(model, node):
        return losses[int((rows == model).all(1).nonzero())]

    new, accepted = UBAR(rho=1.0, alpha=0.25)(rows, loss=loss)
    assert accepted[0].tolist() == [False, False, True, False]
    torch.testing.assert_close(new[0], 0.25 * rows[0] + 0.75 * rows[2])
    assert accepted[1].tolist() == [True, False, True, False]  # the own loss is no number: whatever runs is better
    losses[0] = losses[2] = math.nan
    new, accepted = UBAR(rho=1.0)(rows, loss=loss)
    assert not accepted.any()
    assert torch.equal(new, rows)


def test_a_rule_that_runs_models_says_so_where_nobody_gave_it_a_loss(arena):
    with pytest.raises(ValueError, match="needs loss"):
        UBAR()(*arena.world())


def test_nobody_moves_a_clipping_node_farther_than_the_radius(arena):
    rows, neighbours = arena.world(1)
    for attack in ("scaled", "deviation from trimmed mean"):
        round = arena.a_round(rows, neighbours, arena.ATTACKS[attack])
        SCCLIP(tau=2.0).on_aggregate(round)
        moved = (round._rows - rows).norm(dim=1)
        assert (moved <= 2.0).all()
        assert (moved[neighbours.any(1)] > 0).all()


def test_a_clipping_node_whose_neighbours_have_its_model_keeps_it():
    rows = torch.ones(3, 20, dtype=torch.float64)
    for tau in (None, 1.0):
        new, accepted = SCCLIP(tau=tau)(rows)
        torch.testing.assert_close(new, rows)
        assert accepted.sum() == 6


def test_a_geometric_median_stays_with_the_majority_where_the_mean_does_not(arena):
    rows = torch.randn(9, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows[6:] += 1e6
    for start in ("mean", "zeros"):
        new, _ = RFA(start=start, iterations=30)(rows)
        assert new.abs().max() < 10
    assert rows.mean(0).abs().min() > 1e5


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [(UBAR, "rho", value) for value in (0, 1.1, math.nan)]
    + [(UBAR, "alpha", value) for value in (-0.1, 1.1, math.nan)]
    + [(SCCLIP, "tau", value) for value in (0, -1, math.nan)]
    + [(RFA, "nu", value) for value in (0, -1, math.nan)]
    + [(RFA, "iterations", 0), (MultiKrum, "m", 0)]
    + [(kind, "byzantine_fraction", value) for kind in (Krum, SCCLIP) for value in (-0.1, 1, math.nan)]
    + [
        (UBAR, "fallback", "loose"),
        (SCCLIP, "mixing", "loose"),
        (RFA, "start", "loose"),
        (Krum, "on_invalid", "loose"),
    ],
)
def test_an_option_out_of_range_is_named_in_the_error(kind, option, value):
    with pytest.raises(UserError, match=f"aggregator.{option} is {value!r}, but"):
        kind(**{option: value})
