"""Checkpoints: written whole or not at all, read without running code, and opened node by node."""

import functools
import os
import pickle
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from torch import nn

from dfl_lightning.errors import UserError
from dfl_lightning.settings import settings

KEYS = {
    "total",
    "seed",
    "num_nodes",
    "neighbours",
    "byzantine",
    "layout",
    "network",
    "topology",
    "optimizer",
    "aggregator",
    "attack",
}
KEYS |= {"data", "history", "inside_round"}


class AtomicCheckpointIO(CheckpointIO):
    """Streams a checkpoint to a temporary file, syncs it to disk, and renames it.

    Whenever the process is killed, the file of that name is a whole checkpoint, the new or the one before; and no
    second copy of the models is made in memory. Loading maps the file and takes tensors and plain values only.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        except (OSError, RuntimeError) as error:  # torch's writer tells of a full disk by a RuntimeError
            raise UserError(
                f"The checkpoint {target} could not be written ({error}); make room and resume from the one before."
            ) from error
        finally:
            partial.unlink(missing_ok=True)
        folder = os.open(target.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return read_checkpoint(path)

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Reads a checkpoint of this framework: tensors, mapped from the file, and plain values; never code.

    Raises:
        UserError: there is no such file, or it is no checkpoint of this framework.
    """
    if not Path(path).is_file():
        raise UserError(
            f"There is no checkpoint {path}; give the path of a file such as runs/NAME/VERSION/checkpoints/last.ckpt."
        )
    try:
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError) as error:
        raise UserError(f"The file {path} is damaged or no checkpoint; give one that this framework wrote.") from error
    own = checkpoint.get("dfl_lightning") if isinstance(checkpoint, dict) else None
    if not isinstance(own, dict):
        raise UserError(f"The file {path} is a checkpoint of something else; give one that this framework wrote.")
    if missing := sorted(KEYS - own.keys()):
        raise UserError(f"The checkpoint {path} lacks {', '.join(missing)}; give one that this version wrote whole.")
    return checkpoint


def refuse_other_network(saved: dict[str, Any], here: dict[str, Any]) -> None:
    """Raises UserError if a checkpoint's network or number of nodes is not that of this run."""
    if saved["num_nodes"] != here["num_nodes"]:
        raise UserError(
            f"The checkpoint holds {saved['num_nodes']} nodes, but the topology has {here['num_nodes']}; use the same."
        )
    there, mine = saved["layout"], here["layout"]
    if list(there.items()) != list(mine.items()):
        differing = [name for name in [*there, *mine] if there.get(name) != mine.get(name)]
        name = differing[0] if differing else next(iter(there))
        raise UserError(
            f"The checkpoint holds another network: {name} has shape {there.get(name, 'absent')} there, but "
            f"{mine.get(name, 'absent')} in model.network; use the network that it was made with."
        )


def refuse_other_data(saved: dict[str, Any], here: dict[str, Any]) -> None:
    """Raises UserError if this run's data or honest nodes are not the checkpoint's.

    Nodes might be measured on what they trained on, or Byzantine ones among the honest.
    """
    if saved["seed"] != here["seed"]:
        raise UserError(
            f"The checkpoint was made with seed {saved['seed']}, but seed_everything is {here['seed']}; use the same."
        )
    if saved["data"] != here["data"]:
        raise UserError(
            "The checkpoint was made on other data, or on data dealt otherwise, so that held-out samples may have been "
            f"trained on (fingerprint {saved['data']}, here {here['data']}); use the data section of its run."
        )
    if not torch.equal(saved["byzantine"], here["byzantine"]):
        there, mine = (found["byzantine"].nonzero()[:, 0].tolist() for found in (saved, here))
        raise UserError(
            f"The checkpoint was made with the Byzantine nodes {there}, but here they are {mine}; use the attack "
            "section of its run."
        )


def refuse_other_run(saved: dict[str, Any], here: dict[str, Any], allow_other_total: bool) -> None:
    """Raises UserError if a run that is resumed is not the run of the checkpoint: it would be neither of the two."""
    if saved["inside_round"]:
        raise UserError("The checkpoint was taken inside a round and has lost its exchange; use one of a round's end.")
    if saved["total"] != here["total"] and not allow_other_total:
        raise UserError(
            f"The checkpoint belongs to a run of {saved['total']} rounds, but trainer.max_epochs is {here['total']}, "
            "and thresholds depend on it; use the same, or set model.allow_other_total to true."
        )
    for key in ("topology", "optimizer", "aggregator", "attack"):
        there, mine = saved[key], here[key]
        for name in [*there, *mine]:
            if there.get(name) != mine.get(name):
                raise UserError(
                    f"The checkpoint was made with the {key}'s {name} {there.get(name)}, but here it is "
                    f"{mine.get(name)}; resume with the settings of its run."
                )
    if not torch.equal(saved["neighbours"], here["neighbours"]):
        raise UserError("The checkpoint was made with another topology; resume with the settings of its run.")


def describe(part: object, values: dict[str, Any] | None = None) -> dict[str, Any]:
    """The class and the plain settings of a part of a run, to recognise it by.

    Args:
        part: an aggregator, an attack, an optimizer, or None.
        values: its settings (default: attributes that are named like its constructor's arguments).

    >>> describe(torch.nn.ReLU())
    {'class': 'ReLU', 'inplace': False}
    """
    if part is None:
        return {"class": "none"}
    if values is None:
        values = {name: getattr(part, name, None) for name in settings(type(part))}
    return {"class": type(part).__name__} | {name: value for name, value in values.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float | bool | list | tuple | None)


def describe_network(make_network: Callable[[], nn.Module]) -> dict[str, Any] | None:
    """Class path and arguments of a network's builder, if it is a class or a partial of one with plain arguments."""
    arguments: dict[str, Any] = {}
    found: Any = make_network
    if isinstance(make_network, functools.partial):
        arguments = dict(make_network.keywords)
        found = next((part for part in (make_network.func, *make_network.args) if isinstance(part, type)), None)
    plain = all(_is_plain(value) for value in arguments.values())
    if not isinstance(found, type) or not plain or "<locals>" in found.__qualname__:
        return None
    return {"class_path": f"{found.__module__}.{found.__qualname__}", "init_args": arguments}


def load_node(checkpoint: str | Path, node: int, network: Callable[[], nn.Module] | None = None) -> nn.Module:
    """One node's model out of a checkpoint, as an ordinary module in evaluation mode.

    Args:
        checkpoint: path of a checkpoint.
        node: number of the node.
        network: builds the network (default: the importable class and the arguments that the checkpoint names).

    Raises:
        UserError: no such node, or the network is not known or another one.
    """
    content = read_checkpoint(checkpoint)
    saved = content["dfl_lightning"]
    if not 0 <= node < saved["num_nodes"]:
        raise UserError(f"The checkpoint has no node {node}; its nodes are 0 to {saved['num_nodes'] - 1}.")
    model = (network or _named_network(saved["network"]))()
    row = content["state_dict"]["replicas.rows"][node]
    tensors: dict[str, Any] = dict(model.named_parameters()) | dict(model.named_buffers())
    start = 0
    with torch.no_grad():
        for name, shape in saved["layout"].items():
            if name not in tensors or list(tensors[name].shape) != shape:
                raise UserError(
                    f"{type(model).__name__} is not the network of this checkpoint: {name} has shape {shape} there; "
                    "give load_node the network that it was made with."
                )
            stop = start + tensors[name].numel()
            tensors[name].copy_(row[start:stop].view(shape))
            start = stop
        for name, values in content["state_dict"]["replicas._extra_state"].items():
            tensors[name].copy_(values[node])
    return model.eval()


def _named_network(described: dict[str, Any] | None) -> Callable[[], nn.Module]:
    if described is None:
        raise UserError("The checkpoint does not name its network's class; give load_node a function that builds it.")
    module, _, name = described["class_path"].rpartition(".")
    if module.partition(".")[0] == "dfl_lightning":  # nothing else is imported because a file says so
        import_module(module)
    found = getattr(sys.modules.get(module), name, None)
    if found is None:
        raise UserError(
            f"The checkpoint's network {described['class_path']} has not been imported; import it first, or give "
            "load_node a function that builds it."
        )
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise UserError(
            f"{described['class_path']} is no torch.nn.Module, so it cannot be the network of a checkpoint."
        )
    return functools.partial(found, **described["init_args"])
