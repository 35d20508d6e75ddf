"""How far a run is, and how good it is."""

import sys
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class RoundProgress(ProgressBar):
    """One bar for the whole run, with the round and the TER; where there is no terminal, one line per round."""

    def __init__(self) -> None:
        super().__init__()
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._enabled = True

    def disable(self) -> None:
        """Shows nothing (what Lightning calls on processes other than the first)."""
        self._enabled = False

    def enable(self) -> None:
        """Shows the bar again."""
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not (self._enabled and self._console.is_terminal):
            return
        self._bar = Progress(
            TextColumn("round {task.fields[round]}/{task.fields[rounds]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[ter]}"),
            console=self._console,
        )
        steps, rounds = int(trainer.num_training_batches), trainer.max_epochs or 1
        done = trainer.current_epoch
        self._task = self._bar.add_task(
            "", total=steps * rounds, completed=steps * done, round=done + 1, rounds=rounds, ter=""
        )
        self._bar.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._bar is not None:
            self._bar.update(self._task, advance=1, round=trainer.current_epoch + 1)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ter = trainer.callback_metrics.get("ter/mean")
        if ter is None or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        if self._bar is not None:
            self._bar.update(self._task, ter=f"TER {float(ter):.3f}")
        elif self._enabled:
            print(
                f"round {trainer.current_epoch + 1}/{trainer.max_epochs}  TER {float(ter):.3f}",
                file=sys.stderr,
                flush=True,
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
