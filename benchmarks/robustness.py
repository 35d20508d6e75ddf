"""Honest TER of rules under attacks: ``python -m benchmarks.robustness --data digits --seeds 1 2``.

Trains every combination of seed, attack, fraction and rule, as the quickstart does on digits or on FEMNIST
(``--data femnist --root FOLDER`` of LEAF files), and shows the mean TER of honest nodes after the last round as one
table and one picture: a row per attack, a column per rule, the mean over seeds. Rules that end in ``~`` see sketches;
for them it also says how far they agree with their exact twins on whom to accept. ``--widths`` adds columns of BALANCE
with ``threshold: update`` and these c, and draws TER against c. Finished runs are kept in a file and not repeated;
several processes may share it, each with other seeds, attacks or rules.
"""

import argparse
import copy
import itertools
import json
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from lightning import seed_everything
from rich.progress import track
from torch import Tensor, nn

from benchmarks.training import quiet_trainer
from callbacks import attacks
from callbacks.aggregators import BALANCE, LEARN, RFA, SCCLIP, UBAR, DFedAvg, Krum, MultiKrum, SketchGuard, WFAgg
from datamodules import FEMNIST, Digits
from dfl_lightning import Aggregator, DFLModule, ErdosRenyi, NodeDataModule, Round, RoundCallback
from dfl_lightning.networks import DigitsCNN, FemnistCNN

Make = Callable[..., Aggregator]
TWINS: dict[str, Make] = {  # rules on exact distances and, as NAME~, on sketched ones; BALANCE~ is SketchGuard
    "BALANCE": BALANCE,
    "BALANCE update": partial(BALANCE, threshold="update"),
    "BALANCE gap": partial(BALANCE, threshold="gap"),
    "Krum": partial(Krum, on_invalid="clamp"),
    "MultiKrum": partial(MultiKrum, on_invalid="clamp"),
    "UBAR": UBAR,
    "SCCLIP": partial(SCCLIP, on_invalid="clamp"),
    "RFA": RFA,
    "WFAgg": partial(WFAgg, on_invalid="clamp"),
}
RULES: dict[str, Make] = dict(TWINS) | {f"{name}~": make for name, make in TWINS.items()}
RULES |= {
    "SketchGuard check": partial(SketchGuard, distance_check=True),
    "SketchGuard commit": partial(SketchGuard, commit_reveal=True),
    "LEARN": partial(LEARN, on_invalid="clamp"),
    "DFedAvg": DFedAvg,
}
ATTACKS = [name for name in attacks.__all__ if name != "BitFlip"]  # which is SignFlip
KEPT = ("ter/mean", "screening/accepted_honest", "screening/accepted_byzantine", "screening/sketch_error")


class Agreement(RoundCallback):
    """The share of honest nodes' links on which a rule and its exact twin decide alike, over all rounds."""

    def __init__(self, twin: Aggregator) -> None:
        super().__init__()
        self.twin, self.alike, self.links = twin, 0, 0

    def on_attack(self, round: Round) -> None:  # listed behind the attack
        other = copy.copy(round)
        other._rows, other.received, other.metrics, other.notes = round._rows.clone(), {}, {}, []
        self.wanted: Tensor = self.twin.aggregate(other)

    def on_round_end(self, round: Round) -> None:
        links = round.neighbours & ~round.byzantine[:, None]
        assert round.accepted is not None
        self.alike += int((links & (round.accepted == self.wanted)).sum())
        self.links += int(links.sum())


@cache
def source(data: str, root: str, seed: int) -> NodeDataModule:
    """The data, read once for all runs of a seed."""
    if data == "digits":
        return Digits(batch_size=32, local_epochs=3)
    return FEMNIST(root=root, source="leaf", local_epochs=3)


def make_rule(name: str, size: int) -> Aggregator:
    """A rule by its name in the table; ``c=2`` is BALANCE with ``threshold: update``."""
    if name.startswith("c="):
        return BALANCE(threshold="update", c=float(name[2:]))
    sketched = name.endswith("~") or name.startswith("SketchGuard")
    return RULES[name](sketch_size=size) if sketched else RULES[name]()


def train(data: str, root: str, rule: str, attack: str, fraction: float, seed: int, rounds: int) -> dict[str, Any]:
    """Figures of the last round of one run; acceptance is that of all rounds."""
    seed_everything(seed, verbose=False)
    make: Callable[[], nn.Module]
    if data == "digits":
        make, topology, size = DigitsCNN, ErdosRenyi(10, 0.6), 200
    else:
        make, topology, size = partial(FemnistCNN, size="tiny"), ErdosRenyi(20, 0.45), 1000
    module = DFLModule(make, topology, lr=0.05, momentum=0.9)
    acting: list[Any] = [make_rule(rule, size)]
    if attack != "none":
        acting.append(getattr(attacks, attack)(fraction=fraction))
    if rule.endswith("~"):
        acting.append(Agreement(make_rule(rule[:-1], size)))
    quiet_trainer(rounds, *acting, limit_val_batches=1.0).fit(module, source(data, root, seed))
    figures: dict[str, Any] = {}
    for key in KEPT[1:]:
        if values := [row[key] for row in module.history if key in row]:
            figures[key] = sum(values) / len(values)
    if isinstance(acting[-1], Agreement):
        figures["agreement"] = acting[-1].alike / max(acting[-1].links, 1)
    return figures | {"ter/mean": module.history[-1]["ter/mean"]}


def mean(values: list[float]) -> float:
    """Of at least one value."""
    return sum(values) / len(values)


def draw(table: dict[str, dict[str, float]], title: str, path: Path) -> None:
    """The table as a heat map."""
    from matplotlib.figure import Figure

    names, columns = list(table), list(next(iter(table.values())))
    numbers = [[table[name][column] for column in columns] for name in names]
    figure = Figure(figsize=(2.2 + 0.62 * len(columns), 1.8 + 0.3 * len(names)), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    shades = axes.imshow(numbers, cmap="RdYlGn_r", vmin=0, vmax=1, aspect="auto")
    for row, line in enumerate(numbers):
        for column, value in enumerate(line):
            axes.text(column, row, f"{value:.2f}".lstrip("0"), ha="center", va="center", size=7)
    axes.set_xticks(range(len(columns)), columns, rotation=50, ha="right", rotation_mode="anchor", size=8)
    axes.set_yticks(range(len(names)), names, size=8)
    axes.tick_params(length=0)
    axes.set_title(title, size=9)
    figure.colorbar(shades, ax=axes, label="TER", pad=0.01)
    figure.savefig(path)


def draw_curve(table: dict[str, dict[str, float]], widths: list[float], title: str, path: Path) -> None:
    """TER against c, a line per attack."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    for name, line in table.items():
        axes.plot(widths, [line[f"c={width:g}"] for width in widths], marker="o", label=name)
    axes.set(xlabel="c", ylabel="TER, mean over honest nodes", title=title, ylim=(0, 1))
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=["digits", "femnist"], default="digits")
    parser.add_argument("--root", default="data/femnist", help="folder of LEAF's FEMNIST")
    parser.add_argument("--rules", nargs="*", choices=RULES, default=list(RULES))
    parser.add_argument("--widths", nargs="*", type=float, default=[], help="c of further columns")
    parser.add_argument("--attacks", nargs="+", choices=[*ATTACKS, "none"], default=[*ATTACKS, "none"])
    parser.add_argument("--fractions", nargs="+", type=float, default=[0.3, 0.5])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, help="default: 10 on digits, 12 on FEMNIST")
    parser.add_argument("--results", type=Path, default=Path("runs/robustness.jsonl"), help="where runs are kept")
    parser.add_argument("--show", action="store_true", help="show what is there, without training")
    args = parser.parse_args()
    rounds = args.rounds or (10 if args.data == "digits" else 12)
    rules = [*args.rules, *(f"c={width:g}" for width in args.widths)]
    args.results.parent.mkdir(parents=True, exist_ok=True)
    lines = args.results.read_text().splitlines() if args.results.exists() else []
    done = {tuple(run): figures for run, figures in map(json.loads, lines)}
    rows = [(a, f) for a in args.attacks for f in (args.fractions if a != "none" else [0.0])]
    runs = [
        (args.data, rule, attack, fraction, seed, rounds)
        for seed, (attack, fraction), rule in itertools.product(args.seeds, rows, rules)
    ]
    for run in track([run for run in runs if run not in done and not args.show], description="runs"):
        data, rule, attack, fraction, seed, _ = run
        done[run] = train(data, args.root, rule, attack, fraction, seed, rounds)
        with args.results.open("a") as file:
            file.write(json.dumps([run, done[run]]) + "\n")
    show(done, args.data, rules, rows, args.seeds, rounds, args.results)
    if len(args.widths) > 1:
        curve = means(done, args.data, [f"c={width:g}" for width in args.widths], rows, args.seeds, rounds)
        draw_curve(curve, args.widths, args.data, args.results.with_name(f"{args.results.stem}_{args.data}_c.png"))


def means(
    done: dict[Any, dict[str, float]],
    data: str,
    rules: list[str],
    rows: list[tuple[str, float]],
    seeds: list[int],
    rounds: int,
    key: str = "ter/mean",
) -> dict[str, dict[str, float]]:
    """Means over seeds, attack -> rule -> figure; NaN where no run is there."""
    table: dict[str, dict[str, float]] = defaultdict(dict)
    for (attack, fraction), rule in itertools.product(rows, rules):
        found = [done.get((data, rule, attack, fraction, seed, rounds), {}).get(key) for seed in seeds]
        values = [value for value in found if value is not None]
        table[f"{attack} {fraction:.0%}" if fraction else attack][rule] = mean(values) if values else float("nan")
    return table


def show(
    done: dict[Any, dict[str, float]],
    data: str,
    rules: list[str],
    rows: list[tuple[str, float]],
    seeds: list[int],
    rounds: int,
    results: Path,
) -> None:
    """Prints the table, draws it, and compares sketched rules with their twins."""
    table = means(done, data, rules, rows, seeds, rounds)
    title = f"TER of honest nodes, {data}, {rounds} rounds, mean over seeds {seeds}"
    print(f"\n| {title} | " + " | ".join(rules) + " |")
    print("|---" * (len(rules) + 1) + "|")
    for name, line in table.items():
        print(f"| {name} | " + " | ".join(f"{line[rule]:.3f}" for rule in rules) + " |")
    picture = results.with_name(f"{results.stem}_{data}.png")
    draw(table, title, picture)
    print(f"\nThe picture is {picture}")
    for rule in (rule for rule in rules if rule.endswith("~") and rule[:-1] in rules):
        gaps = [abs(line[rule] - line[rule[:-1]]) for line in table.values()]
        got, want = (
            means(done, data, [name], rows, seeds, rounds, "screening/accepted_byzantine") for name in (rule, rule[:-1])
        )
        rates = [abs(got[name][rule] - want[name][rule[:-1]]) for name in table if name != "none"]
        alike = means(done, data, [rule], rows, seeds, rounds, "agreement")
        shares = [line[rule] for line in alike.values()]
        print(
            f"{rule} against {rule[:-1]}: |difference in TER| mean {mean(gaps):.4f}, largest {max(gaps):.4f}; "
            f"in Byzantine acceptance mean {mean(rates):.4f}, largest {max(rates):.4f}; decisions alike "
            f"{mean(shares):.2%}, least {min(shares):.2%}"
        )


if __name__ == "__main__":
    main()
