"""Rules that must be told how many models may be Byzantine: what they assume, where that cannot be, and who is told."""

import math

import networkx as nx
import pytest
import torch

from callbacks.aggregators import LEARN, SCCLIP, Krum, MultiKrum, WFAgg
from callbacks.attacks import Gaussian
from dfl_lightning import FullyConnected, Ring, Round, Topology, UserError

N, D = 9, 1000
NEEDS = {
    Krum: lambda n, f: n >= 2 * f + 3,
    MultiKrum: lambda n, f: n >= 2 * f + 3,
    LEARN: lambda n, f: n >= 2 * f + 1,
    SCCLIP: lambda n, f: n >= f + 2,
    WFAgg: lambda n, f: n >= f + 3,
}

pytestmark = pytest.mark.usefixtures("one_thread")


def full_round(nodes=N, broken=0):
    """Everybody hears everybody; of the last three nodes, which are Byzantine, some send what cannot be used."""
    rows = torch.randn(nodes, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    last = lambda count: torch.arange(nodes) >= nodes - count  # noqa: E731
    round = Round(rows, ~torch.eye(nodes, dtype=torch.bool), last(3), start=0.9 * rows)
    if broken:
        round.forge(last(broken), lambda block: block.own[nodes - broken :] * math.nan)
    return round


@pytest.mark.parametrize("kind", NEEDS)
def test_the_most_that_a_rule_allows_is_the_largest_number_that_its_condition_allows(kind):
    models = torch.arange(1, 40)
    most = kind().capacity(models)
    for n, largest in zip(models.tolist(), most.tolist()):
        allowed = [f for f in range(n) if NEEDS[kind](n, f)]
        assert largest == max(allowed) if allowed else largest < 0
    assert SCCLIP(tau=1.0).capacity(models).tolist() == (models - 1).tolist()


@pytest.mark.parametrize("kind", NEEDS)
@pytest.mark.parametrize("fraction", [None, 0.0, 0.1, 0.25, 0.3, 0.5])
@pytest.mark.parametrize("broken", range(4))
def test_a_message_that_cannot_be_used_is_one_byzantine_model_less(kind, fraction, broken):
    for nodes in (4, 9, 11):
        round = full_round(nodes, broken)
        f, usable = kind(byzantine_fraction=fraction).declared(round, round.candidates)
        for i in range(nodes):
            lost = sum(j != i for j in range(nodes - broken, nodes))
            expected = math.ceil((3 / nodes if fraction is None else fraction) * (nodes - 1) - 1e-9)
            want, n = max(0, expected - lost), nodes - lost
            allowed = [g for g in range(want + 1) if NEEDS[kind](n, g)]
            assert f[i] == max(allowed, default=0)
            assert usable[i] == bool(allowed)


@pytest.mark.parametrize("kind", NEEDS)
def test_without_a_declared_share_the_true_one_is_assumed(kind):
    results = {}
    for fraction in (None, 3 / 9, 1 / 9, 0.0):
        round = full_round()
        kind(byzantine_fraction=fraction, on_invalid="clamp").on_aggregate(round)
        results[fraction] = round._rows
    assert torch.equal(results[None], results[3 / 9])
    assert not torch.equal(results[None], results[0.0])
    if kind is not Krum:
        assert not torch.equal(results[None], results[1 / 9])


@pytest.mark.parametrize("kind", NEEDS)
def test_where_a_rule_is_not_allowed_a_node_clamps_or_keeps_its_model_and_is_counted(arena, kind):
    rows, neighbours = arena.world(1, chance=0.9)
    degrees, honest = neighbours.sum(1), torch.tensor([i not in arena.BYZANTINE for i in range(N)])
    declared = (0.33 * degrees).ceil()
    invalid = torch.tensor([d > 0 and not NEEDS[kind](d + 1, f) for d, f in zip(degrees.tolist(), declared.tolist())])
    assert (invalid & honest).any()
    assert (~invalid & honest & (degrees > 0)).any()
    ends = {}
    for way in ("error", "clamp", "own"):
        round = arena.a_round(rows, neighbours, index=0)
        kind(byzantine_fraction=0.33, on_invalid=way).on_aggregate(round)
        ends[way] = round
        assert round.metrics["screening/invalid"] == pytest.approx(float(invalid[honest].double().mean()))
    assert torch.equal(ends["error"]._rows, ends["clamp"]._rows)  # in a run, nobody raises
    assert torch.equal(ends["own"]._rows[invalid], rows[invalid])
    assert torch.equal(ends["own"]._rows[~invalid], ends["clamp"]._rows[~invalid])
    assert not ends["own"].accepted[invalid].any()
    if kind in (MultiKrum, LEARN, SCCLIP):  # others may choose the own model, or need more even for no attacker
        assert not torch.equal(ends["clamp"]._rows[invalid], rows[invalid])


@pytest.mark.parametrize("kind", [Krum, MultiKrum, WFAgg])
def test_who_has_too_few_models_even_for_no_attacker_keeps_its_own(arena, kind):
    rows = torch.randn(2, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for way in ("error", "clamp", "own"):
        new, accepted = kind(byzantine_fraction=0.0, on_invalid=way)(rows)
        assert torch.equal(new, rows)
        assert not accepted.any()


# Before training


def first(*nodes, count):
    return torch.isin(torch.arange(count), torch.tensor(nodes))


REFUSED = [
    (Krum(), Ring(5), [0], "n >= 2 f + 3", "n = 3 models", "f = 1"),
    (MultiKrum(byzantine_fraction=0.5), FullyConnected(6), [], "n >= 2 f + 3", "n = 6 models", "f = 3"),
    (LEARN(byzantine_fraction=0.9), Ring(5), [], "n >= 2 f + 1", "n = 3 models", "f = 2"),
    (SCCLIP(byzantine_fraction=0.9), Ring(5), [], "n >= f + 2", "n = 3 models", "f = 2"),
    (WFAgg(), Ring(5), [0], "n >= f + 3", "n = 3 models", "f = 1"),
]


@pytest.mark.parametrize(("rule", "topology", "byzantine", "needs", "models", "declared"), REFUSED, ids=range(5))
def test_a_network_that_a_rule_does_not_fit_is_refused_in_one_sentence(
    rule, topology, byzantine, needs, models, declared
):
    marks = first(*byzantine, count=topology.num_nodes)
    with pytest.raises(UserError, match="round 1") as error:
        rule.check(topology, marks, seed=0, rounds=3)
    message = str(error.value)
    for part in (type(rule).__name__, needs, "node 0", models, declared, "aggregator.on_invalid"):
        assert part in message
    assert ". " not in message
    assert message.endswith(".")
    for way in ("clamp", "own"):
        type(rule)(byzantine_fraction=rule.byzantine_fraction, on_invalid=way).check(topology, marks, 0, 3)


@pytest.mark.parametrize("kind", NEEDS)
def test_a_network_that_fits_is_not_refused(kind):
    kind().check(FullyConnected(9), first(0, 1, count=9), seed=0, rounds=3)
    kind().check(Ring(5), first(count=5), seed=0, rounds=3)
    SCCLIP(tau=1.0, byzantine_fraction=0.9).check(Ring(5), first(count=5), seed=0, rounds=3)


class Shrinking(Topology):
    """Complete in the first two rounds; then node 3 hears nobody, and later node 2 hears one node only."""

    redraw_every = 2

    def graph(self, seed):
        return nx.complete_graph(self.num_nodes)

    def graph_at(self, seed, index):
        graph = self.graph(seed)
        if index >= 2:
            graph.remove_edges_from([(3, node) for node in range(self.num_nodes) if node != 3])
        if index >= 4:
            graph.remove_edges_from([(2, node) for node in range(self.num_nodes) if node not in (1, 2)])
        return graph


def test_a_graph_that_changes_is_looked_at_in_every_round_and_a_node_without_neighbours_is_not_counted():
    rule, marks = Krum(), first(0, count=9)
    rule.check(Shrinking(9), marks, seed=0, rounds=4)
    with pytest.raises(UserError, match=r"round 5 node 2 .*n = 2 models"):
        rule.check(Shrinking(9), marks, seed=0, rounds=5)


def test_a_run_with_a_rule_that_does_not_fit_ends_before_data_are_read(fit, blobs, monkeypatch):
    def load(*args):
        raise AssertionError("data were read")

    monkeypatch.setattr(blobs, "load", load)
    for rule, error, message in ((Krum(), UserError, "Krum needs"), (Krum(on_invalid="own"), AssertionError, "read")):
        with pytest.raises(error, match=message):
            fit(rule, Gaussian(nodes=[0]))


def test_every_declared_rule_trains_where_it_does_not_fit_and_says_so(fit):
    for kind in (Krum, WFAgg):
        module = fit(kind(on_invalid="own"), Gaussian(nodes=[0]))
        assert [row["screening/invalid"] for row in module.history] == [1.0, 1.0]
        assert [row["screening/accepted_honest"] for row in module.history] == [0.0, 0.0]
