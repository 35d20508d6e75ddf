"""Trainer options that a round does not survive, refused before anything is computed."""

from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from dfl_lightning.errors import UserError
from dfl_lightning.phases import Aggregator, Attack

PRECISIONS = ("32-true", "64-true", "bf16-mixed")


def check_trainer(trainer: Any) -> None:
    """Refuses options that would cut a round or change what a local step is.

    Raises:
        UserError: names the option, its value, and what is allowed.
    """
    whole = "a round is one whole epoch"
    if not trainer.fast_dev_run:
        _require(
            trainer.max_steps == -1,
            "max_steps",
            trainer.max_steps,
            f"{whole}; leave it at -1 and set trainer.max_epochs",
        )
        _require(
            trainer.max_epochs is not None and trainer.max_epochs > 0,
            "max_epochs",
            trainer.max_epochs,
            "the thresholds need to know the number of rounds; set it to at least 1",
        )
    timer = any(type(callback).__name__ == "Timer" for callback in trainer.callbacks)
    _require(not timer, "max_time", "set", f"{whole}; remove it and set trainer.max_epochs")
    interval = trainer.val_check_interval
    _require(
        interval == 1.0 and isinstance(interval, float), "val_check_interval", interval, f"{whole}; leave it at 1.0"
    )
    every = trainer.check_val_every_n_epoch
    _require(every is None or every >= 1, "check_val_every_n_epoch", every, "it counts rounds; set it to at least 1")
    limit = trainer.limit_train_batches
    _require(limit != 0, "limit_train_batches", limit, "a round without a local step is no round; set it above 0")
    batches = trainer.accumulate_grad_batches
    _require(batches == 1, "accumulate_grad_batches", batches, "a batch is one local step of every node; leave it at 1")
    clip = trainer.gradient_clip_val
    _require(not clip, "gradient_clip_val", clip, "gradients are clipped per node; use model.clip_norm")
    precision = trainer.precision
    _require(
        precision in PRECISIONS,
        "precision",
        precision,
        f"replicas are mixed in full precision; use one of {', '.join(PRECISIONS)}",
    )
    _require(
        not trainer.overfit_batches,
        "overfit_batches",
        trainer.overfit_batches,
        "nodes keep their own data; use data.max_samples",
    )
    _require(trainer.world_size == 1, "devices", trainer.world_size, "all replicas live in one process; set it to 1")
    single = isinstance(trainer.strategy, SingleDeviceStrategy)
    _require(single, "strategy", type(trainer.strategy).__name__, "all replicas live in one process; leave it at auto")
    for callback in trainer.callbacks:
        if isinstance(callback, ModelCheckpoint):
            for option in ("every_n_train_steps", "train_time_interval"):
                value = getattr(callback, f"_{option}")
                _require(
                    not value,
                    f"callbacks.ModelCheckpoint.{option}",
                    value,
                    f"a checkpoint inside a round loses it, as {whole}; use every_n_epochs",
                )
    for role in (Aggregator, Attack):
        names = [type(callback).__name__ for callback in trainer.callbacks if isinstance(callback, role)]
        if len(names) > 1:
            raise UserError(
                f"There are {len(names)} callbacks of the kind {role.__name__} ({', '.join(names)}), "
                "but only one may act; remove the others."
            )


def _require(holds: bool, option: str, value: object, why: str) -> None:
    if not holds:
        raise UserError(f"trainer.{option} is {value}, but {why}.")
