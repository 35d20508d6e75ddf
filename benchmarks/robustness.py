"""Honest TER of rules under attacks: ``python -m benchmarks.robustness --data digits --seeds 1 2``.

Trains every combination of seed, attack, fraction and rule, as the quickstart does on digits or on FEMNIST
(``--data femnist --root FOLDER`` of LEAF files), and prints a table of the mean TER of honest nodes after the last
round: one column per rule, one number per seed. Finished runs are kept in a file and not repeated.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lightning import seed_everything
from rich.progress import track
from torch import nn

from benchmarks.training import quiet_trainer
from callbacks.aggregators import BALANCE, DFedAvg, SketchGuard
from callbacks.attacks import DirectedDeviation, Gaussian, ScaledModel
from datamodules import FEMNIST, Digits
from dfl_lightning import Aggregator, Attack, DFLModule, ErdosRenyi, NodeDataModule
from dfl_lightning.networks import DigitsCNN, FemnistCNN

RULES: dict[str, Callable[[int], Aggregator]] = {
    "SketchGuard": lambda size: SketchGuard(sketch_size=size),
    "BALANCE": lambda size: BALANCE(),
    "DFedAvg": lambda size: DFedAvg(),
}
ATTACKS: dict[str, Callable[[float], Attack]] = {
    "Gaussian": lambda fraction: Gaussian(fraction=fraction),
    "ScaledModel": lambda fraction: ScaledModel(fraction=fraction),
    "DirectedDeviation": lambda fraction: DirectedDeviation(fraction=fraction),
}


def train(data: str, root: str, rule: str, attack: str, fraction: float, seed: int, rounds: int) -> float:
    """Honest TER, mean over nodes, after the last round of one run."""
    seed_everything(seed, verbose=False)
    make: Callable[[], nn.Module]
    source: NodeDataModule
    if data == "digits":
        source, make, topology, size = Digits(batch_size=32, local_epochs=3), DigitsCNN, ErdosRenyi(10, 0.6), 200
    else:
        source, make = FEMNIST(root=root, source="leaf", local_epochs=3), partial(FemnistCNN, size="tiny")
        topology, size = ErdosRenyi(20, 0.45), 1000
    module = DFLModule(make, topology, lr=0.05, momentum=0.9)
    acting = [RULES[rule](size)] + ([ATTACKS[attack](fraction)] if attack != "none" else [])
    quiet_trainer(rounds, *acting, limit_val_batches=1.0).fit(module, source)
    return module.history[-1]["ter/mean"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=["digits", "femnist"], default="digits")
    parser.add_argument("--root", default="data/femnist", help="folder of LEAF's FEMNIST")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--attacks", nargs="+", choices=[*ATTACKS, "none"], default=[*ATTACKS, "none"])
    parser.add_argument("--fractions", nargs="+", type=float, default=[0.3, 0.5])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--results", type=Path, default=Path("runs/robustness.jsonl"), help="where finished runs are kept"
    )
    args = parser.parse_args()
    args.results.parent.mkdir(parents=True, exist_ok=True)
    lines = args.results.read_text().splitlines() if args.results.exists() else []
    done = {tuple(key): ter for key, ter in map(json.loads, lines)}
    rows = [(a, f) for a in args.attacks for f in (args.fractions if a != "none" else [0.0])]
    runs = [
        (args.data, rule, attack, fraction, seed, args.rounds)
        for (attack, fraction), rule, seed in itertools.product(rows, args.rules, args.seeds)
    ]
    for run in track([run for run in runs if run not in done], description="runs"):
        data, rule, attack, fraction, seed, rounds = run
        done[run] = train(data, args.root, rule, attack, fraction, seed, rounds)
        with args.results.open("a") as file:
            file.write(json.dumps([run, done[run]]) + "\n")
    print(f"\n| TER, {args.data}, seeds {args.seeds} | " + " | ".join(args.rules) + " |")
    print("|---" * (len(args.rules) + 1) + "|")
    for attack, fraction in rows:
        name = attack if attack == "none" else f"{attack} {fraction:.0%}"
        cells = [
            " / ".join(f"{done[args.data, rule, attack, fraction, seed, args.rounds]:.3f}" for seed in args.seeds)
            for rule in args.rules
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
