"""Time of one round's aggregation of all nodes: ``python -m benchmarks.aggregation --rule sketchguard --nodes 97``.

The floor is one pass that reads all N + F rows (the nodes' and the forged ones), and the bare float32 product
[N, N + F] @ [N + F, d], block by block.
"""

import argparse

import torch
from torch import Tensor

from benchmarks import medians, report
from callbacks.aggregators import BALANCE, DFedAvg, SketchGuard
from callbacks.attacks import Gaussian, ScaledModel
from dfl_lightning import Aggregator, Attack, FullyConnected, Round
from dfl_lightning.round import WIDTH

RULES: dict[str, type[Aggregator]] = {"sketchguard": SketchGuard, "balance": BALANCE, "dfedavg": DFedAvg}
ATTACKS: dict[str, type[Attack]] = {"scaled": ScaledModel, "gaussian": Gaussian}


def make_rows(nodes: int, dim: int) -> Tensor:
    """[nodes, dim]: models that are near each other and far from the origin, as after a round of training."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(dim, generator=generator)
    rows = torch.rand(nodes, dim, generator=generator)
    return rows.sub_(0.5).mul_(0.2).add_(common)


def floor(rows: Tensor, weights: Tensor) -> None:
    """Reads every row once, then multiplies once."""
    for row in rows:
        row.sum()
    scratch = rows.new_empty(len(weights), WIDTH)
    for low in range(0, rows.shape[1], WIDTH):
        block = rows[:, low : low + WIDTH]
        torch.mm(weights, block, out=scratch[:, : block.shape[1]])


def noise(forged: int, dim: int) -> None:
    """What a Gaussian attack must draw for one visit of all blocks."""
    generator = torch.Generator().manual_seed(0)
    for low in range(0, dim, WIDTH):
        torch.randn(forged, min(WIDTH, dim - low), generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rule", choices=RULES, default="sketchguard")
    parser.add_argument("--attack", choices=ATTACKS, default="scaled")
    parser.add_argument("--fraction", type=float, default=0.49, help="share of Byzantine nodes")
    parser.add_argument("--nodes", type=int, default=97)
    parser.add_argument("--dim", type=int, default=6_603_710)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
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
        floor(everything, weights)

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
