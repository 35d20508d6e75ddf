"""The round and its verbs: what is read, what is written, what is counted."""

import math
import weakref

import pytest
import torch

from callbacks.aggregators import BALANCE, DFedAvg, SketchGuard
from callbacks.attacks import Gaussian, ScaledModel
from dfl_lightning import Round
from dfl_lightning.functional.weights import uniform
from dfl_lightning.metrics import over_honest
from dfl_lightning.traffic import screening, traffic

N, D = 6, 300
RULES = [DFedAvg(), DFedAvg("metropolis"), BALANCE(gamma=0.9), SketchGuard(sketch_size=64, gamma=0.9)]
BAD = [math.nan, math.inf, -math.inf, 1e30]


pytestmark = pytest.mark.usefixtures("one_thread")


def named(rule):
    return type(rule).__name__ + getattr(rule, "mixing", "")


def models(columns=D, nodes=N, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(columns, generator=draw, dtype=torch.float64)
    return (rows + 0.5 * torch.randn(nodes, columns, generator=draw, dtype=torch.float64)).to(dtype)


def everybody(nodes=N):
    return ~torch.eye(nodes, dtype=torch.bool)


def a_round(rows=None, byzantine=(), neighbours=None, **options):
    rows = models() if rows is None else rows
    marks = torch.zeros(len(rows), dtype=torch.bool)
    marks[list(byzantine)] = True
    return Round(rows, everybody(len(rows)) if neighbours is None else neighbours, marks, **options)


def visited(round, look):
    """What ``look(block)`` shows in each block."""
    seen = []
    round.reduce(lambda block: seen.append(look(block)) or block.own.new_zeros(1))
    return seen


# The verbs


@pytest.mark.parametrize("width", [1, 64, 299, 300, 16_384])
def test_the_blocks_cover_every_column_once_and_in_order(monkeypatch, width):
    monkeypatch.setattr("dfl_lightning.round.WIDTH", width)
    round = a_round(num_parameters=290, start=models() + 1)
    columns = visited(round, lambda block: torch.arange(D)[block.columns])
    assert torch.equal(torch.cat(columns), torch.arange(290))
    assert torch.equal(torch.cat(visited(round, lambda block: block.own.clone()), 1), models()[:, :290])
    assert torch.equal(torch.cat(visited(round, lambda block: block.start), 1), models()[:, :290] + 1)
    assert visited(round, lambda block: block.index) == list(range(math.ceil(290 / width)))


@pytest.mark.parametrize("rule", RULES, ids=named)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_do_not_depend_on_the_width_of_the_blocks_beyond_rounding(monkeypatch, rule, dtype):
    results = []
    for width in (7, 64, 16_384):
        monkeypatch.setattr("dfl_lightning.round.WIDTH", width)
        round = a_round(models(dtype=dtype), byzantine=[1])
        ScaledModel().attack(round)
        rule.on_aggregate(round)
        results.append((round.accepted, round._rows))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for accepted, rows in results[1:]:
        assert torch.equal(accepted, results[0][0])
        torch.testing.assert_close(rows, results[0][1], rtol=tolerance, atol=tolerance)


def test_reduce_sums_blocks_in_float64(monkeypatch):
    monkeypatch.setattr("dfl_lightning.round.WIDTH", 1)
    values = torch.ones(1, 1001)
    values[0, 0] = 2.0**24  # in float32 every further 1 would be lost
    total = a_round(values).reduce(lambda block: block.own.sum(1))
    assert total.dtype == torch.float64
    assert total.item() == 2.0**24 + 1000


def test_map_writes_every_node_but_those_whose_own_row_broke():
    rows = models()
    rows[2, 5], rows[4, 299] = math.nan, 1e30
    before = rows.clone()
    a_round(rows, byzantine=[4]).map_(lambda block: 2 * block.own)
    torch.testing.assert_close(rows[[2, 4]], before[[2, 4]], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(rows[[0, 1, 3, 5]], 2 * before[[0, 1, 3, 5]])


def test_a_block_gives_the_same_numbers_on_every_visit_and_others_elsewhere(monkeypatch):
    monkeypatch.setattr("dfl_lightning.round.WIDTH", 100)

    def drawn(name="a", **options):
        return visited(a_round(**options), lambda block: torch.rand(4, generator=block.generator(name)).tolist())

    round = a_round()
    look = lambda block: torch.rand(4, generator=block.generator("a")).tolist()  # noqa: E731
    first = visited(round, look)
    assert visited(round, look) == first == drawn()
    everything = first + drawn("b") + drawn(index=1) + drawn(seed=1)
    assert len({tuple(numbers) for numbers in everything}) == 12


@pytest.mark.parametrize("value", BAD)
def test_finite_names_exactly_the_broken_rows_own_and_forged(monkeypatch, value):
    monkeypatch.setattr("dfl_lightning.round.WIDTH", 64)
    rows = models(dtype=torch.float32)
    rows[3, 123] = value
    round = a_round(rows, byzantine=[0, 1])
    assert round.finite.tolist() == [True, True, True, False, True, True]
    round.forge(round.byzantine, lambda block: block.own[:2].clone().index_fill_(0, torch.tensor([1]), value))
    assert round.finite.tolist() == [True, True, True, False, True, True, True, False]


@pytest.mark.parametrize("value", BAD)
def test_distances_are_infinite_exactly_where_a_row_broke(value):
    rows = models(dtype=torch.float32)
    rows[3, 7] = value
    squared, norms = a_round(rows).distances()
    broken = torch.arange(N) == 3
    off = everybody() & (broken | broken[:, None])
    assert squared[off].isinf().all()
    assert squared[~off & (~broken | ~broken[:, None])].isfinite().all()
    assert norms.isinf().tolist() == broken.tolist()


def test_a_closed_round_is_freed_without_the_garbage_collector():
    round = a_round(byzantine=[1], start=models())
    ScaledModel().attack(round)
    BALANCE().on_aggregate(round)
    gone = weakref.ref(round)
    round.close()
    del round
    assert gone() is None


# Routes and mixing


def test_every_receiver_can_be_sent_another_row_and_one_row_can_come_from_several_senders():
    rows = models()
    route = torch.full((N, N), -1)
    route[0, 1], route[2, 1], route[2, 3], route[4, 3] = 0, 1, 1, 2
    route[1, 1] = 2  # nobody forges what it sends itself
    round = a_round(rows.clone(), byzantine=[1, 3])
    round.forge(route, lambda block: torch.stack([block.own[1] * k for k in (2, 3, 4)]))
    messages = {(0, 1): 2 * rows[1], (2, 1): 3 * rows[1], (2, 3): 3 * rows[1], (4, 3): 4 * rows[1]}
    weights = torch.rand(N, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    round.mix_(weights)
    for i in range(N):
        want = sum(weights[i, j] * messages.get((i, j), rows[j]) for j in range(N))
        torch.testing.assert_close(round._rows[i], want, rtol=1e-12, atol=1e-12)


def test_a_distance_to_a_message_is_the_one_to_what_this_receiver_is_sent():
    rows = models()
    route = torch.full((N, N), -1)
    route[0, 1], route[2, 1] = 0, 1
    round = a_round(rows, byzantine=[1])
    round.forge(route, lambda block: torch.stack([-block.own[1], 3 * block.own[1]]))
    distances = round.to_messages(round.distances()[0])
    for i, sent in ((0, -rows[1]), (2, 3 * rows[1]), (4, rows[1])):
        assert distances[i, 1].item() == pytest.approx(float((rows[i] - sent).norm()), rel=1e-12)


@pytest.mark.parametrize("value", BAD)
def test_a_zero_weight_never_reads_a_broken_message(value):
    round = a_round(byzantine=[1])
    round.forge(round.byzantine, lambda block: torch.full_like(block.own[:1], value))
    weights = uniform(round.neighbours)
    weights[:4, 1] = 0
    round.mix_(weights)
    assert round._rows[:4].isfinite().all()
    assert round._rows[4:].isnan().all()


@pytest.mark.parametrize("rule", RULES, ids=named)
def test_a_byzantine_node_whose_own_model_broke_takes_nothing_and_still_sends_what_it_forges(rule):
    rows = models()
    rows[1, 9] = math.nan
    round = a_round(rows, byzantine=[1])
    round.forge(round.byzantine, lambda block: 1.01 * block.own[2:3])
    rule.on_aggregate(round)
    assert round.accepted[2, 1]
    assert not round.accepted[1].any()
    assert all(moved[1] == 0 for moved in round.received.values())
    assert rows[[0, 2, 3, 4, 5]].isfinite().all()
    assert rows[1].isnan().sum() == 1


# Buffers


def with_buffers(fill=1.0):
    """290 parameters, then 10 buffers of which the last five are variances; those of node 3 begin with ``fill``."""
    rows = models()
    rows[:, 290:] = rows[:, 290:].abs()
    rows[3, 295] = fill
    return rows, {"num_parameters": 290, "variances": torch.arange(10) >= 5}


@pytest.mark.parametrize("rule", RULES, ids=named)
def test_buffers_follow_the_weights_and_are_neither_compared_nor_forged(rule):
    rows, options = with_buffers()
    rows[:, 290:] *= torch.arange(1.0, N + 1)[:, None] ** 8  # a rule that compared them would accept nobody
    round = a_round(rows.clone(), byzantine=[1], **options)
    ScaledModel(0.9).attack(round)
    rule.on_aggregate(round)
    plain = a_round(rows[:, :290].clone(), byzantine=[1])
    ScaledModel(0.9).attack(plain)
    rule.on_aggregate(plain)
    assert torch.equal(round.accepted, plain.accepted)
    assert round.accepted.any()
    torch.testing.assert_close(round._rows[:, :290], plain._rows, rtol=1e-12, atol=1e-12)
    weights = torch.linalg.lstsq(rows[:, :290].T.index_select(1, torch.arange(N)), round._rows[:, :290].T).solution.T
    weights[:, 1] *= 1 / 0.9  # the parameters of node 1 came scaled, its buffers did not
    weights[1, 1] *= 0.9  # to itself it is honest
    torch.testing.assert_close(round._rows[:, 290:], weights @ rows[:, 290:], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("fill", [-1e-9, math.nan, math.inf])
@pytest.mark.parametrize("rule", RULES[2:], ids=named)
def test_a_model_with_a_negative_variance_or_a_broken_buffer_is_no_candidate(rule, fill):
    for byzantine in ([], [3]):
        rows, options = with_buffers(fill)
        round = a_round(rows, byzantine, **options)
        rule.on_aggregate(round)
        assert not round.accepted[:, 3].any()
        assert round.accepted[0].any()
        assert round._rows[[0, 1, 2, 4, 5]].isfinite().all()
        assert (round._rows[[0, 1, 2, 4, 5], 295:] >= 0).all()


def test_a_negative_buffer_that_is_no_variance_is_fine():
    rows, options = with_buffers()
    rows[3, 290] = -1.0
    assert a_round(rows, **options).candidates[:, 3].sum() == N - 1


def test_buffers_are_looked_at_anew_after_they_were_mixed():
    rows, options = with_buffers()
    round = a_round(rows, **options)
    assert round.sane.all()
    round.mix_(-torch.eye(N))
    assert not round.sane.any()


def test_broken_buffers_do_not_spread_through_zero_weights_but_poison_who_gives_them_weight():
    rows, options = with_buffers(math.nan)
    round = a_round(rows, byzantine=[3], **options)
    weights = uniform(round.neighbours)
    weights[:2, 3] = 0
    round.mix_(weights)
    assert round._rows[:2].isfinite().all()
    assert round._rows[[2, 4, 5]].isnan().all()
    assert round._rows[3, :290].isfinite().all()  # it keeps what it has
    assert round.sane.tolist() == [True, True, False, False, False, False]


@pytest.mark.parametrize("fill", [-1.0, math.nan])
@pytest.mark.parametrize("rule", RULES, ids=named)
def test_an_honest_node_with_a_broken_buffer_takes_and_gives_nothing_and_keeps_its_row(rule, fill):
    rows, options = with_buffers(fill)
    before, round = rows.clone(), a_round(rows, **options)
    rule.on_aggregate(round)
    torch.testing.assert_close(rows[3], before[3], rtol=0, atol=0, equal_nan=True)
    assert not round.accepted[3].any()
    assert not round.accepted[:, 3].any()
    assert all(moved[3] == 0 for moved in round.received.values())
    assert rows[[0, 1, 2, 4, 5]].isfinite().all()


# Traffic


def star_and_lonely():
    """Node 0 hears 1 to 4, node 5 hears nobody."""
    neighbours = torch.zeros(N, N, dtype=torch.bool)
    neighbours[0, 1:5] = neighbours[1:5, 0] = True
    return neighbours


def test_a_node_receives_every_neighbours_model_or_their_sketches_and_the_accepted_models():
    for byzantine in ([], [1, 2]):
        honest = [node for node in range(N) if node not in byzantine]
        degree = star_and_lonely().sum(1)[honest].sum().item()
        for rule in RULES:
            round = a_round(byzantine=byzantine, neighbours=star_and_lonely())
            ScaledModel(50.0).on_attack(round)
            rule.on_aggregate(round)
            moved, full = D * degree, D * degree
            if isinstance(rule, SketchGuard):
                moved = 64 * degree + D * int(round.accepted[honest].sum())
            figures = traffic(round, itemsize=4)
            assert figures["traffic/parameters"] == moved / len(honest)
            assert figures["traffic/bytes"] == 4 * moved / len(honest)
            assert figures["traffic/reduction"] == 1 - moved / full


def test_what_byzantine_nodes_receive_is_in_no_figure():
    figures = []
    for byzantine_hear in (False, True):
        neighbours = star_and_lonely()
        neighbours[1:3, 3:5] = byzantine_hear
        round = a_round(byzantine=[1, 2], neighbours=neighbours)
        Gaussian().attack(round)
        DFedAvg().on_aggregate(round)
        assert round.received["models"][1] == D * (3 if byzantine_hear else 1)
        figures.append((traffic(round, 4), screening(round)))
    assert figures[0] == figures[1]


def test_nothing_is_saved_where_nobody_has_a_neighbour():
    round = a_round(neighbours=torch.zeros(N, N, dtype=torch.bool))
    SketchGuard(sketch_size=8).on_aggregate(round)
    assert traffic(round, 4) == {"traffic/parameters": 0, "traffic/bytes": 0, "traffic/reduction": 0}
    assert screening(round) == {}


def test_counts_of_one_kind_add_up():
    round = a_round()
    for _ in range(2):
        round.count("models", round.links, 10)
    assert round.received["models"].tolist() == [2 * 10 * (N - 1)] * N


def test_screening_rates_tell_honest_from_byzantine_senders():
    round = a_round(byzantine=[1, 2], neighbours=star_and_lonely())
    assert screening(round) == {}
    round.accepted = torch.zeros(N, N, dtype=torch.bool)
    round.accepted[0, [1, 3, 4]] = True
    round.accepted[1:3, 0] = True  # what Byzantine nodes accept says nothing
    round.accepted[5, 0] = True  # no link
    assert screening(round) == {"screening/accepted_honest": 2 / 4, "screening/accepted_byzantine": 1 / 2}


def test_figures_over_chosen_nodes_ignore_the_others_but_not_a_broken_one():
    values = torch.tensor([0.1, 0.5, 9.0, math.nan], dtype=torch.float64)
    figures = over_honest(values, torch.tensor([True, True, False, False]))
    assert figures == pytest.approx({"mean": 0.3, "worst": 0.5, "std": 0.2})
    assert math.isnan(over_honest(values, torch.tensor([True, True, False, True]))["mean"])
    assert over_honest(values, torch.zeros(4, dtype=torch.bool)) == {}
