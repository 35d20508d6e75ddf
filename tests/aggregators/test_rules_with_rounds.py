"""Rules whose rounds are not alike: LEARN exchanges several times in one, WFAgg remembers; against plain loops."""

import io
import itertools
import math

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from numpy.linalg import norm

from callbacks.aggregators import LEARN, WFAgg
from dfl_lightning import Attack, UserError
from dfl_lightning.functional.sketch import CountSketch

N, D, K = 9, 1000, 64

pytestmark = pytest.mark.usefixtures("one_thread")


# LEARN


def plain_robust_means(rule, own, messages, f):
    """What a node may become: one vector, or one for each set of n - f models with the smallest diameter."""
    models = [own, *messages]
    if rule == "rbtm":
        new = np.empty(D)
        for k in range(D):
            values = sorted(model[k] for model in models)[f : len(models) - f]
            new[k] = sum(values) / len(values)
        return [new]
    sets = {}
    for chosen in itertools.combinations(range(len(models)), len(models) - f):
        sets[chosen] = max(norm(models[a] - models[b]) for a in chosen for b in chosen)
    smallest = min(sets.values()) * (1 + 1e-9)
    return [sum(models[a] for a in chosen) / len(chosen) for chosen in sets if sets[chosen] <= smallest]


def plain_learn(arena, options, exchange):
    """What each node may become in one exchange, whom it can use, and whether its n and f are not allowed."""
    for i in range(N):
        friends = np.flatnonzero(exchange.neighbours[i]).tolist()
        messages = {j: exchange.vectors[exchange.sent[i, j]] for j in friends}
        messages = {j: message for j, message in messages.items() if arena.usable(message)}
        missing, own = len(friends) - len(messages), exchange.vectors[i]
        f = max(0, math.ceil(options.get("byzantine_fraction", 3 / 9) * len(friends) - 1e-9) - missing)
        allowed = len(messages) // 2  # n >= 2 f + 1
        if f > allowed and options.get("on_invalid") == "own":
            yield [own], [], True
        else:
            yield (
                plain_robust_means(options["rule"], own, messages.values(), min(f, allowed)),
                list(messages),
                f > allowed,
            )


class Recorded(Attack):
    """Keeps what was sent in every exchange."""

    def __init__(self, attack, arena):
        super().__init__(nodes=arena.BYZANTINE)
        self.inner, self.all_rows, self.exchanges = attack, arena.all_rows, []

    def attack(self, round):
        if self.inner is not None:
            self.inner.on_attack(round)
        vectors, sent = self.all_rows(round), round.sent.numpy().copy()
        self.exchanges.append(type("Exchange", (), {"vectors": vectors, "sent": sent, "neighbours": round.neighbours}))


LEARNERS = {
    "rbtm": {"rule": "rbtm"},
    "rbtm own": {"rule": "rbtm", "byzantine_fraction": 0.6, "on_invalid": "own"},
    "mda": {"rule": "mda", "byzantine_fraction": 0.2},
    "mda own": {"rule": "mda", "byzantine_fraction": 0.6, "on_invalid": "own"},
}


@pytest.mark.parametrize("index", [1, 3])
@pytest.mark.parametrize("name", LEARNERS)
def test_learn_equals_a_plain_loop_in_every_exchange(arena, monkeypatch, name, index, attack):
    monkeypatch.setattr("dfl_lightning.round.WIDTH", 64 if index == 1 else 16_384)
    recorded = Recorded(attack, arena)
    round = arena.a_round(*arena.world(index, chance=0.8), recorded, index=index)
    LEARN(**LEARNERS[name]).on_aggregate(round)
    exchanges = recorded.exchanges
    assert len(exchanges) == {1: 2, 3: 3}[index]
    assert torch.equal(round.received["models"], D * len(exchanges) * round.neighbours.sum(1))
    became = [exchange.vectors[:N] for exchange in exchanges[1:]] + [round._rows.numpy()]
    for exchange, after in zip(exchanges, became):
        nodes = list(plain_learn(arena, LEARNERS[name], exchange))
        for new, (options, _, _) in zip(after, nodes):
            assert any(np.allclose(new, option, rtol=1e-9, atol=1e-9) for option in options)
    assert round.metrics["screening/invalid"] == np.mean([nodes[i][2] for i in range(N) if i not in arena.BYZANTINE])
    for i, (_, usable, _) in enumerate(nodes):
        taken = round.accepted[i].nonzero()[:, 0].tolist()
        assert set(taken) <= set(usable) if "mda" in name else taken == usable


@pytest.mark.parametrize("index", range(10))
def test_the_number_of_exchanges_grows_as_the_logarithm_of_the_round(arena, index):
    rows, neighbours = arena.world()
    round = arena.a_round(rows, neighbours, index=index)
    LEARN().on_aggregate(round)
    assert round.exchanges + 1 == max(1, math.ceil(math.log2(index + 2))) == [1, 2, 2, 3, 3, 3, 3, 4, 4, 4][index]
    assert torch.equal(round.received["models"], D * (round.exchanges + 1) * neighbours.sum(1))


def test_attackers_forge_anew_in_every_exchange_from_what_models_have_become(arena):
    for attack in ("gaussian", "scaled"):
        recorded = Recorded(arena.ATTACKS[attack], arena)
        round = arena.a_round(*arena.world(1, chance=0.8), recorded, index=3)
        LEARN().on_aggregate(round)
        sent = [exchange.vectors[N:] for exchange in recorded.exchanges]
        own = [exchange.vectors[arena.BYZANTINE] for exchange in recorded.exchanges]
        for a, b in itertools.combinations(range(3), 2):
            assert (own[a] != own[b]).any()
            if attack == "scaled":
                assert not np.allclose(sent[a], sent[b])
            else:  # new noise, not only a new model under it
                assert abs(np.corrcoef((sent[a] - own[a]).ravel(), (sent[b] - own[b]).ravel())[0, 1]) < 0.1
        if attack == "scaled":
            assert all(np.allclose(forged, -5 * model) for forged, model in zip(sent, own))


def test_the_models_with_the_smallest_diameter_leave_out_who_is_far(arena):
    rows = torch.randn(7, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows[5:] += 50
    new, accepted = LEARN(rule="mda", byzantine_fraction=2 / 6)(rows)
    assert accepted[:5].sum(1).tolist() == [4] * 5
    assert not accepted[:5, 5:].any()
    torch.testing.assert_close(new[0], rows[:5].mean(0))


# WFAgg


class PlainWFAgg:
    def __init__(self, sketch, slots, alpha=0.5, window=3, width=2.0, byzantine_fraction=None, on_invalid="error"):
        self.alpha, self.window, self.width = alpha, window, width
        self.options = byzantine_fraction, lambda n, f: n >= f + 3, on_invalid
        self.sketch, self.slots, self.memory, self.cases = sketch, slots, {}, set()

    def remembered(self, see, j):
        if see is not see.whole or self.slots is None:
            return see.shown[j]
        return self.sketch(see.shown[j], self.slots)

    def steady(self, see, j):
        new = self.remembered(see, j)
        if (see.i, j) not in self.memory:
            self.memory[see.i, j] = [new, []]
            return True
        last, changes = self.memory[see.i, j]
        change = np.array([norm(new - last) ** 2, new @ last / (norm(new) * norm(last))])
        mean, variance = np.zeros(2), np.zeros(2)
        for t, old in enumerate(changes):  # moving averages from the first change on
            rate = 2 / (self.window + 1) if t else 1
            mean, variance = mean + rate * (old - mean), (1 - rate) * (variance + rate * (old - mean) ** 2)
        inside = (np.abs(change - mean) <= self.width * np.sqrt(variance)).all()
        warm = len(changes) >= self.window
        self.cases.add(("steady" if inside else "unsteady") if warm else "too early")
        self.memory[see.i, j] = [new, [*changes, change]]
        return bool(inside) or not warm

    def choose(self, see):
        f, usable = see.declared(*self.options)
        see.votes = {}
        if not usable:
            return []
        stacked = np.sort(np.stack(list(see.shown.values())), 0)
        middle = (stacked[(len(stacked) - 1) // 2] + stacked[len(stacked) // 2]) / 2
        far = {j: norm(vector - middle) ** 2 for j, vector in see.shown.items()}
        angle = {j: 1 - vector @ middle / (norm(vector) * norm(middle)) for j, vector in see.shown.items()}
        keep = len(see.shown) - f - 1
        near, aligned = see.ranked(far)[:keep], see.ranked(angle)[:keep]
        for j in see.shown:
            passed = [j in near, j in aligned, self.steady(see, j)]
            if sum(passed) >= 2:
                see.votes[j] = sum(weight for weight, ok in zip((0.4, 0.4, 0.2), passed) if ok)
                self.cases.add(tuple(passed))
        return list(see.votes)

    def mix(self, see, accepted, own):
        if not accepted:
            return see.own
        total = sum(see.votes[j] for j in accepted)
        mean = sum(see.votes[j] / total * see.messages[j] for j in accepted)
        return self.alpha * see.own + (1 - self.alpha) * mean


class Restless(Attack):
    """A near model in most rounds, another one in some, and in one of them nothing that can be used."""

    def __init__(self, arena, lies=False):
        super().__init__(nodes=arena.BYZANTINE)
        self.arena, self.lies = arena, lies

    def attack(self, round):
        factor = [0.95, 0.95, 0.95, 0.95, 0.95, 1.3, math.nan, 0.95, -2.0, 0.95][round.index % 10]
        self.arena.Forger(lambda own, index: factor * own, lies=self.lies and round.index % 2 == 1).attack(round)


def rounds(arena, attack=None, count=10, seed=1, dtype=torch.float64, first=0, silent=None):
    """Rounds in a row: what a rule makes of the models is trained on; node 3 is silent in rounds 4 and 5."""
    rows, neighbours = arena.world(seed, chance=0.95)
    rows = rows.to(dtype)
    for index in range(first, count):
        heard = torch.ones(N, dtype=torch.bool)
        heard[3 if silent is None else silent] = index not in (4, 5)
        draw = torch.Generator().manual_seed(index)
        step = 0.5 * torch.randn(rows.shape, generator=draw, dtype=torch.float64) * torch.rand(1, generator=draw)
        round = arena.a_round(
            rows + step.to(rows), neighbours & heard & heard[:, None], attack, index=index, total=count
        )
        yield round
        rows = round._rows


REMEMBERING = {
    "sketched history": {"history_size": K},
    "exact history": {"history": "exact", "width": 1.5, "alpha": 0.3},
    "short window": {"history_size": K, "window": 2, "byzantine_fraction": 0.2},
    "own": {"history_size": K, "byzantine_fraction": 0.4, "on_invalid": "own"},
    "sketches": {"sketch_size": K},
    "sketches, batched": {"sketch_size": K, "verification": "batched", "byzantine_fraction": 0.2},
    "sketches, distance check": {"sketch_size": K, "distance_check": True},
}


@pytest.mark.parametrize("name", REMEMBERING)
@pytest.mark.parametrize("attack", ["nobody", "restless", "restless liar", "two-faced", "1e+30 in_one_place"])
def test_wfagg_equals_a_plain_loop_over_many_rounds(arena, agreed, name, attack):
    options = REMEMBERING[name]
    rule = WFAgg(**options)
    slots = CountSketch(D, K).slots.numpy() if options.get("history") != "exact" else None
    known = ("alpha", "window", "width", "byzantine_fraction", "on_invalid")
    plain = PlainWFAgg(arena.sketch, slots, **{key: options[key] for key in known if key in options})
    forger = {"restless": Restless(arena), "restless liar": Restless(arena, lies=True)}
    for round in rounds(arena, forger[attack] if attack in forger else arena.ATTACKS[attack]):
        agreed(rule, plain, round, tolerance=1e-7)
    assert {"too early", "steady", "unsteady", (True, True, True)} <= plain.cases
    assert plain.cases & {(True, True, False), (True, False, True), (False, True, True)}


@pytest.mark.parametrize("name", ["sketched history", "exact history", "sketches"])
def test_wfagg_goes_on_from_its_saved_state_to_the_bit(arena, name):
    through, restored = WFAgg(**REMEMBERING[name]), WFAgg(**REMEMBERING[name])
    decided = []
    for round in rounds(arena, Restless(arena)):
        if round.index == 6:
            file = io.BytesIO()
            torch.save(through.state_dict(), file)
            file.seek(0)
            restored.load_state_dict(torch.load(file, weights_only=True))
        if round.index >= 6:
            forgetful = WFAgg(**REMEMBERING[name])
            copies = [
                arena.a_round(round._rows, round.neighbours, Restless(arena), index=round.index) for _ in range(2)
            ]
            for rule, copy in zip((restored, forgetful), copies):
                rule.on_aggregate(copy)
        through.on_aggregate(round)
        if round.index >= 6:
            assert torch.equal(copies[0]._rows, round._rows)
            assert torch.equal(copies[0].accepted, round.accepted)
            decided.append(torch.equal(copies[1]._rows, round._rows))
    assert not all(decided)  # the history matters


def test_a_saved_state_does_not_change_when_the_run_goes_on(arena):
    rule, saved = WFAgg(history_size=K), {}
    for round in rounds(arena):
        rule.on_aggregate(round)
        if round.index == 3:
            saved = rule.state_dict()
            copies = {name: value.clone() for name, value in saved.items()}
    assert saved
    assert all(torch.equal(saved[name], copies[name]) for name in copies)


@pytest.mark.parametrize("name", ["sketched history", "exact history", "sketches"])
def test_what_wfagg_remembers_does_not_grow_with_the_rounds(arena, name):
    rule, sizes = WFAgg(**REMEMBERING[name]), []
    for round in rounds(arena, arena.ATTACKS["two-faced"], count=16):
        rule.on_aggregate(round)
        sizes.append(sum(value.numel() for value in rule.state_dict().values()))
    assert len(set(sizes)) > 1  # who is silent is remembered beside who is not
    assert sizes[-1] == sizes[0]


def test_who_was_silent_is_compared_with_what_was_heard_of_it_last(arena):
    rows, neighbours = arena.world(1, chance=0.95)
    friends, known = neighbours[:, 3], []
    for silent in (True, False):  # in round 4, or there is no such round
        rule = WFAgg(history_size=K)
        for index in range(7):
            heard = torch.ones(N, dtype=torch.bool)
            heard[3] = index != 4
            if silent or index != 4:
                moved = rows + 0.1 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(index)).double()
                round = arena.a_round(moved, neighbours & heard & heard[:, None], index=index, total=9)
                rule.on_aggregate(round)
                assert round.accepted[:, 3].any() == bool(heard[3])
            known.append({name: rule.state_dict()[name][:, 3].clone() for name in ("usual", "heard")})
    assert torch.equal(known[3]["usual"], known[4]["usual"])
    assert known[6]["heard"][friends].tolist() == [5] * int(friends.sum()) != []
    for there, here in zip(known[:7], known[7:]):
        assert torch.equal(there["heard"], here["heard"])
        torch.testing.assert_close(there["usual"], here["usual"])


def test_another_run_starts_without_a_history_and_a_resumed_one_goes_on_with_it(fit, tmp_path):
    def remembered(rule, *callbacks, **options):
        fit(rule, *callbacks, max_epochs=6, **options)
        return rule.state_dict()

    rule, every = WFAgg(window=2), {"save_top_k": -1, "every_n_epochs": 1, "save_on_train_epoch_end": True}
    keep = ModelCheckpoint(tmp_path, "{epoch}", **every)
    whole = {name: value.clone() for name, value in remembered(rule, keep, enable_checkpointing=True).items()}
    again, resumed = remembered(rule), remembered(WFAgg(window=2), ckpt_path=tmp_path / "epoch=2.ckpt")
    assert whole["heard"].max() == 5
    for name in whole:
        assert torch.equal(whole[name], again[name])
        assert torch.equal(whole[name], resumed[name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window is 0"),
        ({"width": 0.0}, "width 0.0"),
        ({"history_size": 0}, "history_size 0"),
        ({"alpha": 1.1}, "aggregator.alpha is 1.1"),
        ({"history": "none"}, "aggregator.history is 'none'"),
        ({"sketch_size": K, "history": "exact"}, "aggregator.history=exact"),
        ({"sketch_size": K, "commit_reveal": True}, "commit_reveal changes every round"),
    ],
)
def test_an_option_that_does_not_fit_is_named_in_the_error(options, message):
    with pytest.raises(UserError, match=message):
        WFAgg(**options)
