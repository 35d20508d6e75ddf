"""What holds for every attack: it sees what it may, sends the same whenever it is looked at, and stays sane."""

import math
import re
from functools import partial

import pytest
import torch

import callbacks.attacks
from callbacks.aggregators import BALANCE, SketchGuard
from callbacks.attacks import (
    ALIE,
    IPM,
    LIE,
    BitFlip,
    DirectedDeviation,
    Dissensus,
    Gaussian,
    LabelFlip,
    Ladder,
    Mimic,
    MinMax,
    MinSum,
    NullSpace,
    ScaledModel,
    SignFlip,
    SketchSpoofer,
    ThresholdRider,
)
from dfl_lightning import UserError
from dfl_lightning.phases import ColludingAttack

BYZANTINE = [1, 4, 8]
HONEST = [0, 2, 3, 5, 6, 7, 9]

# name: the attack, and whether it reads the models of the round's start
EVERY = {
    "ALIE": (ALIE, False),
    "IPM": (IPM, True),
    "LIE": (LIE, False),
    "BitFlip": (BitFlip, True),
    "DirectedDeviation": (DirectedDeviation, True),
    "DirectedDeviation krum": (partial(DirectedDeviation, "krum"), True),
    "Dissensus": (Dissensus, False),
    "Gaussian": (Gaussian, False),
    "LabelFlip": (LabelFlip, False),
    "Ladder": (Ladder, True),
    "Mimic": (Mimic, True),
    "MinMax": (MinMax, False),
    "MinMax unit": (partial(MinMax, "unit"), True),
    "MinMax sign": (partial(MinMax, "sign"), True),
    "MinSum": (MinSum, False),
    "MinSum unit": (partial(MinSum, "min", direction="unit"), True),
    "MinSum sign": (partial(MinSum, "min", direction="sign"), True),
    "NullSpace": (NullSpace, False),
    "ScaledModel": (ScaledModel, False),
    "SignFlip": (SignFlip, True),
    "SketchSpoofer": (SketchSpoofer, False),
    "ThresholdRider": (ThresholdRider, True),
}
MADE = {name: attack for name, (attack, _) in EVERY.items()}
FORGING = [name for name in MADE if name != "LabelFlip"]
DRAWN = ["DirectedDeviation", "Gaussian"]  # per block, so that they depend on the grid
COLLUDING = [name for name, make in MADE.items() if isinstance(make(), ColludingAttack)]
KNOWING = [*COLLUDING, "Dissensus", "ThresholdRider"]  # whose messages depend on honest models

pytestmark = pytest.mark.usefixtures("one_thread")


def forged(round):
    """The forged rows [F, d]."""
    blocks = []
    round.reduce(lambda block: blocks.append(block.forged.clone()) or torch.zeros(1))
    return torch.cat(blocks, 1)


def forge(name, round):
    MADE[name]().on_attack(round)
    return forged(round)


def test_every_attack_there_is_stands_in_these_tests():
    assert sorted({type(make()).__name__ for make in MADE.values()}) == sorted(callbacks.attacks.__all__)


@pytest.mark.parametrize("name", MADE)
def test_what_an_attack_sends_is_the_same_in_every_pass_and_changes_no_model(trained, name):
    round = trained()
    rows, start = round._rows.clone(), round._start.clone()
    once = forge(name, round)
    round.distances()
    assert torch.equal(forged(round), once)
    assert torch.equal(round._rows, rows)
    assert torch.equal(round._start, start)
    assert torch.equal(forge(name, trained()), once)
    assert len(once) == round.num_forged
    assert (round.num_forged > 0) == (name in FORGING)


@pytest.mark.parametrize("name", [name for name in FORGING if name not in DRAWN])
def test_the_width_of_a_block_does_not_matter(trained, monkeypatch, name):
    messages = []
    for width in (16_384, 48, 7, 1):
        monkeypatch.setattr("dfl_lightning.round.WIDTH", width)
        messages.append(forge(name, trained()))
    for other in messages[1:]:
        torch.testing.assert_close(other, messages[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", MADE)
def test_without_a_byzantine_node_nothing_is_forged_by_any_attack(trained, messages, name):
    round = trained(byzantine=())
    assert torch.equal(messages(round, MADE[name]()), round._rows.expand(10, 10, -1))
    assert round.num_forged == 0


# The start of the round


@pytest.mark.parametrize("name", MADE)
def test_an_attack_declares_that_it_needs_the_start_exactly_if_it_reads_it(trained, name):
    make, reads = EVERY[name]
    assert make().needs_start == reads
    without, other = trained(with_start=False), trained()
    if reads:
        with pytest.raises((AssertionError, TypeError)):
            forge(name, without)
        other._start[3] -= 5
        other._start[BYZANTINE] += torch.rand(3, 130, dtype=torch.float64)
        assert not torch.equal(forge(name, other), forge(name, trained()))
    else:
        assert torch.equal(forge(name, without), forge(name, trained()))


# Models that are not finite


def spoil(round, node, how):
    """A round whose ``node`` is broken in one of four ways."""
    if how == "parameters":
        round._rows[node, :20] = math.nan
    elif how == "infinite":
        round._rows[node, 7] = math.inf
    elif how == "huge":
        round._rows[node] = 1e30  # its square is more than a float32 holds
    else:
        round._rows[node, -1] = math.nan  # a buffer: the parameters look sane
    return round


WAYS = ["parameters", "infinite", "huge", "buffer"]
SMALL = {"num_parameters": 120}  # the last ten columns are buffers


@pytest.mark.parametrize("name", MADE)
def test_what_a_broken_honest_node_holds_makes_no_difference(trained, name):
    def left_by(change):
        round = trained(**SMALL)
        round._start[2] -= 1  # its update stands out
        return forge(name, change(round))

    broken = [left_by(partial(spoil, node=2, how=how)) for how in WAYS]
    assert broken[0].isfinite().all()
    for other in broken[1:]:
        torch.testing.assert_close(other, broken[0], rtol=0, atol=1e-12)
    assert torch.equal(left_by(lambda round: round), broken[0]) == (name not in KNOWING)


@pytest.mark.parametrize("name", FORGING)
@pytest.mark.parametrize("how", WAYS)
def test_a_broken_attacker_spoils_no_other_attackers_message(trained, messages, name, how):
    got = messages(spoil(trained(**SMALL), 4, how), MADE[name]())
    want = messages(trained(**SMALL), MADE[name]())
    for attacker in (1, 8):
        receivers = [node for node in HONEST if node != 4]
        torch.testing.assert_close(got[receivers, attacker], want[receivers, attacker], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", COLLUDING)
def test_where_all_honest_models_are_broken_attackers_send_their_own(trained, name):
    round = trained(broken=HONEST)
    assert forge(name, round).numel() == 0
    assert torch.equal(round.sent, torch.arange(10).expand(10, 10))


def flat(round, same, still):
    """A round in which honest models are the same, or do not move."""
    if same:
        round._rows[HONEST], round._start[HONEST] = round._rows[0].clone(), round._start[0].clone()
    if still:
        round._start[:] = round._rows
    return round


RULES = [BALANCE(), BALANCE(threshold="update"), BALANCE(threshold="gap"), SketchGuard(sketch_size=20)]


@pytest.mark.parametrize(
    ("name", "rule"),
    [(name, None) for name in MADE] + [(name, rule) for name in ("NullSpace", "ThresholdRider") for rule in RULES],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_from_finite_models_no_attack_forges_one_that_is_not(trained, name, dtype, rule):
    rounds = [trained(dtype=dtype, scale=scale) for scale in (1, 1e17, 1e-30, 0)]
    rounds += [flat(trained(dtype=dtype), *how) for how in ((True, False), (False, True), (True, True))]
    rounds += [trained(dtype=dtype, complete=True, byzantine=range(9)), trained(dtype=dtype, byzantine=[6])]
    for round in rounds:
        round.aggregator = rule
        rows = forge(name, round)
        assert rows.isfinite().all()
        assert (len(rows) > 0) == (name in FORGING)
        assert rows.dtype == dtype


# Few or no honest models in sight


@pytest.mark.parametrize(
    "name", ["ALIE", "LIE", "MinMax", "MinMax unit", "MinMax sign", "MinSum", "Ladder", "Mimic", "Dissensus"]
)
def test_of_one_honest_node_alone_attackers_send_what_it_has(trained, messages, name):
    round = trained(byzantine=range(9), complete=True)
    got = messages(round, MADE[name]())
    assert round.num_forged > 0
    torch.testing.assert_close(got[9, :9], round._rows[9].expand(9, -1), rtol=0, atol=1e-12)


def test_of_one_honest_node_alone_attackers_use_its_update(trained, messages):
    round = trained(byzantine=range(9), complete=True)
    update = round._rows[9] - round._start[9]
    got = messages(round, IPM(2.0))
    torch.testing.assert_close(got[9, :9], round._start[:9] - 2 * update, rtol=0, atol=1e-12)
    round = trained(byzantine=range(9), complete=True)
    round.aggregator = BALANCE(threshold="update", c=2.0)
    got = messages(round, ThresholdRider(0.5))
    torch.testing.assert_close(got[9, :9], (round._rows[9] - update).expand(9, -1), rtol=0, atol=1e-12)


def apart(round):
    """Cuts every link between attackers and honest nodes."""
    round.neighbours &= round.byzantine[:, None] == round.byzantine
    assert round.neighbours[round.byzantine].any()
    return round


@pytest.mark.parametrize("name", COLLUDING)
def test_attackers_who_know_their_neighbours_only_and_have_no_honest_ones_send_their_own_models(
    trained, messages, name
):
    round = apart(trained(complete=True))
    got = messages(round, MADE[name](knowledge="neighbours"))
    assert round.num_forged == 0
    assert torch.equal(got, round._rows.expand(10, 10, -1))
    assert len(forge(name, apart(trained(complete=True)))) > 0  # who knows all forges all the same


@pytest.mark.parametrize("name", ["Dissensus", "ThresholdRider"])
def test_attackers_whom_no_honest_node_hears_forge_nothing_for_receivers(trained, name):
    assert forge(name, apart(trained(complete=True))).numel() == 0


# Settings

NAN, INF = math.nan, math.inf
REFUSED = [
    *[(kind, "fraction", value) for kind in (Gaussian, LIE, Dissensus) for value in (-0.1, 1.0, NAN, INF)],
    *[(Gaussian, "sigma", value) for value in (-1.0, NAN, INF)],
    *[(kind, "factor", value) for kind in (ScaledModel, SketchSpoofer, NullSpace) for value in (NAN, INF, -INF)],
    *[(NullSpace, "sketch_size", value) for value in (0, -3)],
    *[(SignFlip, "scale", value) for value in (NAN, INF, -INF)],
    *[(LIE, "z", value) for value in (NAN, INF, -INF)],
    *[(kind, "epsilon", value) for kind in (IPM, Dissensus) for value in (NAN, INF, -INF)],
    *[(Ladder, "ratio", value) for value in (-1.4, 0.0, 0.99, NAN, INF)],
    *[(ThresholdRider, "margin", value) for value in (0.0, -0.9, NAN, INF)],
    *[(Mimic, "warmup", value) for value in (0, -1)],
    *[(kind, "direction", "x") for kind in (MinMax, MinSum)],
    (MinSum, "bound", "x"),
    (DirectedDeviation, "against", "x"),
    *[
        (kind, "knowledge", value)
        for kind in (ALIE, IPM, LIE, DirectedDeviation, Ladder, Mimic, MinMax, MinSum)
        for value in ("x", None)
    ],
]


@pytest.mark.parametrize(("kind", "setting", "value"), REFUSED)
def test_a_setting_that_makes_no_sense_is_refused_in_one_sentence(kind, setting, value):
    with pytest.raises(UserError) as refused:
        kind(**{setting: value})
    assert re.fullmatch(rf"attack\.{setting} is {re.escape(repr(value))}, but .*[^.]\.", str(refused.value))
    assert ". " not in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Gaussian, {"sigma": 0.0}),
        (Ladder, {"ratio": 1.0}),
        (ThresholdRider, {"margin": 1e-9}),
        (ThresholdRider, {"margin": 3.0}),
        (Mimic, {"warmup": 1}),
        (NullSpace, {"sketch_size": 1}),
        (LIE, {"z": -1.0, "fraction": 0.0}),
        (IPM, {"epsilon": -2.0}),
        (Dissensus, {"epsilon": 0.0}),
    ],
)
def test_the_last_sensible_value_of_a_setting_is_taken(trained, kind, options):
    attack = kind(**options)
    assert {name: getattr(attack, name) for name in options} == options
    attack.on_attack(round := trained())
    assert forged(round).isfinite().all()
