"""Attacks that shape each message to its receiver or to the rule, and the one that trains on wrong labels."""

import math
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch

from callbacks.aggregators import BALANCE, RFA, DFedAvg, Krum, SketchGuard
from callbacks.attacks import Dissensus, LabelFlip, NullSpace, SketchSpoofer, ThresholdRider
from dfl_lightning import DFLModule, Ring, RoundCallback

NODES, BYZANTINE = range(10), [1, 4, 8]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True, params=[16_384, 48])
def width(request, monkeypatch):
    monkeypatch.setattr("dfl_lightning.round.WIDTH", request.param)
    return request.param


def norm(vector):
    return math.sqrt(math.fsum(value * value for value in vector))


def honest_nodes(round):
    return [node for node in NODES if node not in BYZANTINE and bool(round._rows[node].isfinite().all())]


def neighbours(round, node, among):
    return [other for other in among if bool(round.neighbours[node, other])]


def victims(round):
    """The honest nodes that hear an attacker."""
    return [node for node in honest_nodes(round) if neighbours(round, node, BYZANTINE)]


def check(got, round, wanted):
    """``wanted`` [receiver] is what its attackers send; everybody else, and to everybody else, sends its own model."""
    for sender in NODES:
        for receiver in NODES:
            own = round._rows[sender].numpy()
            want = wanted[receiver] if sender in BYZANTINE and receiver in wanted else own
            np.testing.assert_allclose(got[receiver, sender].numpy(), want, rtol=0, atol=1e-11)


# Dissensus


def dissensus(round, epsilon):
    def weight(a, b):
        return 1 / (1 + max(len(neighbours(round, a, NODES)), len(neighbours(round, b, NODES))))

    rows, found = round._rows.numpy(), {}
    for node in victims(round):
        pull = 0 * rows[node]
        for other in neighbours(round, node, honest_nodes(round)):
            pull = pull + weight(node, other) * (rows[other] - rows[node])
        share = sum(weight(node, attacker) for attacker in neighbours(round, node, BYZANTINE))
        found[node] = rows[node] - epsilon * pull / share
    return found


@pytest.mark.parametrize("broken", [(), (2,)], ids=["sane", "one broken"])
@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("epsilon", [1.0, 0.3, 2.0])
def test_dissensus_undoes_the_honest_pull_on_each_receiver(trained, messages, epsilon, complete, broken):
    round = trained(complete=complete, broken=broken)
    assert len(victims(round)) == (7 if complete else 5) - len(broken)
    check(messages(round, Dissensus(epsilon)), round, dissensus(round, epsilon))


@pytest.mark.parametrize("complete", [False, True])
def test_who_just_averages_stays_where_it_was_under_dissensus(trained, complete):
    for attack, stays in ((Dissensus(1.0), True), (Dissensus(0.5), False), (None, False)):
        round = trained(complete=complete)
        before, hit = round._rows.clone(), victims(round)
        if attack:
            attack.on_attack(round)
        DFedAvg(mixing="metropolis").on_aggregate(round)
        moved = (round._rows - before).norm(dim=1)
        assert bool((moved[hit] < 1e-12).all()) == stays
        assert (moved[hit] > 0.1).all() != stays
        free = [node for node in honest_nodes(round) if node not in hit]
        assert (moved[free] > 0.1).all()


# Threshold rider

LATER = {"index": 3, "total": 10}
RULES = {
    "model": partial(BALANCE, gamma=0.3, kappa=1.0, threshold="model", fallback="own"),
    "update": partial(BALANCE, c=2.0, threshold="update", fallback="own"),
    "gap": partial(BALANCE, gamma=0.5, kappa=1.0, threshold="gap", fallback="own"),
}


def reach(round, node, rule):
    rows = round._rows.numpy()
    if rule == "update":
        return 2.0 * norm(rows[node] - round._start[node].numpy())
    width = (0.5 if rule == "gap" else 0.3) * math.exp(-0.3) * norm(rows[node])
    if rule == "gap":
        sane = [*honest_nodes(round), *BYZANTINE]
        distances = sorted(norm(rows[node] - rows[other]) for other in neighbours(round, node, sane))
        ratios = [far / near for near, far in pairwise(distances)]
        if ratios and max(ratios) > 1.5:
            width = min(width, distances[ratios.index(max(ratios))])
    return width


def farthest_honest(round, node):
    rows = round._rows.numpy()
    return max((norm(rows[node] - rows[other]) for other in neighbours(round, node, honest_nodes(round))), default=0)


def against_the_honest_update(round, margin, reaches):
    updates = [(round._rows[node] - round._start[node]).numpy() for node in honest_nodes(round)]
    update = sum(updates) / len(updates)
    return {node: round._rows[node].numpy() - margin * far * update / norm(update) for node, far in reaches.items()}


def far_out(round):
    """Puts one attacker's own model far away, so that there is a gap below it."""
    round._rows[8] += 0.4
    return round


@pytest.mark.parametrize("broken", [(), (2,)], ids=["sane", "one broken"])
@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("margin", [0.9, 1.0, 1.7])
@pytest.mark.parametrize("rule", RULES)
def test_a_rider_keeps_its_margin_below_each_receivers_threshold(trained, messages, rule, margin, complete, broken):
    round = far_out(trained(complete=complete, broken=broken, **LATER))
    round.aggregator = RULES[rule]()
    reaches = {node: reach(round, node, rule) for node in victims(round)}
    assert len({f"{far:.9f}" for far in reaches.values()}) > 1
    got = messages(round, ThresholdRider(margin))
    check(got, round, against_the_honest_update(round, margin, reaches))
    for node, far in reaches.items():
        for attacker in neighbours(round, node, BYZANTINE):
            assert norm((got[node, attacker] - round._rows[node]).numpy()) == pytest.approx(margin * far, rel=1e-9)


def test_the_gap_is_the_threshold_of_some_receivers_and_the_model_of_others(trained):
    round = far_out(trained(**LATER))
    narrower = [
        reach(round, node, "gap") < 0.5 * math.exp(-0.3) * norm(round._rows[node].numpy()) for node in victims(round)
    ]
    assert any(narrower)
    assert not all(narrower)


@pytest.mark.parametrize("rule", ["model", "update"])
@pytest.mark.parametrize(("margin", "accepted"), [(0.5, True), (0.999, True), (1.001, False), (2.0, False)])
def test_exact_distances_let_every_rider_in_up_to_a_margin_of_one(trained, rule, margin, accepted):
    round = trained(**LATER)
    round.aggregator = RULES[rule]()
    ThresholdRider(margin).on_attack(round)
    round.aggregator.on_aggregate(round)
    edges = [(node, attacker) for node in victims(round) for attacker in neighbours(round, node, BYZANTINE)]
    assert len(edges) == 6
    assert [bool(round.accepted[edge]) for edge in edges] == [accepted] * len(edges)


@pytest.mark.parametrize("broken", [(), (2,)], ids=["sane", "one broken"])
@pytest.mark.parametrize("rule", [None, DFedAvg(), RFA(), Krum()], ids=lambda rule: type(rule).__name__)
def test_without_a_threshold_a_rider_is_as_far_as_the_farthest_honest_neighbour(trained, messages, rule, broken):
    round = trained(broken=broken)
    round.aggregator = rule
    round._rows[4] += 100  # attackers' own models do not count
    reaches = {node: farthest_honest(round, node) for node in victims(round)}
    assert len(set(reaches.values())) > 2
    check(messages(round, ThresholdRider(0.9)), round, against_the_honest_update(round, 0.9, reaches))


# Sketches

DIM, SIZE = 2000, 100


def sketched(vector, slots, size):
    """The Count Sketch by its definition: slot h + k stands for bucket h with sign -1."""
    found = np.zeros(size)
    for value, slot in zip(vector, slots):
        found[slot % size] += value if slot < size else -value
    return found


def hidden(own, factor, slots, size):
    """What C1 of the rules says: own + v - S' diag(1 / counts) S v."""
    wish = factor * own - own
    sums, counts = sketched(wish, slots, size), np.zeros(size)
    for slot in slots:
        counts[slot % size] += 1
    found = own + wish
    for k, slot in enumerate(slots):
        found[k] -= (1 if slot < size else -1) * sums[slot % size] / counts[slot % size]
    return found


def slots_of(dim, size, seed):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(2 * size, (dim,), dtype=torch.int32, generator=draw).tolist()


HASHES = {
    "the rule's": (SketchGuard(sketch_size=SIZE, hash_seed=7), {"sketch_size": 30, "hash_seed": 9}, (SIZE, 7)),
    "a guess without a rule": (None, {"sketch_size": 30, "hash_seed": 9}, (30, 9)),
    "a guess where none is used": (BALANCE(), {"sketch_size": 30, "hash_seed": 9}, (30, 9)),
    "a guess of 42": (DFedAvg(), {}, (1000, 42)),
}


@pytest.mark.parametrize("factor", [-5.0, 3.0])
@pytest.mark.parametrize("hash_", HASHES)
def test_in_the_null_space_a_message_has_the_sketch_of_the_own_model_and_most_of_the_wish(
    trained, messages, hash_, factor
):
    aggregator, options, (size, seed) = HASHES[hash_]
    round, slots = trained(dim=DIM), slots_of(DIM, size, seed)
    round.aggregator = aggregator
    got = messages(round, NullSpace(factor, **options))
    survived = []
    for attacker in BYZANTINE:
        own, sent = round._rows[attacker].numpy(), got[0, attacker].numpy()
        np.testing.assert_allclose(sent, hidden(own, factor, slots, size), rtol=0, atol=1e-12)
        honest_sketch = sketched(own, slots, size)
        np.testing.assert_allclose(sketched(sent, slots, size), honest_sketch, rtol=0, atol=1e-11)
        assert norm(sketched(factor * own, slots, size) - honest_sketch) > norm(honest_sketch)  # the naked wish is seen
        survived.append((norm(sent - own) / norm(factor * own - own)) ** 2)
        assert all(torch.equal(got[node, attacker], got[0, attacker]) for node in NODES if node != attacker)
    filled = len({slot % size for slot in slots})  # k, unless a bucket is empty
    assert size == 1000 or filled == size
    assert sum(survived) / 3 == pytest.approx(1 - filled / DIM, abs=0.03)


def test_a_guessed_sketch_is_no_larger_than_the_model(trained, messages):
    round = trained(dim=50)
    got = messages(round, NullSpace())
    want = hidden(round._rows[1].numpy(), -5.0, slots_of(50, 50, 42), 50)
    np.testing.assert_allclose(got[0, 1].numpy(), want, rtol=0, atol=1e-12)


def test_a_guess_follows_the_size_of_the_model(trained, messages):
    attack = NullSpace(sketch_size=30)
    for dim in (200, 130, 200):
        assert torch.equal(messages(trained(dim=dim), attack), messages(trained(dim=dim), NullSpace(sketch_size=30)))


@pytest.mark.parametrize(
    ("options", "accepted"),
    [
        ({"verification": "each"}, True),
        ({"verification": "batched"}, True),
        ({"distance_check": True}, False),
        ({"commit_reveal": True}, False),
    ],
    ids=str,
)
def test_sketchguard_takes_a_message_from_the_null_space_unless_it_defends_itself(trained, options, accepted):
    round = trained(dim=DIM, complete=True)
    round.aggregator = SketchGuard(sketch_size=SIZE, gamma=0.5, **options)
    NullSpace().on_attack(round)
    round.aggregator.on_aggregate(round)
    assert round.accepted[honest_nodes(round)][:, BYZANTINE].all() == accepted
    assert round.accepted[honest_nodes(round)][:, BYZANTINE].any() == accepted
    assert round.accepted[0, 2]


@pytest.mark.parametrize("factor", [-5.0, 0.0])
def test_a_spoofer_announces_its_own_row_and_sends_another(trained, messages, factor):
    round = trained()
    got = messages(round, SketchSpoofer(factor))
    for receiver in NODES:
        for sender in NODES:
            assert int(round.announced[receiver, sender]) == sender
            scale = factor if sender in BYZANTINE and sender != receiver else 1
            assert torch.equal(got[receiver, sender], scale * round._rows[sender])
    assert round.num_forged == 3


@pytest.mark.parametrize(("verification", "accepted"), [("each", False), ("batched", False), ("none", True)])
def test_sketchguard_takes_a_spoofers_model_only_without_verification(trained, verification, accepted):
    round = trained(complete=True)
    round.aggregator = SketchGuard(sketch_size=100, verification=verification)
    SketchSpoofer().on_attack(round)
    round.aggregator.on_aggregate(round)
    assert round.accepted[honest_nodes(round)][:, BYZANTINE].all() == accepted
    assert round.accepted[honest_nodes(round)][:, BYZANTINE].any() == accepted
    assert round.accepted[0, 2]


# Flipped labels


class Watch(RoundCallback):
    """What labels nodes train and are measured on, and whether anything is forged."""

    def __init__(self):
        super().__init__()
        self.trained, self.measured, self.forged = [], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        nodes = torch.repeat_interleave(torch.tensor(batch.nodes), torch.tensor(batch.sizes))
        self.trained += zip(nodes.tolist(), batch.labels.tolist())

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.measured += batch.labels.tolist()

    def on_round_end(self, round):
        own = torch.arange(round.num_nodes).expand(round.num_nodes, -1)
        self.forged.append(bool(round.num_forged) or not torch.equal(round.sent, own))


@pytest.mark.parametrize("width", [16_384], indirect=True)
def test_only_byzantine_nodes_train_on_flipped_labels_and_nothing_is_forged(fit, blobs, tiny_net):
    class Mislabelled(blobs):
        def load(self, num_nodes, seed):
            data = super().load(num_nodes, seed)
            for node in (1, 2):
                rows = data.train.indices[node]
                data.train.labels[rows] = 2 - data.train.labels[rows]
            return data

    def run(*callbacks, kind=blobs):
        watch = Watch()
        module = DFLModule(tiny_net, Ring(5), lr=0.1)
        fit(*callbacks, watch, module=module, data=kind(batch_size=8, local_epochs=2))
        return module.replicas.rows.clone(), watch

    rows, plain = run()
    flipped, watch = run(LabelFlip(nodes=[1, 2]))
    mislabelled, _ = run(kind=Mislabelled)
    assert torch.equal(flipped[[0, 3, 4]], rows[[0, 3, 4]])
    assert (flipped[[1, 2]] != rows[[1, 2]]).any(1).all()
    assert torch.equal(flipped, mislabelled)
    assert watch.trained == [(node, 2 - label if node in (1, 2) else label) for node, label in plain.trained]
    assert {label for node, label in plain.trained if node == 1} >= {0, 2}
    assert watch.measured == plain.measured
    assert watch.measured
    assert watch.forged == [False, False]


@pytest.mark.parametrize("width", [16_384], indirect=True)
def test_flipped_labels_reach_honest_nodes_through_the_aggregator_only(fit, tiny_net):
    def run(*callbacks):
        return fit(*callbacks, module=DFLModule(tiny_net, Ring(5), lr=0.1)).replicas.rows.clone()

    honest = run(DFedAvg())
    assert (run(DFedAvg(), LabelFlip(nodes=[1])) != honest).any(1).all()
    assert torch.equal(run(DFedAvg(), LabelFlip(nodes=[])), honest)
