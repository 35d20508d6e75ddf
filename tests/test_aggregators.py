"""The aggregation rules against plain loops over nodes, in float64, that share no code with them."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.linalg import norm

from callbacks.aggregators import BALANCE, DFedAvg, SketchGuard
from callbacks.attacks import DirectedDeviation, Gaussian, ScaledModel
from dfl_lightning import Attack, Round, UserError

N, D, K = 9, 1000, 64
BYZANTINE = [2, 5, 7]
LONELY, BESIEGED, SINGLE = 8, 4, 0  # no neighbour; Byzantine neighbours only; one neighbour
WIDTHS = [16_384, 64]


pytestmark = pytest.mark.usefixtures("one_thread")


class Forger(Attack):
    """Byzantine node j sends ``make(its own columns, number of the block)``, and may claim to send its own model."""

    def __init__(self, make, lies=False):
        super().__init__(nodes=BYZANTINE)
        self.make, self.lies = make, lies

    def attack(self, round):
        own = torch.arange(round.num_nodes).expand(round.num_nodes, -1)
        round.forge(
            round.byzantine,
            lambda block: self.make(block.own[round.byzantine], block.index),
            announce=own if self.lies else None,
        )


class TwoFaced(Attack):
    """Sends a near model to even receivers and a far one to odd ones; node 5 claims the near one to everybody."""

    def __init__(self):
        super().__init__(nodes=BYZANTINE)

    def attack(self, round):
        faces = torch.arange(2 * len(BYZANTINE)).view(-1, 2)  # attacker by parity of the receiver
        route = torch.full((N, N), -1)
        for attacker, (even, odd) in zip(BYZANTINE, faces.tolist()):
            route[0::2, attacker], route[1::2, attacker] = even, odd
        claimed = torch.where(route >= 0, route + N, torch.arange(N))
        claimed[:, 5] = N + faces[1, 0]
        factors = torch.tensor([0.9, -3.0]).repeat(len(BYZANTINE))[:, None].double()
        round.forge(route, lambda block: factors.to(block.own) * block.own[BYZANTINE].repeat_interleave(2, 0), claimed)


def everywhere(value):
    return lambda own, index: torch.full_like(own, value)


def in_one_place(value):
    def make(own, index):
        own = own.clone()
        if index == 0:
            own[:, 3] = value
        return own

    return make


BAD = [math.nan, math.inf, -math.inf, 1e30]
BROKEN = {f"{value} {make.__name__}": Forger(make(value)) for value in BAD for make in (everywhere, in_one_place)}
ATTACKS = {
    "nobody": None,
    "gaussian": Gaussian(0.5, nodes=BYZANTINE),
    "scaled": ScaledModel(nodes=BYZANTINE),
    "near": ScaledModel(0.9, nodes=BYZANTINE),
    "deviation from trimmed mean": DirectedDeviation("trimmed_mean", nodes=BYZANTINE),
    "deviation from krum": DirectedDeviation("krum", nodes=BYZANTINE),
    "liar": Forger(lambda own, index: -5 * own, lies=True),
    "subtle liar": Forger(lambda own, index: 1.01 * own, lies=True),
    "broken liar": Forger(in_one_place(math.nan), lies=True),
    "two-faced": TwoFaced(),
    **BROKEN,
}
THRESHOLDS = {
    "wide": {"gamma": 2.0},
    "middle": {"gamma": 0.8, "kappa": 0.5, "alpha": 0.3},
    "narrow": {"gamma": 0.01},
    "narrow own": {"gamma": 0.01, "fallback": "own"},
}
RULES = {f"DFedAvg {mixing}": (DFedAvg, {"mixing": mixing}) for mixing in ("uniform", "metropolis")}
RULES["DFedAvg alpha"] = (DFedAvg, {"mixing": "alpha", "alpha": 0.3})
RULES |= {f"BALANCE {name}": (BALANCE, options) for name, options in THRESHOLDS.items()}
RULES |= {
    f"SketchGuard {name} {verification}": (SketchGuard, {"sketch_size": K, "verification": verification, **options})
    for name, options in THRESHOLDS.items()
    for verification in ("each", "batched", "none")
    if verification == "each" or name == "middle"
}
SCREENING = [name for name in RULES if not name.startswith("DFedAvg")]


def world(seed=0, nodes=N, dim=D):
    """Models [N, D] at different distances from a common one, two of them equal; a graph with odd neighbourhoods."""
    draw = torch.Generator().manual_seed(seed)
    spread = torch.linspace(0.2, 1.2, nodes, dtype=torch.float64)[torch.randperm(nodes, generator=draw), None]
    rows = torch.randn(dim, generator=draw, dtype=torch.float64)
    rows = rows + spread * torch.randn(nodes, dim, generator=draw, dtype=torch.float64)
    rows[6] = rows[3]
    neighbours = (torch.rand(nodes, nodes, generator=draw) < 0.5).triu(1)
    neighbours[1, 3] = neighbours[1, 2] = True
    neighbours = neighbours | neighbours.T
    for node, friends in ((SINGLE, [1]), (BESIEGED, BYZANTINE), (LONELY, [])):
        neighbours[node] = neighbours[:, node] = False
        neighbours[node, friends] = neighbours[friends, node] = True
    return rows, neighbours


def a_round(rows, neighbours, attack=None, index=1, total=4):
    byzantine = torch.zeros(len(rows), dtype=torch.bool)
    byzantine[BYZANTINE] = True
    shift = torch.randn(rows.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(rows)
    round = Round(rows.clone(), neighbours, byzantine, index=index, total=total, seed=3, start=rows - 0.1 * shift)
    if attack is not None:
        attack.on_attack(round)
    return round


def all_rows(round):
    """What is sent in the round: float64 numpy [N + F, D]."""
    blocks = []
    round.reduce(lambda block: blocks.append(block.rows.clone()) or block.own.new_zeros(1))
    return torch.cat(blocks, 1).double().numpy()


# The plain loops


def finite(vector):
    return bool(np.isfinite(vector).all())


def usable(vector):
    return finite(vector) and np.abs(vector).max() < 1e15


def plain_sketch(vector, slots):
    bins, sign = slots % K, np.where(slots < K, 1.0, -1.0)
    sketch = np.zeros(K)
    with np.errstate(invalid="ignore"):
        np.add.at(sketch, bins, sign * vector)
    return sketch


def plain_mean(own, others, alpha):
    return alpha * own + (1 - alpha) * sum(others) / len(others) if others else own


def plain_average(vectors, i, messages, neighbours, mixing="uniform", alpha=0.5):
    degree, friends = neighbours.sum(1), np.flatnonzero(neighbours[i])
    got = [messages[j] for j in friends]
    new = plain_mean(vectors[i], got, alpha if mixing == "alpha" else 1 / (1 + len(got)))
    if mixing == "metropolis":
        new = vectors[i].copy()
        for j in friends:
            new = new + (messages[j] - vectors[i]) / (1 + max(degree[i], degree[j]))
    broken = not all(usable(vector) for vector in got)
    return (np.full_like(new, np.nan) if broken else new), friends, friends


def plain_threshold(
    own, messages, claims, friends, factor, feature, verification, comparable, alpha=0.5, fallback="nearest"
):
    here = feature(own)
    distance = {j: norm(here - feature(claims[j])) for j in np.flatnonzero(friends) if comparable(claims[j])}
    fetched = [j for j in distance if distance[j] <= factor * norm(here)]
    if distance and not fetched and fallback == "nearest":
        fetched = [min(distance, key=lambda j: (distance[j], j))]
    accepted = []
    for j in fetched:
        said = feature(claims[j])
        honest = verification == "none" or norm(said - feature(messages[j])) <= 1e-5 * norm(said)
        if honest and usable(messages[j]):
            accepted.append(j)
    return plain_mean(own, [messages[j] for j in accepted], alpha), accepted, fetched


def plain_loop(kind, options, rule, vectors, round):
    """For each node its new model, whom it accepts and from whom it fetches a model."""
    rest = {name: value for name, value in options.items() if name in ("mixing", "alpha", "fallback")}
    neighbours, sent, announced = round.neighbours.numpy(), round.sent.numpy(), round.announced.numpy()
    factor = options.get("gamma", 2.0) * math.exp(-options.get("kappa", 1.0) * round.index / round.total)
    for i in range(N):
        messages, claims = vectors[sent[i]], vectors[announced[i]]
        if kind is DFedAvg:
            yield plain_average(vectors, i, messages, neighbours, **rest)
        elif kind is BALANCE:
            new, accepted, _ = plain_threshold(
                vectors[i], messages, messages, neighbours[i], factor, np.asarray, "none", usable, **rest
            )
            yield new, accepted, np.flatnonzero(neighbours[i])
        else:
            sketch = partial(plain_sketch, slots=rule.sketch.slots.numpy())
            yield plain_threshold(
                vectors[i], messages, claims, neighbours[i], factor, sketch, options["verification"], finite, **rest
            )


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("name", RULES)
def test_a_rule_equals_a_plain_loop_whatever_the_width_of_the_blocks(monkeypatch, name, attack):
    kind, options = RULES[name]
    for seed, width in enumerate(WIDTHS):
        monkeypatch.setattr("dfl_lightning.round.WIDTH", width)
        rule, round = kind(**options), a_round(*world(seed), ATTACKS[attack])
        vectors, before = all_rows(round), round._rows
        rule.on_aggregate(round)
        for i, (new, accepted, fetched) in enumerate(plain_loop(kind, options, rule, vectors, round)):
            assert round.accepted[i].nonzero()[:, 0].tolist() == list(accepted)
            assert round.received["models"][i] == D * len(fetched)
            np.testing.assert_allclose(before[i].numpy(), new, rtol=1e-9, atol=1e-9)
        if kind is SketchGuard:
            assert torch.equal(round.received["sketches"], K * round.neighbours.sum(1))


@pytest.mark.parametrize("attack", [*BROKEN, "broken liar"])
@pytest.mark.parametrize("name", SCREENING)
def test_broken_messages_are_never_accepted_and_a_node_that_gets_nothing_else_keeps_its_model(name, attack):
    kind, options = RULES[name]
    rows, neighbours = world(1)
    round = a_round(rows, neighbours, ATTACKS[attack])
    kind(**options).on_aggregate(round)
    assert round._rows.isfinite().all()
    assert not round.accepted[:, BYZANTINE].any()
    assert torch.equal(round._rows[[BESIEGED, LONELY]], rows[[BESIEGED, LONELY]])


@pytest.mark.parametrize("attack", BROKEN)
@pytest.mark.parametrize("mixing", ["uniform", "metropolis", "alpha"])
def test_under_plain_averaging_who_hears_a_broken_message_becomes_nan_and_nobody_else(mixing, attack):
    rows, neighbours = world(1)
    round = a_round(rows, neighbours, ATTACKS[attack])
    DFedAvg(mixing).on_aggregate(round)
    hears = neighbours[:, BYZANTINE].any(1)
    assert hears.any()
    assert not hears.all()
    assert round._rows[hears].isnan().all()
    assert round._rows[~hears].isfinite().all()


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("name", RULES)
def test_an_honest_node_whose_own_model_broke_is_as_good_as_absent(name, value):
    kind, options = RULES[name]
    rows, neighbours = world(2)
    broken = rows.clone()
    broken[1, 17] = value
    without = neighbours.clone()
    without[1] = without[:, 1] = False
    here, there = a_round(broken, neighbours, ATTACKS["scaled"]), a_round(rows, without, ATTACKS["scaled"])
    for round in (here, there):
        kind(**options).on_aggregate(round)
    others = [i for i in range(N) if i != 1]
    torch.testing.assert_close(here._rows[others], there._rows[others], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(here._rows[1], broken[1], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(here.accepted, there.accepted)
    assert all(torch.equal(here.received[what], there.received[what]) for what in here.received)
    assert not any(moved[1] for moved in here.received.values())


@pytest.mark.parametrize(
    ("kind", "value"),
    [(kind, value) for kind in (SketchGuard, BALANCE) for value in BAD],
)
def test_the_last_two_sane_nodes_still_find_each_other(kind, value):
    rows = world()[0].float()
    rows[:] = rows[0] + 0.1 * (rows - rows[0])
    rows[2:, 3] = value
    _, accepted = kind()(rows)
    assert accepted.nonzero().tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize("name", SCREENING)
def test_float32_decides_as_float64_does(name):
    kind, options = RULES[name]
    rows, neighbours = world(3)
    single, double = (a_round(rows.to(dtype), neighbours, ATTACKS["near"]) for dtype in (torch.float32, torch.float64))
    for round in (single, double):
        kind(**options).on_aggregate(round)
    assert torch.equal(single.accepted, double.accepted)
    torch.testing.assert_close(single._rows.double(), double._rows, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [BALANCE, SketchGuard])
def test_of_equal_models_the_one_with_the_lowest_index_is_the_nearest(kind):
    for seed in range(40):
        draw = torch.Generator().manual_seed(seed)
        nodes = int(torch.randint(4, 20, (1,), generator=draw))
        rows = torch.randn(nodes, D, generator=draw, dtype=torch.float64)
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


# Verification


@pytest.mark.parametrize("verification", ["each", "batched", "none"])
def test_who_sends_another_model_than_it_announced_is_dropped_and_named_unless_nobody_verifies(verification):
    rows, neighbours = world()
    rows[BYZANTINE] = rows[1] + 0.01 * torch.randn(3, D, generator=torch.Generator().manual_seed(1), dtype=rows.dtype)
    round = a_round(rows, neighbours, ATTACKS["liar"])
    SketchGuard(sketch_size=K, verification=verification).on_aggregate(round)
    deceived = neighbours[1, BYZANTINE].nonzero()[:, 0]
    liars = [BYZANTINE[k] for k in deceived]
    assert len(liars) > 1  # several at once
    assert round.received["models"][1] == D * neighbours[1].sum()  # fetched before it could be seen
    if verification == "none":
        assert round.accepted[1, liars].all()
        assert round.notes == []
        assert round.metrics["screening/verification_failed"] == 0
    else:
        assert not round.accepted[:, BYZANTINE].any()
        assert [int(note.split()[1]) for note in round.notes] == BYZANTINE
        assert "dropped by" in round.notes[0]
        assert round.metrics["screening/verification_failed"] == neighbours[:, BYZANTINE].sum()


@pytest.mark.parametrize("seed", range(8))
def test_batched_verification_decides_as_verification_of_each(seed):
    draw = torch.Generator().manual_seed(seed)
    rows, neighbours = world(seed)
    claimed = torch.where(
        torch.rand(N, N, generator=draw) < 0.3, torch.randint(N, (N, N), generator=draw), torch.arange(N)
    )
    outcomes = []
    for verification in ("each", "batched"):
        round = a_round(rows, neighbours)
        round.announced = claimed
        SketchGuard(sketch_size=K, verification=verification).on_aggregate(round)
        outcomes.append((round._rows, round.accepted, round.notes))
    assert torch.equal(outcomes[0][1], outcomes[1][1])
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert outcomes[0][2] == outcomes[1][2] != []


def test_a_sketch_of_another_dimension_is_drawn_anew():
    rule = SketchGuard(sketch_size=K)
    for dim in (D, 70):
        rows, accepted = rule(world(dim=dim)[0])
        assert len(rule.sketch.slots) == dim
        want, chosen = SketchGuard(sketch_size=K)(world(dim=dim)[0])
        assert torch.equal(accepted, chosen)
        assert torch.equal(rows, want)


# Symmetries

few = settings(max_examples=8, deadline=None, derandomize=True)


@few
@given(name=st.sampled_from(sorted(RULES)), seed=st.integers(0, 1000), data=st.data())
def test_the_numbering_of_the_nodes_does_not_matter(name, seed, data):
    kind, options = RULES[name]
    rows, neighbours = world(seed)
    rows[6] += 0.1  # without ties, which the numbering decides
    order = torch.tensor(data.draw(st.permutations(range(N))))
    new, accepted = kind(**options)(rows, neighbours)
    moved, chosen = kind(**options)(rows[order], neighbours[order][:, order])
    assert torch.equal(chosen, accepted[order][:, order])
    torch.testing.assert_close(moved, new[order], rtol=1e-9, atol=1e-9)


@few
@given(mixing=st.sampled_from(["uniform", "metropolis", "alpha"]), shift=st.floats(-100, 100))
def test_averages_move_with_the_models(mixing, shift):
    rows, neighbours = world()
    moved = DFedAvg(mixing)(rows + shift, neighbours)[0]
    torch.testing.assert_close(moved, DFedAvg(mixing)(rows, neighbours)[0] + shift, rtol=1e-9, atol=1e-9)


@few
@given(name=st.sampled_from(SCREENING), factor=st.floats(1e-3, 1e3), seed=st.integers(0, 1000))
def test_thresholds_grow_with_the_models(name, factor, seed):
    kind, options = RULES[name]
    rows, neighbours = world(seed)
    rows[6] += 0.1
    new, accepted = kind(**options)(rows, neighbours)
    scaled, chosen = kind(**options)(rows * factor, neighbours)
    assert torch.equal(chosen, accepted)
    torch.testing.assert_close(scaled, new * factor, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [(kind, "gamma", value) for kind in (BALANCE, SketchGuard) for value in (0, -1, math.nan)]
    + [(kind, "kappa", value) for kind in (BALANCE, SketchGuard) for value in (-0.1, math.nan)]
    + [(kind, "alpha", value) for kind in (DFedAvg, BALANCE, SketchGuard) for value in (-0.1, 1.1, math.nan)]
    + [(SketchGuard, "sketch_size", 0)],
)
def test_an_option_out_of_range_is_named_in_the_error(kind, option, value):
    with pytest.raises(UserError, match=f"aggregator.{option} is {value}, but"):
        kind(**{option: value})
