"""What a run says about itself: environment, per-node table, summary."""

import csv
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

PACKAGES = ("dfl-lightning", "lightning", "torch", "torchmetrics", "torchvision", "networkx", "numpy")


def run_folder(trainer: Any) -> Path | None:
    """Where this process may write a run's files: nowhere for a trial run, without a logger, or on other processes."""
    folder = trainer.log_dir  # asked for by every process, since it is broadcast
    if not trainer.loggers or folder is None or trainer.fast_dev_run or not trainer.is_global_zero:
        return None
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder)


def environment() -> dict[str, Any]:
    """Versions, git commit (None outside a repository; marked if files were changed), and the number of threads."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            return subprocess.run(
                ["git", "-C", str(here), *arguments], capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    commit = git("rev-parse", "HEAD")
    changed = commit is not None and bool(git("status", "--porcelain", "--untracked-files=no"))
    return {
        "versions": {package: version(package) for package in PACKAGES},
        "git_commit": f"{commit} with changes" if changed else commit,
        "threads": torch.get_num_threads(),
    }


def write_node_table(table: Mapping[str, list[Any]], path: Path) -> None:
    """Writes per-node figures as CSV, one row per node."""
    with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.writer(file)
        writer.writerow(table)
        writer.writerows(zip(*table.values()))


def node_table(table: Mapping[str, list[Any]]) -> Table:
    """Per-node figures for the terminal."""
    columns = [name for name in table if name != "users"]
    shown = Table(title="Nodes")
    for name in columns:
        shown.add_column(name.replace("_", " "), justify="right")
    for row in zip(*(table[name] for name in columns)):
        shown.add_row(*(_cell(value) for value in row))
    return shown


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    return f"{value:.3f}" if isinstance(value, float) else f"{value:,}"


def summary_table(history: list[dict[str, float]], rounds: int) -> Table:
    """The result of a run: the last round's figures, the best TER, and what was moved and spent.

    Args:
        history: one dictionary of figures per finished round, at least one.
        rounds: T, how many were planned.
    """
    last = history[-1]
    table = Table(title=f"After round {last['round']:g} of {rounds}", show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right")

    def row(label: str, key: str, form: str = "{:.3f}", of: Mapping[str, float] = last) -> None:
        if key in of:
            table.add_row(label, form.format(of[key]))

    row("TER, mean over honest nodes", "ter/mean")
    row("TER, worst honest node", "ter/worst")
    row("TER, spread (standard deviation)", "ter/std")
    measured = [entry for entry in history if "ter/mean" in entry]
    if measured:
        best = min(measured, key=lambda entry: entry["ter/mean"])
        row(f"TER, best mean (round {best['round']:g})", "ter/mean", of=best)
    row("accuracy, best so far", "accuracy/best")
    row("TER on the union of all test data, mean", "ter/union_mean")
    row("loss, mean over honest nodes", "loss/mean")
    row("accepted honest neighbours", "screening/accepted_honest", "{:.1%}")
    row("accepted Byzantine neighbours", "screening/accepted_byzantine", "{:.1%}")
    row("models that failed verification", "screening/verification_failed", "{:.0f}")
    row("parameters received per honest node and round", "traffic/parameters", "{:,.0f}")
    row("traffic saved against full exchange", "traffic/reduction", "{:.1%}")
    totals = {
        key: sum(entry.get(key, 0.0) for entry in history)
        for key in ("time/training", "time/aggregation", "time/evaluation")
    }
    for label, key in (
        ("training", "time/training"),
        ("aggregation", "time/aggregation"),
        ("evaluation", "time/evaluation"),
    ):
        row(f"seconds of {label}, all rounds", key, "{:.1f}", of=totals)
    return table
