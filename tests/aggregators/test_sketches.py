"""What happens around a choice by sketches: fetching, verification, the distance check, and commit and reveal."""

import math
from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch

from callbacks.aggregators import BALANCE, RFA, SCCLIP, UBAR, Krum, MultiKrum, SketchGuard, WFAgg
from callbacks.attacks import NullSpace
from dfl_lightning import UserError
from dfl_lightning.distance_rule import View
from dfl_lightning.functional.sketch import CountSketch
from dfl_lightning.functional.verification import verify

N, D, K = 9, 1000, 64
DISTANCE_RULES = [BALANCE, Krum, MultiKrum, RFA, SCCLIP, SketchGuard, UBAR, WFAgg]

pytestmark = pytest.mark.usefixtures("one_thread")


def hashes_of(rule):
    """The list into which the hash of every coming round is put."""
    seen, screen = [], rule.screen
    rule.screen = lambda round, view: seen.append(view.sketch) or screen(round, view)
    return seen


# Verification


@pytest.mark.parametrize("verification", ["each", "batched", "none"])
def test_who_sends_another_model_than_it_announced_is_dropped_and_named_unless_nobody_verifies(arena, verification):
    rows, neighbours = arena.world()
    byzantine = arena.BYZANTINE
    rows[byzantine] = rows[1] + 0.01 * torch.randn(3, D, generator=torch.Generator().manual_seed(1), dtype=rows.dtype)
    round = arena.a_round(rows, neighbours, arena.ATTACKS["liar"])
    SketchGuard(sketch_size=K, verification=verification).on_aggregate(round)
    deceived = neighbours[1, byzantine].nonzero()[:, 0]
    liars = [byzantine[k] for k in deceived]
    assert len(liars) > 1  # several at once
    assert round.received["models"][1] == D * neighbours[1].sum()  # fetched before it could be seen
    if verification == "none":
        assert round.accepted[1, liars].all()
        assert round.notes == []
        assert round.metrics["screening/verification_failed"] == 0
    else:
        assert not round.accepted[:, byzantine].any()
        assert [int(note.split()[1]) for note in round.notes] == byzantine
        assert "dropped by" in round.notes[0]
        assert round.metrics["screening/verification_failed"] == neighbours[:, byzantine].sum()


@pytest.mark.parametrize("kind", DISTANCE_RULES)
def test_batched_verification_decides_as_verification_of_each(arena, kind):
    dropped = 0
    for seed in range(6):
        draw = torch.Generator().manual_seed(seed)
        rows, neighbours = arena.world(seed, chance=0.9)
        lies = torch.rand(N, N, generator=draw) < 0.3
        claimed = torch.where(lies, torch.randint(N, (N, N), generator=draw), torch.arange(N)).fill_diagonal_(0)
        claimed += torch.arange(N).diag()
        outcomes = []
        for verification in ("each", "batched"):
            round = arena.a_round(rows, neighbours)
            round.announced = claimed
            kind(sketch_size=K, verification=verification).on_aggregate(round)
            outcomes.append((round._rows, round.accepted, round.notes))
        assert torch.equal(outcomes[0][1], outcomes[1][1])
        assert torch.equal(outcomes[0][0], outcomes[1][0])
        assert outcomes[0][2] == outcomes[1][2]
        dropped += len(outcomes[0][2])
    assert dropped


def spoofed(sketch, draw, dim):
    """Some models, what was announced for them, and which of them are what was announced."""
    count = int(torch.randint(1, 7, (), generator=draw))
    dtype = [torch.float32, torch.float64][int(torch.randint(2, (), generator=draw))]
    models = torch.randn(count, dim, generator=draw, dtype=torch.float64).to(dtype)
    models *= 10.0 ** torch.randint(-3, 9, (count, 1), generator=draw)  # one of them may be huge
    announced, honest = sketch(models), torch.ones(count, dtype=torch.bool)
    for k in range(count):
        kind = int(torch.randint(8, (), generator=draw))
        honest[k] = kind > 3
        if kind == 0:
            models[k] *= [-5.0, 1.1, 0.5][int(torch.randint(3, (), generator=draw))]
        elif kind == 1:
            models[k] = torch.randn(dim, generator=draw, dtype=torch.float64).to(dtype)
        elif kind in (2, 3):
            models[k, 7] = [math.nan, math.inf][kind - 2]
    return models, announced, honest


def test_one_check_of_all_models_decides_as_one_check_of_each_in_a_thousand_cases():
    sketch, draw, seen = CountSketch(40, 10), torch.Generator().manual_seed(0), Counter()
    for _ in range(1000):
        models, announced, honest = spoofed(sketch, draw, 40)
        for how in ("each", "batched"):
            assert torch.equal(verify(sketch, models, announced, how, draw), honest)
        assert verify(sketch, models, announced, "none").all()
        seen[min(2, int((~honest).sum())), len(honest) > 1] += 1
    assert len(seen) == 5  # nobody, one or several of one or several; several of one there cannot be
    assert min(seen.values()) > 50


class Counted:
    """A hash that counts the rows it is given."""

    def __init__(self, sketch):
        self.sketch, self.calls = sketch, []

    def __call__(self, rows, *columns):
        self.calls.append(len(rows))
        return self.sketch(rows, *columns)


def test_if_all_is_right_the_batched_check_sketches_one_row_and_else_all_of_them_too():
    sketch = CountSketch(40, 10)
    models = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    announced = sketch(models)
    for how, wrong, calls in (("batched", 0, [1]), ("each", 0, [5]), ("none", 0, []), ("batched", 1, [1, 5])):
        counted = Counted(sketch)
        accepted = verify(counted, models * (1 + wrong * torch.eye(5)[2])[:, None], announced, how)
        assert counted.calls == calls
        assert accepted.sum() == 5 - wrong


def test_zero_models_are_verified_like_others():
    sketch = CountSketch(40, 10)
    models = torch.zeros(3, 40)
    for how in ("each", "batched"):
        assert verify(sketch, models, sketch(models), how).all()
        models[1, 3] = 1e-3
        assert verify(sketch, models, sketch(models * 0), how).tolist() == [True, False, True]
        models[1, 3] = 0
        assert verify(sketch, models[:0], sketch(models)[:0], how).shape == (0,)


@pytest.mark.parametrize("how", ["each", "batched", "none"])
def test_the_simulation_drops_whom_each_receiver_would_drop(arena, how):
    dropped = 0
    for seed in range(12):
        draw = torch.Generator().manual_seed(seed)
        models, neighbours = arena.world(seed, chance=0.9)
        models *= 10.0 ** torch.randint(-3, 9, (N, 1), generator=draw)  # one of them may be huge
        round = arena.a_round(models, neighbours, arena.ATTACKS["broken liar" if seed % 2 else "nobody"])
        rows = torch.from_numpy(arena.all_rows(round))
        lies = torch.rand(N, N, generator=draw) < 0.2
        round.announced = torch.where(lies, torch.randint(N, (N, N), generator=draw), round.announced)
        rule = SketchGuard(sketch_size=K, verification=how)
        sketch = rule.public_sketch(D)
        view = View(round, sketch)
        fetched = view.candidates & (torch.rand(N, N, generator=draw) < 0.8)
        verified = rule._verify(round, view, fetched)
        for i in range(N):
            senders = fetched[i].nonzero()[:, 0]
            models, announced = rows[round.sent[i, senders]], sketch(rows)[round.announced[i, senders]]
            assert torch.equal(verified[i, senders], verify(sketch, models, announced, how, draw))
        assert not verified[~fetched].any()
        dropped += int((fetched & ~verified).sum())
    assert (dropped > 0) == (how != "none")


def test_a_sketch_of_another_dimension_is_drawn_anew(arena):
    rule = SketchGuard(sketch_size=K)
    for dim in (D, 70):
        rows, accepted = rule(arena.world(dim=dim)[0])
        assert len(rule.sketch.slots) == dim
        want, chosen = SketchGuard(sketch_size=K)(arena.world(dim=dim)[0])
        assert torch.equal(accepted, chosen)
        assert torch.equal(rows, want)


# Models that are shaped to the hash


def shaped(arena, gamma=2.0, **options):
    rows, neighbours = arena.world(2, chance=0.9)
    rule = SketchGuard(sketch_size=K, gamma=gamma, kappa=0.0, **options)
    round = arena.a_round(rows, neighbours, NullSpace(nodes=arena.BYZANTINE), aggregator=rule)
    vectors = torch.from_numpy(arena.all_rows(round))
    forged = vectors[round.sent[0, arena.BYZANTINE]]
    assert (forged - rows[arena.BYZANTINE]).norm(dim=1).gt(4 * rows.norm(dim=1).mean()).all()  # far from honest
    sketch = rule.public_sketch(D)
    torch.testing.assert_close(sketch(forged), sketch(rows[arena.BYZANTINE]))  # by its sketch it is honest
    rule.on_aggregate(round)
    honest = ~round.byzantine
    return round, rows, (neighbours & round.byzantine)[honest], round.accepted[honest]


def test_a_model_in_the_null_space_of_the_hash_passes_what_was_published(arena):
    round, _, links, accepted = shaped(arena)
    assert accepted[links].float().mean() > 0.8
    assert round.metrics["screening/verification_failed"] == 0


def test_a_model_in_the_null_space_of_the_hash_is_dropped_by_the_distance_check(arena):
    round, rows, links, accepted = shaped(arena, distance_check=True)
    assert not accepted[links].any()
    assert accepted.any()
    assert round.received["models"][arena.BESIEGED] > 0  # fetched, and then seen to be far
    assert round.metrics["screening/distance_check_failed"] >= links.sum() / 2
    assert any("is farther away than its sketch said" in note for note in round.notes)
    assert torch.equal(round._rows[arena.BESIEGED], rows[arena.BESIEGED])


@pytest.mark.parametrize("kind", [RFA, SCCLIP, UBAR, MultiKrum])
def test_a_true_distance_may_be_five_deviations_of_a_sketch_above_what_was_seen(kind):
    sketch = CountSketch(D, K)
    one, other = (sketch.slots == sketch.slots[0]).nonzero()[:2, 0].tolist()  # cancel out if one is the negative
    aside = int((sketch.slots % K != sketch.slots[0] % K).nonzero()[0])
    for deviations in (4.9, 5.1):
        rows = torch.zeros(4, D, dtype=torch.float64)
        rows[1:, aside] = 1.0  # seen
        hidden = math.sqrt(((1 + deviations * math.sqrt(2 / K)) ** 2 - 1) / 2)
        rows[1, one], rows[1, other] = hidden, -hidden
        rule = kind(sketch_size=K, distance_check=True)
        _, accepted = rule(rows, torch.ones(4, 4).bool().fill_diagonal_(False), loss=lambda model, node: 0.0)
        assert accepted[0, 2:].all()
        assert accepted[0, 1] == (deviations < 5)


def test_a_nearest_fallback_that_is_too_far_is_dropped_by_the_distance_check_and_the_own_model_stays(arena):
    for check in (False, True):
        round, rows, _, _ = shaped(arena, gamma=0.01, distance_check=check)
        assert round.received["models"][arena.BESIEGED] == D
        assert round.accepted[arena.BESIEGED].any() != check
        assert torch.equal(round._rows[arena.BESIEGED], rows[arena.BESIEGED]) == check


def test_a_model_cannot_be_shaped_to_a_hash_that_follows_from_it(arena):
    round, _, links, accepted = shaped(arena, commit_reveal=True)
    others = [i for i, row in enumerate(links.tolist()) if any(row) and accepted[i].any()]
    assert len(others) > 2
    besieged = int((~round.byzantine)[: arena.BESIEGED].sum())  # its place among the honest
    reached = accepted & links
    reached[besieged] = False  # has nobody else, and takes the nearest
    assert not reached.any()
    assert round.received["models"][1] == D * round.accepted[1].sum()  # screened, not fetched and dropped


# Commit and reveal


@pytest.mark.parametrize("kind", DISTANCE_RULES[:-1])
def test_who_announces_different_models_is_left_out_by_everybody_and_counted(arena, kind):
    rows, neighbours = arena.world(2, chance=0.9)
    equivocators, inconsistent = [2, 7], 5  # node 5 announces one model to all, and sends another to odd ones
    for commit in (False, True):
        round = arena.a_round(rows, neighbours, arena.ATTACKS["two-faced"])
        options = {"byzantine_fraction": 0.0} if kind in (Krum, MultiKrum, SCCLIP) else {}
        kind(sketch_size=K, commit_reveal=commit, verification="none", **options).on_aggregate(round)
        assert arena.equivocators(round) == set(equivocators)
        if commit:
            assert not round.accepted[:, equivocators].any()
            assert not round.accepted[1::2, inconsistent].any()
            links = neighbours[:, equivocators].sum()
            assert round.metrics["screening/equivocators"] == links > 4
            assert [note.split(";")[0] for note in round.notes if "digests" in note] == [
                f"Node {node} sent conflicting digests" for node in equivocators
            ]
        elif kind is not Krum:  # which takes one
            assert round.accepted[:, [*equivocators, inconsistent]].any(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_edge_carries_the_digests_of_all_who_publish_one(arena, dtype):
    rows, neighbours = arena.world(1)
    publish = int(neighbours.any(0).sum())
    assert publish == N - 1  # all but the lonely one
    for kind in DISTANCE_RULES[:-1]:
        round = arena.a_round(rows.to(dtype), neighbours)
        kind(sketch_size=K, commit_reveal=True).on_aggregate(round)
        assert torch.equal(round.received["digests"] * round.itemsize, 32 * publish * neighbours.sum(1))


def test_the_hash_follows_from_the_round_the_models_and_the_seed_and_is_not_the_public_one(arena):
    rows, neighbours = arena.world()
    tables = {}
    for index, seed, moved in product((0, 1), (42, 43), (0.0, 1e-9)):
        rule = SketchGuard(sketch_size=K, commit_reveal=True, hash_seed=seed)
        seen = hashes_of(rule)
        for _ in range(2):
            rule.on_aggregate(arena.a_round(rows + moved, neighbours, index=index))
        assert torch.equal(seen[0].slots, seen[1].slots)
        tables[index, seed, moved] = tuple(seen[0].slots.tolist())
        tables[seed] = tuple(rule.public_sketch(D).slots.tolist())
    assert len(set(tables.values())) == len(tables) == 10


# What a sketch is worth


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0.1, 0.05), (0.2, 0.1), (0.2, 0.05), (0.5, 0.5), (0.3, 0.07), (1.5, 0.9), (0.05, 0.01)]
)
def test_the_size_follows_from_how_far_a_distance_may_be_off_and_how_often(epsilon, delta):
    size = math.ceil(2 / (epsilon**2 * delta))
    for kind in DISTANCE_RULES:
        assert kind(epsilon=epsilon, delta=delta).sketch_size == size
    assert SketchGuard().sketch_size == 1000
    assert BALANCE().sketch_size is None


def test_distances_are_off_by_more_than_epsilon_no_more_often_than_delta():
    size, difference = RFA(epsilon=0.3, delta=0.2).sketch_size, torch.randn(1, 400, dtype=torch.float64)
    true = float(difference.square().sum())
    sketched = [float(CountSketch(400, size, seed)(difference).square().sum()) for seed in range(300)]
    assert 0 < np.mean([abs(one - true) > 0.3 * true for one in sketched]) < 0.2


@pytest.mark.parametrize("kind", DISTANCE_RULES)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sketch_size": 10, "epsilon": 0.1, "delta": 0.1}, "sketch_size is 10, epsilon 0.1 and delta 0.1"),
        ({"epsilon": 0.1}, "epsilon 0.1 and delta None"),
        ({"delta": 0.1}, "epsilon None and delta 0.1"),
        ({"epsilon": 0.0, "delta": 0.1}, "epsilon is 0.0"),
        ({"epsilon": 0.1, "delta": 1.0}, "delta 1.0"),
        ({"epsilon": math.nan, "delta": 0.1}, "epsilon is nan"),
        ({"epsilon": 1e-6, "delta": 0.1}, "sketch_size is 20000000000000"),
        ({"sketch_size": 0}, "sketch_size is 0"),
        ({"sketch_size": K, "hash_seed": -1}, "hash_seed is -1"),
        ({"sketch_size": K, "verification": "most"}, "verification is 'most'"),
    ],
)
def test_options_of_sketches_that_do_not_fit_are_refused_in_one_sentence(kind, options, message):
    with pytest.raises(UserError, match=message) as error:
        kind(**options)
    assert str(error.value).startswith("aggregator.")
    assert str(error.value).endswith(".")
    assert ". " not in str(error.value)


@pytest.mark.parametrize("option", ["distance_check", "commit_reveal"])
@pytest.mark.parametrize("kind", [kind for kind in DISTANCE_RULES if kind is not SketchGuard])
def test_what_protects_sketches_is_refused_where_whole_models_are_compared(kind, option):
    with pytest.raises(UserError, match=f"aggregator.{option} is true, but it protects sketches") as error:
        kind(**{option: True})
    assert ". " not in str(error.value)


def test_a_sketch_larger_than_the_model_is_refused_when_the_run_starts(fit):
    with pytest.raises(UserError, match="sketch_size is 1000, but the whole model has 51 parameters"):
        fit(SketchGuard())


def test_the_error_of_the_sketches_is_the_mean_over_what_honest_nodes_fetched(arena):
    rows, _ = arena.world(3, nodes=14)
    marks = torch.arange(14) >= 12
    found = {}
    for check in (True, False):
        rule = SketchGuard(sketch_size=K, gamma=50.0, distance_check=check)
        round = arena.a_round(rows, ~torch.eye(14, dtype=torch.bool))
        round.byzantine = marks
        rule.on_aggregate(round)
        found[check] = round.metrics["screening/sketch_error"]
    sketches, vectors, errors = rule.sketch(rows).numpy(), rows.numpy(), []
    for i, j in product(range(12), range(14)):
        if i != j and (true := np.linalg.norm(vectors[i] - vectors[j])) > 0:
            errors.append(abs(np.linalg.norm(sketches[i] - sketches[j]) - true) / true)
    assert len(errors) == 12 * 13 - 2  # two models are equal
    assert found[True] == pytest.approx(np.mean(errors), rel=1e-9)
    assert found[False] == pytest.approx(np.mean(errors), rel=0.2)  # from a few of them
    assert found[False] != found[True]
