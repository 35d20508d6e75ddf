"""Attacks that send every receiver the same, against their definitions written as plain loops."""

import io
import math
from functools import partial
from itertools import pairwise
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from callbacks.attacks import ALIE, IPM, LIE, BitFlip, DirectedDeviation, Ladder, Mimic, MinMax, MinSum, SignFlip

NODES, BYZANTINE = range(10), [1, 4, 8]
UNSEEN = [6, 9]  # honest nodes that no attacker hears

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True, params=[16_384, 48])
def width(request, monkeypatch):
    monkeypatch.setattr("dfl_lightning.round.WIDTH", request.param)
    return request.param


class Scene:
    """What attackers know, as lists of numpy vectors."""

    def __init__(self, round, knowledge="all"):
        self.own = [row.numpy().copy() for row in round._rows]
        self.start = [row.numpy().copy() for row in round._start]
        self.dim = len(self.own[0])
        self.seen = []
        for node in NODES:
            heard = any(bool(round.neighbours[attacker, node]) for attacker in BYZANTINE)
            sane = all(math.isfinite(value) for value in self.own[node])
            if node not in BYZANTINE and sane and (heard or knowledge == "all"):
                self.seen.append(node)
        self.models = [self.own[node] for node in self.seen]
        self.updates = [self.own[node] - self.start[node] for node in self.seen]


def average(vectors):
    total = 0 * vectors[0]
    for vector in vectors:
        total = total + vector
    return total / len(vectors)


def deviations(vectors):
    """The standard deviation of each coordinate, with n - 1."""
    found = np.zeros(len(vectors[0]))
    for k in range(len(found)):
        values = [vector[k] for vector in vectors]
        middle = math.fsum(values) / len(values)
        found[k] = math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1))
    return found


def norm(vector):
    return math.sqrt(math.fsum(value * value for value in vector))


def everybody(vector):
    return dict.fromkeys(BYZANTINE, vector)


def sign_flip(scene, scale):
    return {b: scene.start[b] - scale * (scene.own[b] - scene.start[b]) for b in BYZANTINE}


def lie(scene, z):
    return everybody(average(scene.models) - z * deviations(scene.models))


def ipm(scene, epsilon):
    return {b: scene.start[b] - epsilon * average(scene.updates) for b in BYZANTINE}


def ladder(scene, ratio):
    mean, update = average(scene.models), average(scene.updates)
    distances = sorted(norm(model - mean) for model in scene.models)
    far, found = distances[(len(distances) - 1) // 2], {}
    for attacker in BYZANTINE:
        found[attacker] = mean - far * update / norm(update)
        far *= ratio
    return found


def direction_of(scene, direction):
    if direction == "std":
        return deviations(scene.models)
    update = average(scene.updates)
    return np.sign(update) if direction == "sign" else update / norm(update)


def squared(a, b):
    return math.fsum((x - y) ** 2 for x, y in zip(a, b))


def envelope(scene, bound):
    """The limit of a bound, and the distance of a message that it limits."""
    models = scene.models
    pairs = [[squared(a, b) for b in models] for a in models]
    if bound == "distance":
        return max(map(max, pairs)), lambda message: max(squared(message, model) for model in models)
    sums = [sum(row) for row in pairs]
    limit = max(sums) if bound == "max" else min(sums)
    return limit, lambda message: sum(squared(message, model) for model in models)


def largest(scene, direction, bound):
    """mean - gamma v, with gamma from the roots of the quadratics instead of a search."""
    mean, v = average(scene.models), direction_of(scene, direction)
    limit, _ = envelope(scene, bound)
    a, bs, cs = squared(v, 0 * v), [], []
    for model in scene.models:
        bs.append(2 * math.fsum(v * (model - mean)))
        cs.append(squared(model, mean))
    if bound == "distance":
        gamma = min((-b + math.sqrt(b * b - 4 * a * (c - limit))) / (2 * a) for b, c in zip(bs, cs))
    else:
        a, b, c = a * len(bs), sum(bs), sum(cs)
        gamma = (-b + math.sqrt(b * b - 4 * a * (c - limit))) / (2 * a)
    return everybody(mean - gamma * v)


# name: the attack, its plain definition, absolute tolerance, whether it looks at others
SENDERS = {
    "sign flip": (SignFlip, partial(sign_flip, scale=1.0), 1e-12, False),
    "sign flip, scaled": (partial(SignFlip, 2.5), partial(sign_flip, scale=2.5), 1e-12, False),
    "bit flip": (BitFlip, partial(sign_flip, scale=1.0), 1e-12, False),
    "LIE": (LIE, partial(lie, z=1.5), 1e-12, True),
    "LIE, other side": (partial(LIE, z=-0.7), partial(lie, z=-0.7), 1e-12, True),
    "ALIE": (ALIE, partial(lie, z=NormalDist().inv_cdf((10 - 3 - 3) / (10 - 3))), 1e-12, True),
    "IPM": (IPM, partial(ipm, epsilon=0.5), 1e-12, True),
    "IPM, far": (partial(IPM, epsilon=10.0), partial(ipm, epsilon=10.0), 1e-12, True),
    "ladder": (Ladder, partial(ladder, ratio=1.4), 1e-12, True),
    "ladder, level": (partial(Ladder, ratio=1.0), partial(ladder, ratio=1.0), 1e-12, True),
    "ladder, steep": (partial(Ladder, ratio=3.0), partial(ladder, ratio=3.0), 1e-12, True),
}
BOUNDS = {"distance": MinMax, "max": MinSum, "min": partial(MinSum, bound="min")}
for bound, kind in BOUNDS.items():
    for direction in ("std", "unit", "sign"):
        attack = partial(kind, direction=direction)
        SENDERS[f"{bound} along {direction}"] = (
            attack,
            partial(largest, direction=direction, bound=bound),
            2e-5,
            True,
        )
SEEING = [name for name, (*_, sees) in SENDERS.items() if sees]


def check(got, round, wanted, tolerance=1e-12):
    """Attackers send everybody what is wanted, everybody else its own model."""
    for sender in NODES:
        want = torch.from_numpy(wanted[sender]) if sender in BYZANTINE else round._rows[sender]
        for receiver in NODES:
            model = round._rows[sender] if sender == receiver else want
            torch.testing.assert_close(got[receiver, sender], model, rtol=0, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("broken", [(), (2,), (0, 7)], ids=["sane", "one broken", "two broken"])
@pytest.mark.parametrize(
    ("name", "knowledge"),
    [(name, "all") for name in SENDERS] + [(name, "neighbours") for name in SEEING],
)
def test_attackers_send_what_the_definition_says(trained, messages, name, knowledge, broken):
    attack, definition, tolerance, sees = SENDERS[name]
    round = trained(broken=broken)
    scene = Scene(round, knowledge)
    assert len(scene.seen) == (7 if knowledge == "all" else 5) - len(broken)
    got = messages(round, attack(knowledge=knowledge) if sees else attack())
    check(got, round, definition(scene), tolerance)


@pytest.mark.parametrize("name", [*SEEING, "Mimic", "trimmed mean", "Krum"])
def test_what_attackers_do_not_see_changes_nothing_and_what_they_see_does(trained, messages, name):
    against = {"trimmed mean": "trimmed_mean", "Krum": "krum"}
    kind = Mimic if name == "Mimic" else partial(DirectedDeviation, against.get(name))
    attack = SENDERS[name][0] if name in SENDERS else kind
    for knowledge, changes in (("neighbours", False), ("all", True)):
        plain, other = trained(), trained()
        other._rows[UNSEEN] += 1 - 3 * torch.rand(130, dtype=torch.float64)
        before, after = (messages(round, attack(knowledge=knowledge))[0, BYZANTINE] for round in (plain, other))
        assert torch.equal(before, after) != changes


@pytest.mark.parametrize(
    ("nodes", "byzantine"), [(50, 10), (10, 3), (10, 1), (5, 2), (20, 9), (11, 5), (11, 8), (7, 5), (4, 1), (3, 1)]
)
def test_the_z_of_alie_is_the_quantile_of_the_honest_ones_that_must_be_won_over(nodes, byzantine):
    attack = ALIE(nodes=list(range(byzantine)))
    z = attack._z(SimpleNamespace(num_nodes=nodes, byzantine=attack.choose(nodes, 0)))
    supporters = max(nodes // 2 + 1 - byzantine, 1)
    want = NormalDist().inv_cdf((nodes - byzantine - supporters) / (nodes - byzantine))
    assert z == pytest.approx(want, abs=1e-12)


# Min-Max and Min-Sum


@pytest.mark.parametrize("knowledge", ["all", "neighbours"])
@pytest.mark.parametrize("direction", ["std", "unit", "sign"])
@pytest.mark.parametrize("bound", BOUNDS)
def test_the_bound_holds_at_the_gamma_that_was_found_and_fails_one_percent_farther(
    trained, messages, bound, direction, knowledge
):
    round = trained()
    scene = Scene(round, knowledge)
    message = messages(round, BOUNDS[bound](direction=direction, knowledge=knowledge))[0, 1].numpy()
    mean = average(scene.models)
    limit, distance = envelope(scene, bound)
    assert distance(message) <= limit * (1 + 1e-12)
    assert distance(mean + 1.01 * (message - mean)) > limit
    steps = (mean - message) / direction_of(scene, direction)
    assert steps.min() > 0.01
    assert steps.max() == pytest.approx(steps.min(), rel=1e-9)


def test_the_bound_by_the_smallest_sum_is_tighter_than_that_by_the_largest(trained, messages):
    far = {bound: messages(trained(), BOUNDS[bound]())[0, 1] for bound in BOUNDS}
    mean = torch.from_numpy(average(Scene(trained()).models))
    assert (far["min"] - mean).norm() < 0.95 * (far["max"] - mean).norm()


# Ladder


@pytest.mark.parametrize("ratio", [1.0, 1.4, 2.0])
def test_the_distances_of_a_ladder_grow_by_its_ratio_from_the_median_honest_one(trained, messages, ratio):
    round = trained()
    scene = Scene(round)
    mean, update = average(scene.models), average(scene.updates)
    rungs = [messages(round, Ladder(ratio))[0, attacker].numpy() - mean for attacker in BYZANTINE]
    assert len(scene.models) % 2 == 1  # so that nobody can argue what the median is
    assert norm(rungs[0]) == pytest.approx(float(np.median([norm(model - mean) for model in scene.models])))
    for low, high in pairwise(rungs):
        assert norm(high) / norm(low) == pytest.approx(ratio)
    for rung in rungs:
        assert float(rung @ update) / norm(rung) / norm(update) == pytest.approx(-1)


# Directed deviation by attackers who see their neighbours only


def test_deviation_from_the_trimmed_mean_goes_beyond_the_models_that_are_seen(trained, messages):
    round = trained()
    scene, wide = Scene(round, "neighbours"), Scene(round)
    got = messages(round, DirectedDeviation("trimmed_mean", knowledge="neighbours"))[0].numpy()
    inside_all = 0
    for attacker in BYZANTINE:
        for k in range(scene.dim):
            seen, value = [model[k] for model in scene.models], got[attacker, k]
            ends = (max(seen), 2 * max(seen), max(seen) / 2)
            if sum(seen) / len(seen) > scene.start[attacker][k]:
                ends = (min(seen), 2 * min(seen), min(seen) / 2)
                assert value <= min(seen)
            else:
                assert value >= max(seen)
            assert min(ends) <= value <= max(ends)
            honest = [model[k] for model in wide.models]
            inside_all += min(honest) < value < max(honest)
    assert inside_all > 10  # of those who were not seen some are farther out


def krum(vectors, byzantine):
    """Whom Krum picks, by Blanchard et al. 2017."""
    byzantine, scores = min(byzantine, (len(vectors) - 3) // 2), []
    for i, one in enumerate(vectors):
        others = sorted(squared(one, other) for j, other in enumerate(vectors) if j != i)
        scores.append(sum(others[: len(vectors) - byzantine - 2]))
    return scores.index(min(scores))


@pytest.mark.parametrize("knowledge", ["all", "neighbours"])
def test_deviation_from_krum_is_halved_until_krum_picks_it_among_the_models_that_are_seen(trained, messages, knowledge):
    round = trained()
    scene = Scene(round, knowledge)
    reference, models, f = scene.start[BYZANTINE[0]], scene.models, len(BYZANTINE)
    n = len(models) + f
    direction = np.sign(average(models) - reference)
    nearest = []
    for i, one in enumerate(models):
        others = sorted(squared(one, other) for j, other in enumerate(models) if j != i)
        nearest.append(sum(others[: n - f - 2]))
    far = math.sqrt(min(nearest) / ((n - 2 * f - 1) * scene.dim))
    far += max(norm(model - reference) for model in models) / math.sqrt(scene.dim)
    halvings = 0
    while krum([*models, *[reference - far * direction] * f], f) < len(models):
        far, halvings = far / 2, halvings + 1
    assert 0 < halvings < 10
    check(
        messages(round, DirectedDeviation("krum", knowledge=knowledge)), round, everybody(reference - far * direction)
    )


# Mimic


ROUNDS, WARMUP = 6, 3


def oja(z, mean, done, updates):
    """One step: the new direction, the new mean, and |<z, update>| of everyone."""
    mean = done / (done + 1) * mean + average(updates) / (done + 1)
    step = 0
    for update in updates:
        step = step + math.fsum(z * (update - mean)) * (update - mean)
    z = done / (done + 1) * z + step / (done + 1)
    z = z / norm(z)
    return z, mean, [abs(math.fsum(z * update)) for update in updates]


def first_direction(sign=1):
    z = sign * torch.randn(130, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return {"z": z / z.norm(), "mean": torch.zeros(130, dtype=torch.float64)}


def rounds(trained, **options):
    return [trained(draw=draw, index=draw, **options) for draw in range(ROUNDS)]


@pytest.mark.parametrize("broken", [(), (2,)], ids=["sane", "one broken"])
@pytest.mark.parametrize("knowledge", ["all", "neighbours"])
@pytest.mark.parametrize("sign", [1, -1])  # of the first direction, which decides nothing
def test_mimic_copies_who_stands_out_along_ojas_direction_and_after_the_warm_up_always_the_same(
    trained, messages, sign, knowledge, broken
):
    attack = Mimic(warmup=WARMUP, knowledge=knowledge)
    attack.load_state_dict(first_direction(sign))
    z, mean = (value.numpy() for value in first_direction(sign).values())
    victims, would_be = [], []
    for index, round in enumerate(rounds(trained, broken=broken)):
        scene = Scene(round, knowledge)
        z, mean, along = oja(z, mean, index, scene.updates)
        would_be.append(scene.seen[along.index(max(along))])
        victims.append(would_be[min(index, WARMUP - 1)])
        check(messages(round, attack), round, everybody(scene.own[victims[-1]]), tolerance=0)
        if index < WARMUP:
            np.testing.assert_allclose(attack.state_dict()["z"], z, rtol=0, atol=1e-12)
            np.testing.assert_allclose(attack.state_dict()["mean"], mean, rtol=0, atol=1e-12)
    assert len(set(victims[:WARMUP])) > 1  # the warm-up matters,
    assert would_be[WARMUP:] != victims[WARMUP:]  # and so does its end


def test_mimic_starts_from_a_direction_that_the_runs_seed_draws(trained, messages):
    directions = []
    for seed in (0, 0, 1):
        attack = Mimic()
        messages(trained(seed=seed), attack)
        directions.append(attack.state_dict()["z"])
    assert torch.equal(directions[0], directions[1])
    assert abs(float(directions[0] @ directions[2])) < 0.99
    assert [float(z.norm()) for z in directions] == pytest.approx([1, 1, 1])


def test_mimic_goes_on_from_its_saved_state_as_if_never_interrupted(trained, messages):
    whole, first = Mimic(warmup=WARMUP), Mimic(warmup=WARMUP)
    want = [messages(round, whole) for round in rounds(trained)]
    for round in rounds(trained)[:2]:
        messages(round, first)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    resumed, saved = Mimic(warmup=WARMUP), torch.load(file)
    resumed.load_state_dict(saved)
    kept = saved["z"].clone()
    got = [messages(round, resumed) for round in rounds(trained)[2:]]
    assert all(torch.equal(a, b) for a, b in zip(got, want[2:]))
    for name, value in whole.state_dict().items():
        assert torch.equal(torch.as_tensor(resumed.state_dict()[name]), torch.as_tensor(value))
    assert torch.equal(saved["z"], kept)  # what was loaded stays as it is
    assert not torch.equal(resumed.state_dict()["z"], kept)


def test_mimic_forgets_everything_when_a_run_is_set_up(trained, messages):
    attack = Mimic()
    messages(trained(), attack)
    assert attack.state_dict()["rounds"] == 1
    attack.setup(None, None, "fit")  # a checkpoint is loaded after it
    assert attack.state_dict() == {}


def test_while_the_victim_is_broken_attackers_send_their_own_models(trained, messages):
    attack = Mimic(warmup=1)
    messages(trained(), attack)
    victim = attack.state_dict()["victim"]
    round = trained(draw=1, broken=[victim])
    check(messages(round, attack), round, {b: round._rows[b].numpy() for b in BYZANTINE}, tolerance=0)
    assert round.num_forged == 0
    round = trained(draw=2)
    check(messages(round, attack), round, everybody(round._rows[victim].numpy()), tolerance=0)


def test_mimic_learns_once_per_round_however_often_models_are_exchanged(trained, messages):
    attack, round = Mimic(), trained()
    round.attack = lambda: attack.on_attack(round)
    messages(round, attack)
    learnt, victim = attack.state_dict()["z"].clone(), attack.state_dict()["victim"]
    round.map_(lambda block: block.own + 1)
    round.exchange()
    assert attack.state_dict()["rounds"] == 1
    assert torch.equal(attack.state_dict()["z"], learnt)
    check(messages(round), round, everybody(round._rows[victim].numpy()), tolerance=0)  # as it is now
