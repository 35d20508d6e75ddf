"""Nine nodes, three of them Byzantine, what these may send, and a plain loop over what every node sees, takes and does.

The loop is in float64 numpy and shares no code with the rules; each test file writes its rules as what one node chooses
and how it mixes.
"""

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.linalg import norm

from callbacks.attacks import DirectedDeviation, Gaussian, NullSpace, ScaledModel
from dfl_lightning import Attack, Round

N, D, K = 9, 1000, 64
BYZANTINE = [2, 5, 7]
LONELY, BESIEGED, SINGLE = 8, 4, 0  # no neighbour; Byzantine neighbours only; one neighbour


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
    "null space": NullSpace(sketch_size=K, nodes=BYZANTINE),
    "liar": Forger(lambda own, index: -5 * own, lies=True),
    "subtle liar": Forger(lambda own, index: 1.01 * own, lies=True),
    "broken liar": Forger(in_one_place(math.nan), lies=True),
    "two-faced": TwoFaced(),
    **BROKEN,
}


@pytest.fixture(params=ATTACKS)
def attack(request):
    """Every attack; its name as an indirect parameter gives one."""
    return ATTACKS[request.param]


@pytest.fixture(params=BROKEN)
def broken_messages(request):
    return BROKEN[request.param]


def world(seed=0, nodes=N, dim=D, chance=0.5):
    """Models [N, D] at different distances from a common one, two of them equal; a graph with odd neighbourhoods."""
    draw = torch.Generator().manual_seed(seed)
    spread = torch.linspace(0.2, 1.2, nodes, dtype=torch.float64)[torch.randperm(nodes, generator=draw), None]
    rows = torch.randn(dim, generator=draw, dtype=torch.float64)
    rows = rows + spread * torch.randn(nodes, dim, generator=draw, dtype=torch.float64)
    rows[6] = rows[3]
    neighbours = (torch.rand(nodes, nodes, generator=draw) < chance).triu(1)
    neighbours[1, 3] = neighbours[1, 2] = True
    neighbours = neighbours | neighbours.T
    for node, friends in ((SINGLE, [1]), (BESIEGED, BYZANTINE), (LONELY, [])):
        neighbours[node] = neighbours[:, node] = False
        neighbours[node, friends] = neighbours[friends, node] = True
    return rows, neighbours


def a_round(rows, neighbours, attack=None, index=1, total=4, aggregator=None):
    byzantine = torch.zeros(len(rows), dtype=torch.bool)
    byzantine[BYZANTINE] = True
    shift = torch.randn(rows.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(rows)
    round = Round(rows.clone(), neighbours, byzantine, index=index, total=total, seed=3, start=rows - 0.1 * shift)
    round.loss, round.aggregator = losses_of(rows), aggregator
    if attack is not None:
        round.attack = partial(attack.on_attack, round)
        round.attack()
    return round


def losses_of(rows):
    """Even nodes like the mean best, odd ones their own model, and node 1 cannot run a third of the models."""
    middle, cut = rows.mean(0), float(rows[:, 0].sort().values[len(rows) // 3])

    def loss(model, node):
        if node == 1 and model[0] < cut:
            return math.nan
        return float((model - (rows[node] if node % 2 else middle)).square().mean())

    return loss


def all_rows(round):
    """What is sent in the round: float64 numpy [N + F, D]."""
    blocks = []
    round.reduce(lambda block: blocks.append(block.rows.clone()) or block.own.new_zeros(1))
    return torch.cat(blocks, 1).double().numpy()


@pytest.fixture
def arena():
    kinds = {"Forger": Forger, "TwoFaced": TwoFaced, "ATTACKS": ATTACKS, "BAD": BAD}
    nodes = {"BYZANTINE": BYZANTINE, "LONELY": LONELY, "BESIEGED": BESIEGED, "SINGLE": SINGLE}
    plain = {"usable": usable, "sketch": plain_sketch, "equivocators": equivocators}
    return SimpleNamespace(N=N, D=D, K=K, world=world, a_round=a_round, all_rows=all_rows, **kinds, **nodes, **plain)


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


class Sight:
    """What node i sees of its neighbours: their models, or sketches of them; dictionaries by sender."""

    def __init__(self, i, round, vectors, feature, comparable, rows, senders):
        self.i, self.round, self.whole = i, round, self
        self.own, self.here = vectors[i], feature(vectors[i])
        self.moved = norm(feature(vectors[i] - round._start[i].double().numpy()))
        self.degrees = round.neighbours.sum(1).tolist()
        seen = {j: feature(vectors[rows[j]]) for j in senders}
        self.shown = {j: vector for j, vector in seen.items() if comparable(vector)}
        self.messages = {j: vectors[round.sent[i, j]] for j in np.flatnonzero(round.neighbours[i]).tolist()}
        self.distances = {j: norm(self.here - vector) for j, vector in self.shown.items()}
        self.invalid = False

    def declared(self, fraction, holds, on_invalid):
        """How many Byzantine models the node assumes, and whether it can apply a rule that needs holds(n, f)."""
        fraction = len(BYZANTINE) / N if fraction is None else fraction
        expected, n = self.degrees[self.i], len(self.shown) + 1
        f = max(0, math.ceil(fraction * expected - 1e-9) - (expected - len(self.shown)))
        self.invalid = expected > 0 and not holds(n, f)
        while f > 0 and not holds(n, f):
            f -= 1
        return f, holds(n, f) and not (self.invalid and on_invalid == "own")

    @staticmethod
    def ranked(scores):
        """The keys of a dictionary by ascending value; of those that are equal up to rounding, the lowest first."""
        order, level, last = [], 0, None
        for key in sorted(scores, key=lambda key: (scores[key], key)):
            if last is not None and scores[key] > last + 1e-5 * abs(last):
                level += 1
            last = scores[key]
            order.append((level, key))
        return [key for _, key in sorted(order)]


def equivocators(round):
    """Who announced different rows to different neighbours."""
    claims = {j: {int(round.announced[i, j]) for i in range(N) if round.neighbours[i, j]} for j in range(N)}
    return {j for j, rows in claims.items() if len(rows) > 1}


def plain_round(rule, plain, round, vectors, slots):
    """What each node sees, fetches, drops, accepts and becomes."""
    out = equivocators(round) if rule.commit_reveal else set()
    for i in range(N):
        friends = np.flatnonzero(round.neighbours[i]).tolist()
        whole = Sight(i, round, vectors, np.asarray, usable, round.sent[i], friends)
        if slots is None:
            see = whole
        else:
            sketch, trusted = partial(plain_sketch, slots=slots), [j for j in friends if j not in out]
            see = Sight(i, round, vectors, sketch, finite, round.announced[i], trusted)
            see.whole = whole
        chosen = plain.choose(see)
        fetched = [j for j in chosen if j != i]
        spoofed, far, accepted, errors = [], [], [], []
        for j in fetched:
            message = see.messages[j]
            if slots is not None and not as_announced(rule, see, j, sketch):
                spoofed.append(j)
            elif usable(message):
                true = norm(see.own - message)
                if true > 0:
                    errors.append(abs(see.distances[j] - true) / true)
                limit = getattr(plain, "within", lambda see, j: see.distances[j] * (1 + 5 * math.sqrt(2 / K)))
                (far if rule.distance_check and not true <= limit(see, j) else accepted).append(j)
        if hasattr(plain, "judge"):
            accepted = plain.judge(see, accepted)
        new = plain.mix(see, accepted, i in chosen)
        yield SimpleNamespace(
            see=see, new=new, accepted=accepted, fetched=fetched, spoofed=spoofed, far=far, errors=errors
        )


def as_announced(rule, see, j, sketch):
    i, round = see.i, see.round
    if rule.commit_reveal:
        return bool(round.sent[i, j] == round.announced[i, j])
    said = see.shown[j]
    return rule.verification == "none" or norm(said - sketch(see.messages[j])) <= 1e-5 * norm(said)


@pytest.fixture
def agreed():
    """Runs a rule that is given distances, compares all that it did with the plain loop, and returns the latter."""

    def run(rule, plain, round, tolerance=1e-9):
        vectors, hashes, screen = all_rows(round), [], rule.screen
        rule.screen = lambda round, view: hashes.append(view.sketch) or screen(round, view)
        rule.on_aggregate(round)
        rule.screen = screen
        slots = None if hashes[0] is None else hashes[0].slots.numpy()
        nodes = list(plain_round(rule, plain, round, vectors, slots))
        degrees, honest = round.neighbours.sum(1), [i for i in range(N) if i not in BYZANTINE]
        for i, node in enumerate(nodes):
            assert round.accepted[i].nonzero()[:, 0].tolist() == sorted(node.accepted)
            moved = degrees[i] if slots is None else len(node.fetched)
            assert round.received["models"][i] == D * moved
            np.testing.assert_allclose(round._rows[i].numpy(), node.new, rtol=tolerance, atol=tolerance)
        figures = {}
        if slots is not None:
            assert torch.equal(round.received["sketches"], K * degrees)
            figures["verification_failed"] = sum(len(node.spoofed) for node in nodes)
            errors = [error for i in honest for error in nodes[i].errors]
            figures |= {"sketch_error": np.mean(errors)} if errors else {}
        if rule.distance_check:
            figures["distance_check_failed"] = sum(len(node.far) for node in nodes)
        if rule.commit_reveal:
            figures["equivocators"] = int(round.neighbours[:, list(equivocators(round))].sum())
            assert torch.equal(round.received["digests"], 32 * int((degrees > 0).sum()) // round.itemsize * degrees)
        if hasattr(rule, "on_invalid"):
            figures["invalid"] = np.mean([nodes[i].see.invalid for i in honest])
        clipped = [share for i in honest for share in getattr(nodes[i].see, "clipped", [])]
        figures |= {"clipped": np.mean(clipped)} if clipped else {}
        for name, value in figures.items():
            assert round.metrics[f"screening/{name}"] == pytest.approx(value, rel=1e-6), name
        return nodes

    return run
