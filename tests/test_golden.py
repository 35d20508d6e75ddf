"""Agreement with vectors that independent public implementations computed, to 1e-9 in float64."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from callbacks.aggregators import (
    BALANCE,
    GAS,
    LEARN,
    RFA,
    SCCLIP,
    UBAR,
    Bucketing,
    Bulyan,
    DFedAvg,
    DnC,
    Krum,
    Median,
    MultiKrum,
    SketchGuard,
    TrimmedMean,
)
from callbacks.attacks import IPM, LIE, Dissensus, Mimic, MinMax, MinSum
from dfl_lightning import Round
from dfl_lightning.functional.coordinatewise import median
from dfl_lightning.functional.deviation import deviation_interval, krum_deviation
from dfl_lightning.functional.envelope import alie_z
from dfl_lightning.functional.sketch import CountSketch
from dfl_lightning.vector_rule import OfGroups, mix_groups

PLACES = [folder / "shared" / "golden" / "vectors.json" for folder in Path(__file__).resolve().parents[1:3]]
SEEDS = [1, 2]

pytestmark = pytest.mark.skipif(
    not any(place.exists() for place in PLACES),
    reason="the golden vectors, shared/golden/vectors.json, are neither in the repository nor beside it",
)


@cache
def golden():
    return json.loads(next(place for place in PLACES if place.exists()).read_text())


def vector(values):
    return torch.tensor(values, dtype=torch.float64)


def found(seed, op):
    """The inputs [n, d] of a case and what its operation has given, with which parameters."""
    case = next(case for case in golden()["cases"] if case["seed"] == seed)
    results = [(result["params"], vector(result["output"])) for result in case["results"] if result["op"] == op]
    assert results, f"no result of {op} for seed {seed}"
    return vector(case["inputs"]), results


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_uniform_averaging_of_a_complete_graph_is_the_mean(seed):
    inputs, [(_, want)] = found(seed, "mean")
    rows, accepted = DFedAvg()(inputs)
    close(rows, want.expand_as(rows))
    assert int(accepted.sum()) == len(inputs) * (len(inputs) - 1)


@pytest.mark.parametrize("verification", ["each", "batched", "none"])
@pytest.mark.parametrize("op", ["balance", "sketchguard"])
@pytest.mark.parametrize("seed", SEEDS)
def test_node_0_accepts_and_becomes_what_independent_code_says(seed, op, verification):
    inputs, results = found(seed, op)
    assert {params["t"] for params, _ in results} == {0, 5}
    for params, want in results:
        common = {name: params[name] for name in ("gamma", "kappa", "alpha")}
        if op == "balance":
            rule = BALANCE(**common)
        else:
            rule = SketchGuard(sketch_size=params["k"], verification=verification, **common)
            rule.sketch = CountSketch.from_tables(torch.tensor(params["hash"]), vector(params["sign"]), params["k"])
            close(rule.sketch(inputs[:1])[0], vector(params["own_sketch"]))
        rows, accepted = rule(inputs, index=params["t"], total=params["T"])
        assert accepted[0].nonzero()[:, 0].tolist() == params["accepted"]
        close(rows[0], want)


@pytest.mark.parametrize("op", ["fang_krum_wre0", "fang_krum_wre_mean"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_attack_on_krum_goes_as_far_as_the_plain_definition(seed, op):
    inputs, [(params, want)] = found(seed, op)
    byzantine = golden()["f"]
    honest = inputs[: len(inputs) - byzantine]
    reference = honest.mean(0) if op.endswith("mean") else torch.zeros(inputs.shape[1], dtype=torch.float64)
    direction = honest.mean(0).sign()
    vectors = torch.cat([honest - reference, direction[None]])
    far = krum_deviation(vectors @ vectors.T, byzantine, inputs.shape[1])
    assert far == pytest.approx(params["lam"], rel=1e-9)
    close(reference - far * direction, want)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_attack_on_the_trimmed_mean_draws_from_the_published_intervals(seed):
    inputs, _ = found(seed, "mean")
    case = next(case for case in golden()["cases"] if case["seed"] == seed)
    honest = inputs[: len(inputs) - golden()["f"]]
    want = case["fang_trimmed_mean_intervals"]
    lower, upper = deviation_interval(honest.amax(0), honest.amin(0), honest.mean(0).sign(), want["b"])
    close(lower, vector(want["lo"]))
    close(upper, vector(want["hi"]))


# Rules on a complete graph, where everybody has the same candidates


RULES = {
    "trimmed_mean": LEARN(byzantine_fraction=0.2),
    "mda": LEARN(rule="mda", byzantine_fraction=0.2),
    "bulyan": Bulyan(byzantine_fraction=0.2),
    "bulyan_oneshot": Bulyan(selection="oneshot", byzantine_fraction=0.2),
    "krum": Krum(byzantine_fraction=0.2),
    "multi_krum_m_n_minus_f": MultiKrum(byzantine_fraction=0.2),
    "median": Median(),
    "rfa_z0_zero": RFA(nu=0.1, start="zeros"),
    "rfa_z0_mean": RFA(),
    "clipped_gossip": SCCLIP(tau=3.0, mixing="uniform"),
    "clipped_gossip_adaptive": SCCLIP(mixing="uniform", byzantine_fraction=0.1),
}


@pytest.mark.parametrize("op", RULES)
@pytest.mark.parametrize("seed", SEEDS)
def test_node_0_becomes_what_independent_code_says(seed, op):
    inputs, results = found(seed, op)
    rows, _ = RULES[op](inputs)
    for _, want in results:
        close(rows[0], want)


@pytest.mark.parametrize("kind", [LEARN, TrimmedMean])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_trimmed_mean_is_what_independent_code_says(seed, kind):
    inputs, results = found(seed, "trimmed_mean")
    for _, want in results:
        close(kind(byzantine_fraction=0.2)(inputs)[0][0], want)


@pytest.mark.parametrize("seed", SEEDS)
def test_divide_and_conquer_is_what_independent_code_says(seed):
    inputs, results = found(seed, "dnc_full_dim")
    for params, want in results:
        close(DnC(c=params["c"], byzantine_fraction=0.2)(inputs)[0][0], want)


@pytest.fixture
def permutation(monkeypatch):
    """Replaces random permutations by a given one."""
    return lambda values: monkeypatch.setattr(torch, "randperm", lambda n, generator=None: torch.tensor(values)[:n])


@pytest.mark.parametrize("seed", SEEDS)
def test_buckets_have_the_means_that_independent_code_says(seed, permutation):
    inputs, [(params, want)] = found(seed, "bucketing")
    permutation(params["perm"])
    rule = Bucketing(Median(), size=params["s"])
    generator = torch.Generator()
    vectors = inputs[:, :, None]
    means = mix_groups(rule.plan(OfGroups(vectors, generator), len(inputs), 0, generator), vectors)[:, :, 0]
    close(means, want.view_as(means))


@pytest.mark.parametrize(
    ("op", "base"), [("gas_krum", MultiKrum()), ("gas_median", Median()), ("gas_rbtm", TrimmedMean())]
)
@pytest.mark.parametrize("seed", SEEDS)
def test_split_scores_and_result_are_what_independent_code_says(seed, op, base, permutation):
    inputs, results = found(seed, op)
    assert len(results) == 2
    for params, want in results:
        permutation(params["perm"])
        rule = GAS(base, num_splits=params["p"], split="chunk", byzantine_fraction=0.2)
        round = Round(inputs.clone(), ~torch.eye(len(inputs), dtype=torch.bool), torch.zeros(len(inputs)).bool())
        close(rule.scores(round, [(torch.arange(len(inputs)), params["f"])])[0], vector(params["scores_published"]))
        close(rule(inputs)[0][0], want)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_first_stage_of_ubar_keeps_whom_independent_code_keeps(seed):
    inputs, [(params, want)] = found(seed, "ubar_stage1_ids")
    _, accepted = UBAR(rho=params["rho"])(inputs, loss=lambda model, node: 0.0)  # all losses equal: all pass the second
    assert accepted[0].nonzero()[:, 0].tolist() == want.long().sort().values.tolist()


@pytest.mark.parametrize("op", ["median", "median_even"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_median_is_the_middle_or_the_mean_of_the_two_middle_values(seed, op):
    inputs, results = found(seed, op)
    for params, want in results:
        close(median(inputs[1:11] if "rows" in params else inputs), want)


# Attacks: the honest rows are the first n - f, and everybody starts from zero, so that an update is a model


def forged(seed, attack, neighbours=None, receiver=0):
    """What the last node sends to a receiver."""
    inputs, _ = found(seed, "mean")
    n, f = len(inputs), golden()["f"]
    byzantine = torch.arange(n) >= n - f
    neighbours = ~torch.eye(n, dtype=torch.bool) if neighbours is None else neighbours
    round = Round(inputs.clone(), neighbours, byzantine, start=torch.zeros_like(inputs))
    attack.on_attack(round)
    blocks = []
    round.reduce(lambda block: blocks.append(block.rows) or torch.zeros(1))
    return torch.cat(blocks, 1)[round.sent[receiver, n - 1]]


@pytest.mark.parametrize(
    ("op", "attack"),
    [
        ("lie_minus_unbiased", LIE(z=1.5)),
        ("lie_plus_unbiased", LIE(z=-1.5)),
        ("min_max", MinMax()),
        ("min_sum_paper_max", MinSum()),
        ("min_sum_code_min", MinSum(bound="min")),
        ("ipm", IPM(epsilon=2.0)),
        ("sign_flip_of_mean", IPM(epsilon=1.0)),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
@pytest.mark.parametrize("seed", SEEDS)
def test_attackers_send_what_independent_code_sends(seed, op, attack):
    _, results = found(seed, op)
    for _, want in results:
        close(forged(seed, attack), want)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_z_of_a_little_is_enough_follows_from_the_numbers_of_nodes(seed):
    _, [(params, want)] = found(seed, "alie_z_value")
    close(torch.tensor(alie_z(params["n"], params["f"]), dtype=torch.float64), want.reshape(()))


@pytest.mark.parametrize("seed", SEEDS)
def test_dissensus_sends_what_independent_code_sends(seed):
    _, [(params, want)] = found(seed, "dissensus")
    attack = Dissensus(epsilon=params["epsilon"])  # on a complete graph Metropolis weights are 1 / n
    assert params["weights"] == "1/n"
    close(forged(seed, attack, receiver=int(params["target"])), want)


@pytest.mark.parametrize("seed", SEEDS)
def test_mimic_learns_the_direction_that_independent_code_learns(seed):
    inputs, [(_, want)] = found(seed, "mimic_z_init")
    attack = Mimic()
    first = torch.randn(inputs.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    attack._memory = {"z": first, "mean": torch.zeros_like(first)}
    sent = forged(seed, attack)
    close(attack._memory["z"], want)
    close(sent, inputs[attack._memory["victim"]])
