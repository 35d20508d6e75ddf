"""Time of one round's aggregation of all nodes: ``python -m benchmarks.aggregation --rule sketchguard --nodes 97``.

The floor is what must be done with all N + F rows (the nodes' and the forged ones), block by block: the bare float32
product [N, N + F] @ [N + F, d]; and before it, for rules on sketches and for plain averaging, one pass that reads every
row, for rules on exact distances one float32 Gram product. Of gradient splitting on a server (``--rule gas --base
bulyan --num-splits 1000 --nodes 10 --dim 2472266``) the floor is one gather of all rows in a random order of their
columns, and one mean.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks import medians, report
from callbacks.aggregators import (
    BALANCE,
    GAS,
    RFA,
    SCCLIP,
    Bulyan,
    DFedAvg,
    Krum,
    Median,
    MultiKrum,
    SketchGuard,
    TrimmedMean,
)
from callbacks.attacks import Gaussian, ScaledModel
from dfl_lightning import Aggregator, Attack, FullyConnected, Round, VectorRule
from dfl_lightning.round import WIDTH

RULES: dict[str, Callable[[], Aggregator]] = {
    "dfedavg": DFedAvg,
    "sketchguard": SketchGuard,
    "checked": partial(SketchGuard, distance_check=True),
    "committed": partial(SketchGuard, commit_reveal=True),
    "balance": BALANCE,
    "krum": partial(Krum, on_invalid="clamp"),
    "multikrum": partial(MultiKrum, on_invalid="clamp"),
    "scclip": partial(SCCLIP, on_invalid="clamp"),
    "rfa": RFA,
}
BASES: dict[str, Callable[[], VectorRule]] = {
    "multikrum": partial(MultiKrum, on_invalid="clamp"),
    "bulyan": partial(Bulyan, on_invalid="clamp"),
    "median": Median,
    "trimmedmean": partial(TrimmedMean, on_invalid="clamp"),
    "rfa": RFA,
}
EXACT = ("checked", "balance", "krum", "multikrum", "scclip", "rfa")  # rules that need all distances
ATTACKS: dict[str, type[Attack]] = {"scaled": ScaledModel, "gaussian": Gaussian}


def make_rows(nodes: int, dim: int) -> Tensor:
    """[nodes, dim]: models that are near each other and far from the origin, as after a round of training."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(dim, generator=generator)
    rows = torch.rand(nodes, dim, generator=generator)
    return rows.sub_(0.5).mul_(0.2).add_(common)


def floor(rows: Tensor, weights: Tensor, exact: bool) -> None:
    """Reads every row once, or multiplies each with each, then multiplies once."""
    if exact:
        for low in range(0, rows.shape[1], WIDTH):
            block = rows[:, low : low + WIDTH]
            torch.mm(block, block.T)
    else:
        for row in rows:
            row.sum()
    scratch = rows.new_empty(len(weights), WIDTH)
    for low in range(0, rows.shape[1], WIDTH):
        block = rows[:, low : low + WIDTH]
        torch.mm(weights, block, out=scratch[:, : block.shape[1]])


def gathered_mean(rows: Tensor) -> None:
    """Gathers all rows in a random order of their columns, some at a time, and averages them."""
    order = torch.randperm(rows.shape[1], generator=torch.Generator().manual_seed(0))
    for columns in order.split(2**20 // len(rows)):
        rows.index_select(1, columns)
    rows.mean(0)


def splitting(args: argparse.Namespace) -> None:
    """Times GAS on a server."""
    rows = make_rows(args.nodes, args.dim)
    byzantine, neighbours = torch.zeros(args.nodes, dtype=torch.bool), FullyConnected(args.nodes).adjacency(0)
    options = {"num_splits": args.num_splits, "byzantine_fraction": 0.2, "on_invalid": "clamp"}
    rule = GAS(BASES[args.base](), **options)

    def aggregate() -> None:
        round = Round(rows, neighbours, byzantine, central=True)
        rule.on_aggregate(round)
        round.close()

    time_s, floor_s = medians(aggregate, lambda: gathered_mean(rows), repeats=args.repeats)
    what = "gradient splitting on a server"
    report(time_s, floor_s, what=what, base=args.base, num_splits=args.num_splits, nodes=args.nodes, dim=args.dim)


def noise(forged: int, dim: int) -> None:
    """What a Gaussian attack must draw for one visit of all blocks."""
    generator = torch.Generator().manual_seed(0)
    for low in range(0, dim, WIDTH):
        torch.randn(forged, min(WIDTH, dim - low), generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rule", choices=[*RULES, "gas"], default="sketchguard")
    parser.add_argument("--base", choices=BASES, default="multikrum", help="of gradient splitting")
    parser.add_argument("--num-splits", type=int, default=1000, help="of gradient splitting")
    parser.add_argument("--attack", choices=ATTACKS, default="scaled")
    parser.add_argument("--fraction", type=float, default=0.49, help="share of Byzantine nodes")
    parser.add_argument("--nodes", type=int, default=97)
    parser.add_argument("--dim", type=int, default=6_603_710)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.rule == "gas":
        splitting(args)
        return
    attack = ATTACKS[args.attack](fraction=args.fraction)
    byzantine, neighbours = attack.choose(args.nodes, 0), FullyConnected(args.nodes).adjacency(0)
    forged = int(byzantine.sum())
    rows = make_rows(args.nodes, args.dim)
    rule = RULES[args.rule]()

    def aggregate() -> None:
        round = Round(rows, neighbours, byzantine)
        attack.on_attack(round)
        rule.on_aggregate(round)
        round.close()

    def bare() -> None:
        floor(everything, weights, args.rule in EXACT)

    everything = torch.cat([rows, make_rows(forged, args.dim)])
    weights = torch.rand(args.nodes, args.nodes + forged)
    time_s, floor_s = medians(aggregate, bare, repeats=args.repeats)
    extra = {}
    if args.attack == "gaussian":
        extra["noise_s"] = round(medians(lambda: noise(forged, args.dim), repeats=1)[0], 4)
    report(
        time_s,
        floor_s,
        what="one round of aggregation, all nodes",
        rule=args.rule,
        attack=args.attack,
        nodes=args.nodes,
        forged=forged,
        dim=args.dim,
        threads=torch.get_num_threads(),
        **extra,
    )


if __name__ == "__main__":
    main()
