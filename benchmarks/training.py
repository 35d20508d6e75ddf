"""Time of local training inside the Trainer: ``python -m benchmarks.training --network standard --nodes 20``.

The floor is a bare PyTorch loop over the same steps: one module and one optimizer per node, and the same batches.
"""

import argparse
import logging
import warnings
from functools import partial

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks import medians, report
from benchmarks.random_data import RandomImages
from dfl_lightning import DFLModule, Ring
from dfl_lightning.data import NodeLoader
from dfl_lightning.networks import FemnistCNN


def quiet_trainer(
    max_epochs: int, *callbacks: Callback, limit_val_batches: float = 0.0, checkpoints: bool = False
) -> Trainer:
    """A Trainer that says nothing and keeps nothing; it measures the nodes if ``limit_val_batches`` is 1."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    return Trainer(
        max_epochs=max_epochs,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=checkpoints,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=limit_val_batches,
        num_sanity_val_steps=0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=["tiny", "small", "standard", "large", "xlarge"], default="standard")
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--samples", type=int, default=192, help="training samples of each node")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    make = partial(FemnistCNN, size=args.network)
    data = RandomImages(args.samples)
    module = DFLModule(make, Ring(args.nodes), lr=0.01, momentum=args.momentum)
    inside: list[float] = []

    def in_trainer() -> None:
        trainer = quiet_trainer(1)
        trainer.fit(module, data)
        inside.append(module.history.pop()["time/training"])

    networks: list[nn.Module] = [make() for _ in range(args.nodes)]

    def bare() -> None:
        assert data.nodes is not None
        optimizers = [torch.optim.SGD(network.parameters(), lr=0.01, momentum=args.momentum) for network in networks]
        for batch in NodeLoader(data.nodes.train, data.batch_size, data.local_epochs):
            for node, images, labels in batch.per_node():
                optimizers[node].zero_grad()
                cross_entropy(networks[node](images.float().div_(255)), labels).backward()
                optimizers[node].step()

    _, floor_s = medians(in_trainer, bare, repeats=args.repeats)
    report(
        sorted(inside[1:])[len(inside[1:]) // 2],
        floor_s,
        what="one local epoch of all nodes inside the Trainer",
        network=args.network,
        nodes=args.nodes,
        steps_per_node=-(-args.samples // 64),
        batch_size=64,
        momentum=args.momentum,
        threads=torch.get_num_threads(),
    )


if __name__ == "__main__":
    main()
