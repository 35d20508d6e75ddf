"""What a run leaves in its folder besides its figures."""

import json
from typing import Any

from lightning.pytorch.callbacks import Callback

from dfl_lightning.report import environment, run_folder, write_node_table


class RunRecord(Callback):
    """Writes ``environment.json`` (versions, git commit, threads, data source and fingerprint) and ``nodes.csv``.

    The environment also goes to loggers that keep hyperparameters.
    """

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if (folder := run_folder(trainer)) is None:
            return
        data = trainer.datamodule
        record = environment() | {"data": data.nodes.source, "data_fingerprint": data.fingerprint}
        (folder / "environment.json").write_text(json.dumps(record, indent=2) + "\n")
        for logger in trainer.loggers[1:]:
            logger.log_hyperparams({"environment": record})

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking and (folder := run_folder(trainer)) is not None:
            write_node_table(pl_module.table, folder / "nodes.csv")
