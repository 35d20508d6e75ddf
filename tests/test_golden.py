"""Agreement with vectors that independent public implementations computed, to 1e-9 in float64."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from callbacks.aggregators import BALANCE, DFedAvg, SketchGuard
from dfl_lightning.functional.deviation import deviation_interval, krum_deviation
from dfl_lightning.functional.sketch import CountSketch

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
