"""The command line: a YAML config becomes a run. ``python train.py --help`` says more."""

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

import callbacks.aggregators
import callbacks.attacks
import datamodules
import dfl_lightning.networks
from callbacks.pictures import Pictures
from callbacks.progress import RoundProgress
from callbacks.record import RunRecord
from dfl_lightning import (
    Aggregator,
    Attack,
    DFLModule,
    ErdosRenyi,
    FromFile,
    FullyConnected,
    KRegular,
    Mobility,
    NodeDataModule,
    Ring,
    Server,
    Topology,
    UserError,
    VectorRule,
)
from dfl_lightning.checks import check_trainer
from dfl_lightning.loggers import default_loggers
from dfl_lightning.parsing import OneSentenceParser, fail, mistake
from dfl_lightning.report import node_table, run_folder, summary_table

USAGE = "python train.py --config FILE [--section.key=value ...]"

CHOICES = {
    "topology": [ErdosRenyi, FromFile, FullyConnected, KRegular, Mobility, Ring, Server],
    "data": [getattr(datamodules, name) for name in datamodules.__all__],
    "attack": [getattr(callbacks.attacks, name) for name in callbacks.attacks.__all__],
    "aggregator": [getattr(callbacks.aggregators, name) for name in callbacks.aggregators.__all__],
    "base": [  # of aggregators that work through another one
        found
        for name in callbacks.aggregators.__all__
        if issubclass(found := getattr(callbacks.aggregators, name), VectorRule)
    ],
    "model.network": [getattr(dfl_lightning.networks, name) for name in dfl_lightning.networks.__all__],
}

HELP = """\
usage: {usage}

Trains a decentralised network of nodes, some of them Byzantine, and measures the honest ones.

  --config FILE            a YAML config; may be given several times, later ones win
  --print_config           print the whole config that would run, and stop
  --ckpt_path FILE         continue the run that left this checkpoint
  --evaluate FILE          measure the nodes of a checkpoint, without training
  --name NAME              folder of the run under runs/ (default: the config's name)
  --seed_everything INT    seed of everything random

sections, each a name with its own keys (--topology.p=0.3); for the keys of a name: --SECTION.help=NAME,
for example --aggregator.help=SketchGuard
  --topology   {topology}
  --data       {data}
  --attack     {attack}, or null
  --aggregator {aggregator}, or null
  --model      network (one of {network}),
               lr, momentum, weight_decay, clip_norm, optimizer, keep_optimizer, init, allow_other_total
  --trainer    options of the Lightning Trainer: max_epochs (rounds), accelerator, precision, callbacks, logger ...

own classes: give a class path, such as --aggregator=my_package.MyRule
"""


class RecordConfig(SaveConfigCallback):
    """Writes the whole config into the run's folder, and into loggers that keep hyperparameters."""

    def save_config(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if (folder := run_folder(trainer)) is None:
            return
        self.parser.save(self.config, folder / "config.yaml", skip_unset=False, overwrite=True, multifile=False)
        for logger in trainer.loggers[1:]:
            logger.log_hyperparams(self.config.as_dict())


class CLI(LightningCLI):
    """Sections topology, data, model, attack, aggregator and trainer."""

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        parser = super().init_parser(**kwargs)
        names = {
            key.rpartition(".")[2]: " ".join(choice.__name__ for choice in found) for key, found in CHOICES.items()
        }
        OneSentenceParser.choices = CHOICES  # parsers of single classes explain their mistakes too
        parser.main_help = HELP.format(usage=USAGE, **names)
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_subclass_arguments(Topology, "topology", required=True)
        parser.link_arguments("topology", "model.topology", apply_on="instantiate")
        parser.add_lightning_class_args(Attack, "attack", subclass_mode=True, required=False)
        parser.add_lightning_class_args(Aggregator, "aggregator", subclass_mode=True, required=False)
        parser.add_argument("--ckpt_path", type=str | None, default=None)
        parser.add_argument("--evaluate", type=str | None, default=None)
        files, _ = split_configs(sys.argv[1:])
        parser.add_argument("--name", type=str, default=Path(files[-1]).stem if files else "run")

    def before_instantiate_classes(self) -> None:
        for option in ("evaluate", "ckpt_path"):
            if (path := self.config[option]) is not None and not Path(path).is_file():
                raise UserError(f"{option} is {path or 'empty'}, but there is no such file; give a run's last.ckpt.")
        if None not in (self.config.evaluate, self.config.ckpt_path):
            raise UserError("evaluate and ckpt_path are both given; to evaluate a checkpoint, give evaluate alone.")

    def _set_seed(self) -> None:
        seed = self.config.seed_everything
        if not 0 <= seed < 2**32:
            raise UserError(f"seed_everything is {seed}, but a seed is from 0 to 2^32 - 1.")
        super()._set_seed()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        if not self.config_init["trainer"]:
            raise UserError("The section trainer is null; leave it out to keep its defaults.")
        options = dict(self.config_init["trainer"])
        if options["max_epochs"] is None:
            raise UserError("trainer.max_epochs is null, but thresholds need to know the number of rounds; set it.")
        acting = [self.config_init[key] for key in ("attack", "aggregator") if self.config_init[key] is not None]
        observers = [RoundProgress()] if options["enable_progress_bar"] is not False else []
        if self.config.evaluate is not None:
            options["logger"] = False
            options["enable_checkpointing"] = False
        if options["logger"] is None:
            options["logger"] = default_loggers(self.config.name) if not options["fast_dev_run"] else False
        if options["enable_checkpointing"] is not False and options["logger"] is not False:
            observers.append(
                ModelCheckpoint(filename="last", save_on_train_epoch_end=True, enable_version_counter=False)
            )
        return self._instantiate_trainer(options, [*acting, Pictures(), RunRecord(), *observers])


def split_configs(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The files of all ``--config``, and the other arguments, with None (as W&B sweeps write it) as YAML's null."""
    files, others = [], []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--config":
            files.append(next(rest, ""))
        elif argument.startswith("--config="):
            files.append(argument.removeprefix("--config="))
        else:
            others.append(
                argument[:-4] + "null" if argument.startswith("--") and argument.endswith("=None") else argument
            )
    return files, others


def run(cli: CLI) -> None:
    """Fits, or evaluates, and shows the result."""
    from rich.console import Console

    console = Console()
    check_trainer(cli.trainer)  # the module does this too, but only once Lightning has started processes
    if cli.config.evaluate is not None:
        cli.trainer.validate(cli.model, datamodule=cli.datamodule, ckpt_path=cli.config.evaluate, verbose=False)
        console.print(node_table(cli.model.table))
        figures = {name: float(value) for name, value in cli.trainer.callback_metrics.items()}
        console.print(
            "  ".join(f"{name} {value:.4f}" for name, value in figures.items() if name.startswith(("ter", "loss")))
        )
        return
    interrupted = False
    try:
        cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=cli.config.ckpt_path)
    except SystemExit:  # what Lightning makes of Ctrl-C
        interrupted = True
    finally:
        if cli.model.history:
            console.print(summary_table(cli.model.history, cli.trainer.max_epochs))
            if folder := run_folder(cli.trainer):
                console.print(f"Results are in {folder}", soft_wrap=True)
    if interrupted:
        keeper = cli.trainer.checkpoint_callback
        last = keeper.best_model_path if keeper else ""
        console.print(f"Interrupted; to continue, add --ckpt_path {last}" if last else "Interrupted.", soft_wrap=True)
        sys.exit(130)


def main() -> None:
    """Entry point."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    for noisy in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    sys.path.append(str(Path.cwd()))  # own classes are found in the folder that one works in
    files, others = split_configs(sys.argv[1:])
    sys.argv[1:] = [f"--config={file}" for file in files] + others  # a config after an override would undo it
    try:
        cli = CLI(
            DFLModule,
            NodeDataModule,
            subclass_mode_data=True,
            run=False,
            auto_configure_optimizers=False,
            save_config_callback=RecordConfig,
            save_config_kwargs={"save_to_log_dir": False},  # it writes the file itself, into runs only
            parser_class=OneSentenceParser,
            seed_everything_default=1,
            trainer_defaults={
                "max_epochs": 10,
                "num_sanity_val_steps": 0,
                "enable_model_summary": False,
                "devices": 1,
                "log_every_n_steps": 1,
            },
            parser_kwargs={"parser_mode": "omegaconf+", "allow_abbrev": False, "usage": USAGE},
        )
        run(cli)
    except Exception as error:
        if (sentence := mistake(error)) is None:
            raise
        fail(sentence)


if __name__ == "__main__":
    main()
