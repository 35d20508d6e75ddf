"""What holds for every rule: broken messages, broken and lonely nodes, numbering, translation, precision."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from callbacks import aggregators
from dfl_lightning import Aggregator
from dfl_lightning.declared import DeclaredRule
from dfl_lightning.distance_rule import DistanceRule

N, D, K = 9, 1000, 64
OPTIONS = {
    "SketchGuard": {"sketch_size": K},
    "WFAgg": {"history_size": K},
    "GAS": {"base": aggregators.MultiKrum(), "num_splits": 10},
    "Bucketing": {"base": aggregators.Median()},
    "DnC": {"c": 1.0},
}
RULES = {name: (getattr(aggregators, name), OPTIONS.get(name, {})) for name in aggregators.__all__ if name != "DFedAvg"}
RULES |= {
    f"{name}, sketches": (kind, {"sketch_size": K})
    for name, (kind, _) in RULES.items()
    if issubclass(kind, DistanceRule) and name != "SketchGuard"
}
RULES |= {
    "LEARN mda": (aggregators.LEARN, {"rule": "mda"}),
    "BALANCE update": (aggregators.BALANCE, {"threshold": "update", "c": 8.0}),
    "BALANCE gap": (aggregators.BALANCE, {"threshold": "gap"}),
    "UBAR nearest": (aggregators.UBAR, {"fallback": "nearest"}),
    "SCCLIP tau": (aggregators.SCCLIP, {"tau": 20.0, "mixing": "uniform"}),
    "RFA zeros": (aggregators.RFA, {"start": "zeros"}),
    "WFAgg exact": (aggregators.WFAgg, {"history": "exact"}),
}
AVERAGES = {
    f"DFedAvg {mixing}": (aggregators.DFedAvg, {"mixing": mixing}) for mixing in ("uniform", "metropolis", "alpha")
}
EVERY = RULES | AVERAGES

pytestmark = pytest.mark.usefixtures("one_thread")


def make(name, **more):
    kind, options = EVERY[name]
    if issubclass(kind, DeclaredRule):
        more = {"byzantine_fraction": 0.2} | more
    return kind(**options, **more)


def test_every_rule_is_here_and_calls_itself_an_aggregator():
    kinds = {kind for kind, _ in RULES.values()}
    assert {kind.__name__ for kind in kinds} == set(aggregators.__all__) - {"DFedAvg"}
    assert all(issubclass(kind, Aggregator) for kind in kinds)


# Broken messages and broken nodes


@pytest.mark.parametrize("name", RULES)
def test_broken_messages_are_never_accepted_and_a_node_that_gets_nothing_else_keeps_its_model(
    arena, name, broken_messages
):
    rows, neighbours = arena.world(1, chance=0.9)
    round = arena.a_round(rows, neighbours, broken_messages)
    make(name).on_aggregate(round)
    assert round._rows.isfinite().all()
    assert round._rows.abs().max() < 100
    assert not round.accepted[:, arena.BYZANTINE].any()
    alone = [arena.BESIEGED, arena.LONELY]
    assert torch.equal(round._rows[alone], rows[alone])
    assert round.accepted.any() or name.startswith("Krum")  # which may keep the own model everywhere
    assert (round._rows != rows).any() or name.startswith("Krum")


@pytest.mark.parametrize("name", RULES)
def test_a_liar_whose_model_is_broken_is_never_accepted(arena, name):
    rows, neighbours = arena.world(1, chance=0.9)
    for more in [{"verification": way} for way in ("each", "batched", "none")] if "sketch" in name.lower() else [{}]:
        round = arena.a_round(rows, neighbours, arena.ATTACKS["broken liar"])
        make(name, **more).on_aggregate(round)
        assert round._rows.isfinite().all()
        assert not round.accepted[:, arena.BYZANTINE].any()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("name", EVERY)
def test_an_honest_node_whose_own_model_broke_is_as_good_as_absent(arena, name, value):
    rows, neighbours = arena.world(2, chance=0.9)
    broken = rows.clone()
    broken[1, 17] = value
    without = neighbours.clone()
    without[1] = without[:, 1] = False
    here = arena.a_round(broken, neighbours, arena.ATTACKS["scaled"])
    there = arena.a_round(rows, without, arena.ATTACKS["scaled"])
    here.loss = there.loss
    for round in (here, there):
        make(name).on_aggregate(round)
    others = [i for i in range(N) if i != 1]
    torch.testing.assert_close(here._rows[others], there._rows[others], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(here._rows[1], broken[1], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(here.accepted, there.accepted)
    assert all(torch.equal(here.received[what], there.received[what]) for what in here.received)
    assert not any(moved[1] for moved in here.received.values())


@pytest.mark.parametrize("name", EVERY)
def test_a_node_without_neighbours_keeps_its_model_to_the_bit_and_nobody_else_notices_it(arena, name):
    rows, neighbours = arena.world(2, chance=0.9)
    other = rows.clone()
    other[arena.LONELY] = 3 * rows[0] + 7
    here, there = (arena.a_round(models, neighbours, arena.ATTACKS["near"]) for models in (rows, other))
    there.loss = here.loss
    for round, models in ((here, rows), (there, other)):
        make(name).on_aggregate(round)
        assert torch.equal(round._rows[arena.LONELY], models[arena.LONELY])
        assert not round.accepted[arena.LONELY].any()
        assert not any(moved[arena.LONELY] for moved in round.received.values())
    rest = [i for i in range(N) if i != arena.LONELY]
    torch.testing.assert_close(here._rows[rest], there._rows[rest], rtol=1e-11, atol=1e-11)
    assert torch.equal(here.accepted, there.accepted)
    assert (here._rows[rest] != rows[rest]).any()


@pytest.mark.parametrize("name", EVERY)
def test_nobody_accepts_who_is_no_neighbour_and_equal_rounds_end_equally(arena, name):
    ends = []
    for _ in range(2):
        round = arena.a_round(*arena.world(2, chance=0.6), arena.ATTACKS["gaussian"])
        make(name).on_aggregate(round)
        assert not (round.accepted & ~round.neighbours).any()
        ends.append(round)
    assert torch.equal(ends[0]._rows, ends[1]._rows)
    assert torch.equal(ends[0].accepted, ends[1].accepted)


@pytest.mark.parametrize("name", EVERY)
def test_float32_decides_as_float64_does(arena, name):
    rows, neighbours = arena.world(3, chance=0.8)
    single, double = (
        arena.a_round(rows.to(dtype), neighbours, arena.ATTACKS["near"]) for dtype in (torch.float32, torch.float64)
    )
    for round in (single, double):
        make(name).on_aggregate(round)
    assert torch.equal(single.accepted, double.accepted)
    torch.testing.assert_close(single._rows.double(), double._rows, rtol=1e-4, atol=1e-4)


# Symmetries, by the rule on a matrix

few = settings(
    max_examples=2, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def applied(name, rows, neighbours, numbers=None, shift=0.0):
    """The rule where node i likes models that are near its own target, whatever the numbering and the origin."""
    numbers = torch.arange(len(rows)) if numbers is None else numbers
    draw = torch.Generator().manual_seed(5)
    targets = torch.randn(N, D, generator=draw, dtype=torch.float64) + shift
    start = rows - 0.1 * torch.randn(N, D, generator=draw, dtype=torch.float64)[numbers]

    def loss(model, node):
        return float((model - targets[numbers[node]]).square().mean())

    before = rows.clone()
    result = make(name)(rows, neighbours, index=1, total=4, start=start, loss=loss)
    assert torch.equal(rows, before)
    return result


NUMBERED = ["Bucketing", "Bulyan", "LEARN mda"]  # which draw by number, and choose among equal scores or diameters


@pytest.mark.parametrize("name", [name for name in EVERY if name not in NUMBERED])
@few
@given(seed=st.integers(0, 1000), data=st.data())
def test_the_numbering_of_the_nodes_does_not_matter(arena, name, seed, data):
    rows, neighbours = arena.world(seed, chance=0.9)
    rows[6] += 0.1  # without ties, which the numbering decides
    order = torch.tensor(data.draw(st.permutations(range(N))))
    new, accepted = applied(name, rows, neighbours)
    moved, chosen = applied(name, rows[order], neighbours[order][:, order], order)
    assert torch.equal(chosen, accepted[order][:, order])
    torch.testing.assert_close(moved, new[order], rtol=1e-9, atol=1e-9)


MOVING = [name for name in RULES if not name.startswith(("BALANCE", "SketchGuard", "WFAgg", "RFA zeros"))]


@pytest.mark.parametrize("name", [*MOVING, *AVERAGES, "BALANCE update"])
@few
@given(seed=st.integers(0, 1000), shift=st.floats(-100, 100))
def test_rules_that_look_at_differences_move_with_the_models(arena, name, seed, shift):
    rows, neighbours = arena.world(seed, chance=0.9)
    rows[6] += 0.1
    new, accepted = applied(name, rows, neighbours)
    moved, chosen = applied(name, rows + shift, neighbours, shift=shift)
    assert torch.equal(chosen, accepted)
    torch.testing.assert_close(moved, new + shift, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["BALANCE", "SketchGuard", "RFA zeros"])
def test_rules_that_look_at_the_length_of_a_model_do_not_move_with_it(arena, name):
    rows, neighbours = arena.world(1, chance=0.9)
    more = {} if "RFA" in name else {"gamma": 0.5}
    rule = RULES[name][0](**RULES[name][1], **more)
    new, accepted = rule(rows, neighbours)
    moved, chosen = rule(rows + 100, neighbours)
    assert torch.equal(chosen, accepted) == ("RFA" in name)
    assert (moved - new - 100).abs().max() > 1e-3
