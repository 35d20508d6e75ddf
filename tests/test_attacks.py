"""The attacks: who is Byzantine, and what is sent, against the papers' definitions written out."""

import math

import numpy as np
import pytest
import torch

from callbacks.aggregators import BALANCE, DFedAvg
from callbacks.attacks import DirectedDeviation, Gaussian, ScaledModel
from dfl_lightning import Aggregator, Attack, Round, UserError
from dfl_lightning.phases import share

N, D = 10, 400
BYZANTINE = [1, 4, 8]
HONEST = [node for node in range(N) if node not in BYZANTINE]
KINDS = [Gaussian, ScaledModel, DirectedDeviation]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True, params=[16_384, 64])
def width(request, monkeypatch):
    monkeypatch.setattr("dfl_lightning.round.WIDTH", request.param)
    return request.param


class KrumLike(Aggregator):
    krum_like = True

    def aggregate(self, round):
        return round.links


def a_round(rows=None, start=None, byzantine=BYZANTINE, aggregator=None, **options):
    draw = torch.Generator().manual_seed(0)
    common = torch.randn(D, generator=draw, dtype=torch.float64)
    before = common + 0.1 * torch.randn(N, D, generator=draw, dtype=torch.float64)
    after = before + 0.05 + 0.1 * torch.randn(N, D, generator=draw, dtype=torch.float64)
    marks = torch.zeros(N, dtype=torch.bool)
    marks[byzantine] = True
    rows, start = after if rows is None else rows, before if start is None else start
    round = Round(rows, ~torch.eye(N, dtype=torch.bool), marks, start=start, **options)
    round.aggregator = aggregator
    return round


def sent(attack, round):
    """What ``attack`` sends: [attackers, D], after checking that every receiver is sent the same by the right node."""
    attack.on_attack(round)
    blocks = []
    round.reduce(lambda block: blocks.append(block.rows.clone()) or block.own.new_zeros(1))
    rows = torch.cat(blocks, 1)
    for sender in range(N):
        others = [node for node in range(N) if node != sender]
        assert len(set(round.sent[others, sender].tolist())) == 1
        assert (round.sent[others, sender] >= N).all() == bool(round.byzantine[sender])
        assert round.sent[sender, sender] == sender
    assert torch.equal(round.announced, round.sent)
    first = HONEST[0]  # one who is sent everything
    return rows[round.sent[first, round.byzantine]]


# Who is Byzantine


@pytest.mark.parametrize(
    ("fraction", "nodes", "count"),
    [
        (0.3, 10, 3),
        (0.1, 10, 1),
        (0.7, 10, 7),
        (0.07, 100, 7),
        (0.28, 25, 7),
        (0.14, 50, 7),
        (0.3, 11, 4),
        (0.01, 5, 1),
        (0, 5, 0),
    ]
    + [(k / 20, 20, k) for k in range(20)],
)
def test_a_fraction_is_rounded_up_with_care_for_rounding(fraction, nodes, count):
    assert share(fraction, nodes) == count
    assert Gaussian(fraction=fraction).choose(nodes, 0).sum() == count


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_draws_the_attackers_and_the_attacks_own_seed_comes_before_the_runs(kind):
    draws = [kind(fraction=0.3).choose(40, seed) for seed in range(6)]
    assert len({tuple(draw.tolist()) for draw in draws}) == 6
    assert torch.equal(kind(fraction=0.3).choose(40, 3), draws[3])
    assert torch.equal(kind(fraction=0.3, seed=3).choose(40, 5), draws[3])
    assert torch.stack([kind(fraction=0.5).choose(10, seed) for seed in range(40)]).any(0).all()  # nobody is safe


def test_listed_nodes_are_byzantine_whatever_the_fraction():
    assert Gaussian(fraction=0.9, nodes=[0, 3, 3]).choose(5, 0).tolist() == [True, False, False, True, False]
    assert not Gaussian(nodes=[]).choose(5, 0).any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda fraction=fraction: Gaussian(fraction=fraction), "attack.fraction")
        for fraction in (-0.1, 1, 1.5, math.nan)
    ]
    + [(lambda sigma=sigma: Gaussian(sigma), "attack.sigma") for sigma in (-1, math.nan)]
    + [
        (lambda: Gaussian(nodes=[5]).choose(5, 0), "names node 5, but the nodes are 0 to 4"),
        (lambda: Gaussian(nodes=[-1]).choose(5, 0), "names node -1"),
        (lambda: Gaussian(nodes=[0, 1]).choose(2, 0), "all 2 nodes Byzantine"),
        (lambda: Gaussian(fraction=0.9).choose(5, 0), "all 5 nodes Byzantine"),
    ],
)
def test_a_mistake_about_the_attackers_is_named(make, message):
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_byzantine_node_nothing_is_forged(kind):
    round = a_round(byzantine=[])
    kind().on_attack(round)
    assert round.num_forged == 0
    assert torch.equal(round.sent, torch.arange(N).expand(N, N))


@pytest.mark.parametrize("kind", KINDS)
def test_an_attack_changes_no_model_by_itself(kind):
    round = a_round()
    before = round._rows.clone()
    sent(kind(), round)
    assert torch.equal(round._rows, before)


# Gaussian and scaled models


@pytest.mark.parametrize("sigma", [0.0, 1.0, 3.0])
def test_gaussian_noise_around_the_own_model_has_the_given_deviation(sigma):
    round = a_round()
    noise = sent(Gaussian(sigma), round) - round._rows[BYZANTINE]
    count = noise.numel()
    assert abs(float(noise.mean())) <= 4 * sigma / math.sqrt(count)
    assert abs(float(noise.std()) - sigma) <= 4 * sigma / math.sqrt(2 * count)


def test_gaussian_noise_is_independent_between_attackers_rounds_blocks_and_seeds(width):
    variants = [a_round(), a_round(index=1), a_round(seed=1)]
    noises = torch.cat([sent(Gaussian(), round) - round._rows[BYZANTINE] for round in variants])
    correlations = torch.corrcoef(noises).fill_diagonal_(0)
    assert correlations.abs().max() < 5 / math.sqrt(D)
    assert noises.unique().numel() == noises.numel()  # no block repeats another's numbers


@pytest.mark.parametrize("kind", KINDS)
def test_an_attack_sends_the_same_in_every_pass_and_every_equal_round(kind):
    round = a_round()
    once = sent(kind(), round)
    again = []
    round.reduce(lambda block: again.append(block.forged.clone()) or block.own.new_zeros(1))
    assert torch.equal(torch.cat(again, 1), once[: round.num_forged])
    assert torch.equal(sent(kind(), a_round()), once)


@pytest.mark.parametrize("factor", [-5.0, 0.0, 0.9])
def test_a_scaled_model_is_the_own_model_times_the_factor(factor):
    round = a_round()
    assert torch.equal(sent(ScaledModel(factor), round), factor * round._rows[BYZANTINE])
    assert ScaledModel().factor == -5


# Directed deviation


def plain_interval(honest, reference, spread=2.0):
    """Fang et al. 2020: where the model of an attacker with the given reference may lie, coordinate by coordinate."""
    lower, upper = np.empty(D), np.empty(D)
    for k in range(D):
        values = [model[k] for model in honest]
        mean, highest, lowest = sum(values) / len(values), max(values), min(values)
        if mean < reference[k]:
            ends = (highest, spread * highest) if highest > 0 else (highest, highest / spread)
        elif mean > reference[k]:
            ends = (lowest / spread, lowest) if lowest > 0 else (spread * lowest, lowest)
        else:
            ends = (mean, mean)
        lower[k], upper[k] = ends
    return lower, upper


def test_deviation_from_the_trimmed_mean_lies_in_the_interval_of_each_attackers_own_start():
    round = a_round()
    models, honest = sent(DirectedDeviation("trimmed_mean"), round).numpy(), round._rows[HONEST].numpy()
    places, falling = [], []
    for attacker, model in zip(BYZANTINE, models):
        reference = round._start[attacker].numpy()
        lower, upper = plain_interval(honest, reference)
        assert (lower <= model).all()
        assert (model <= upper).all()
        places.append((model - lower) / (upper - lower))
        falling.append(honest.mean(0) < reference)
    places = np.stack(places)
    assert 0.2 < np.mean(falling) < 0.8  # both branches
    assert any((falling[0] != other).any() for other in falling[1:])  # and the attackers do not share their direction
    assert abs(places.mean() - 0.5) < 4 / math.sqrt(12 * places.size)
    assert places.std() == pytest.approx(1 / math.sqrt(12), rel=0.1)
    assert np.abs(np.corrcoef(places) - np.eye(3)).max() < 5 / math.sqrt(D)


@pytest.mark.parametrize("value", [4.0, 32 / 7])
def test_where_honest_models_do_not_move_the_deviation_is_their_mean(value):
    rows, start = torch.randn(N, D, dtype=torch.float64), torch.full((N, D), value, dtype=torch.float64)
    rows[HONEST] = value
    assert torch.equal(sent(DirectedDeviation("trimmed_mean"), a_round(rows, start)), start[BYZANTINE])


def test_attackers_see_the_models_of_sane_honest_nodes_only():
    clean, dirty = a_round(), a_round()
    dirty._rows[BYZANTINE] = 1e6
    assert torch.equal(sent(DirectedDeviation("trimmed_mean"), clean), sent(DirectedDeviation("trimmed_mean"), dirty))
    dirty = a_round()
    dirty._rows[HONEST[0], 3] = math.nan
    for against in ("trimmed_mean", "krum"):
        assert sent(DirectedDeviation(against), dirty).isfinite().all()


def test_with_no_sane_honest_model_to_deviate_from_nothing_is_forged():
    round = a_round()
    round._rows[HONEST] = math.nan
    DirectedDeviation().on_attack(round)
    assert round.num_forged == 0


def plain_krum_picks(vectors, byzantine):
    """The vector that Krum picks, by Blanchard et al. 2017."""
    n, scores = len(vectors), []
    for i in range(n):
        near = sorted(float(((vectors[i] - vectors[j]) ** 2).sum()) for j in range(n) if j != i)
        scores.append(sum(near[: n - byzantine - 2]))
    return scores.index(min(scores))


def test_deviation_from_krum_is_one_model_against_the_direction_that_krum_picks_and_twice_as_far_it_does_not():
    round = a_round()
    first, *others = sent(DirectedDeviation("krum"), round)
    assert round.num_forged == 1
    assert all(torch.equal(first, other) for other in others)
    reference, honest = round._start[BYZANTINE[0]], round._rows[HONEST]
    steps = (reference - first) / (honest.mean(0) - reference).sign()
    assert steps.min() > 1e-3
    torch.testing.assert_close(steps, steps[:1].expand(D), rtol=1e-9, atol=1e-9)

    def picked(model):
        return plain_krum_picks(np.concatenate([honest.numpy(), np.repeat(model.numpy()[None], 3, 0)]), 3)

    assert picked(first) >= len(HONEST)
    assert picked(2 * first - reference) < len(HONEST)


def test_attackers_against_krum_deviate_from_a_start_that_is_sane():
    round = a_round()
    round._start[BYZANTINE[0], 3] = math.nan
    assert sent(DirectedDeviation("krum"), round).isfinite().all()


@pytest.mark.parametrize(
    ("against", "aggregator", "krum"),
    [
        ("auto", KrumLike(), True),
        ("auto", BALANCE(), False),
        ("auto", DFedAvg(), False),
        ("auto", None, False),
        ("krum", BALANCE(), True),
        ("trimmed_mean", KrumLike(), False),
    ],
)
def test_auto_attacks_krum_only_where_the_rule_is_like_krum(against, aggregator, krum):
    models = sent(DirectedDeviation(against), a_round(aggregator=aggregator))
    assert torch.equal(models[0], models[1]) == krum


def test_only_directed_deviation_needs_the_models_of_the_start():
    assert [kind.needs_start for kind in KINDS] == [False, False, True]


def test_an_attack_of_ones_own_may_look_at_every_row_of_the_block():
    class Mirrored(Attack):
        def attack(self, round):
            round.forge(round.byzantine, lambda block: -block.rows[round.byzantine])

    round = a_round()
    assert torch.equal(sent(Mirrored(), round), -round._rows[BYZANTINE])
