"""What gradient splitting adds to robust rules: ``python -m benchmarks.splitting --seeds 1 2 3 4 5``.

A server with 25 clients, 5 of them Byzantine, on scikit-learn's digits (Dirichlet 0.5): the best accuracy on held-out
data within 40 rounds of each rule, of GAS around it (p = 100), and their paired differences over seeds with a 95 %
confidence interval of the mean (Student's t). Finished runs are kept in a file and not repeated.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import torch
from lightning import seed_everything
from rich.progress import track
from torch import nn

from benchmarks.training import quiet_trainer
from callbacks.aggregators import GAS, RFA, Bulyan, DnC, Median, MultiKrum, TrimmedMean
from callbacks.attacks import LIE, MinMax
from datamodules import Digits
from dfl_lightning import Attack, DFLModule, Server, VectorRule

CLIENTS, FRACTION, SPLITS, LEARNING_RATE = 25, 0.2, 100, 0.3
RULES: dict[str, Callable[..., VectorRule]] = {
    "MultiKrum": MultiKrum,
    "Bulyan": Bulyan,
    "Median": Median,
    "RFA": RFA,
    "DnC(c=1)": lambda **options: DnC(c=1.0, **options),
    "DnC(c=4)": lambda **options: DnC(c=4.0, **options),
    "TrimmedMean": TrimmedMean,
}
ATTACKS: dict[str, Callable[[], Attack]] = {
    "LIE": lambda: LIE(z=1.5, fraction=FRACTION),
    "MinMax": lambda: MinMax(fraction=FRACTION),
}


class Perceptron(nn.Sequential):
    """64-100-10."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))


def best_accuracy(rule: str, split: bool, attack: str, seed: int, rounds: int) -> float:
    """The highest accuracy of the server's model on all held-out data in one run."""
    seed_everything(seed, verbose=False)
    declared = {} if rule in ("Median", "RFA") else {"on_invalid": "clamp"}
    base = RULES[rule](**declared)
    aggregator = GAS(base, num_splits=SPLITS, on_invalid="clamp") if split else base
    module = DFLModule(Perceptron, Server(CLIENTS), lr=LEARNING_RATE, momentum=0.5)
    data = Digits(beta=0.5, batch_size=32, min_samples=5)
    quiet_trainer(rounds, aggregator, ATTACKS[attack](), limit_val_batches=1.0).fit(module, data)
    return module.history[-1]["accuracy/best"]


def interval(differences: list[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % confidence interval."""
    values = torch.tensor(differences, dtype=torch.float64)
    n = len(values)
    quantiles = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
    if n < 2:
        return float(values.mean()), float("nan")
    return float(values.mean()), quantiles.get(n, 1.96) * float(values.std()) / n**0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--results", type=Path, default=Path("runs/splitting.jsonl"), help="where runs are kept")
    args = parser.parse_args()
    args.results.parent.mkdir(parents=True, exist_ok=True)
    lines = args.results.read_text().splitlines() if args.results.exists() else []
    done = {tuple(run): accuracy for run, accuracy in map(json.loads, lines)}
    runs = [
        (rule, split, attack, seed, args.rounds)
        for seed, attack, rule, split in itertools.product(args.seeds, args.attacks, args.rules, (False, True))
    ]
    for run in track([run for run in runs if run not in done], description="runs"):
        done[run] = best_accuracy(*run)
        with args.results.open("a") as file:
            file.write(json.dumps([run, done[run]]) + "\n")
    print(f"\n| best accuracy, {len(args.seeds)} seeds | rule | GAS(rule) | difference |\n|---|---|---|---|")
    for attack, rule in itertools.product(args.attacks, args.rules):
        alone, split = ([done[rule, by, attack, seed, args.rounds] for seed in args.seeds] for by in (False, True))
        mean, half = interval([b - a for a, b in zip(alone, split)])
        means = (sum(values) / len(values) for values in (alone, split))
        print(
            f"| {attack}, {rule} | " + " | ".join(f"{value:.3f}" for value in means) + f" | {mean:+.3f} ± {half:.3f} |"
        )


if __name__ == "__main__":
    main()
