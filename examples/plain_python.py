"""The quickstart without the command line, and a rule on bare tensors: ``python examples/plain_python.py``."""

import torch
from lightning import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from callbacks.aggregators import SketchGuard
from callbacks.attacks import Gaussian
from callbacks.progress import RoundProgress
from datamodules import Digits
from dfl_lightning import DFLModule, ErdosRenyi, load_node
from dfl_lightning.networks import DigitsCNN


def main() -> None:
    # A run: the module holds all nodes, the Trainer's epochs are rounds, attack and rule are callbacks.
    seed_everything(1)
    module = DFLModule(network=DigitsCNN, topology=ErdosRenyi(num_nodes=10, p=0.6), lr=0.05, momentum=0.9)
    attack, rule = Gaussian(sigma=1.0, fraction=0.3), SketchGuard(sketch_size=200)
    keep = ModelCheckpoint("runs/plain_python", "last", enable_version_counter=False)
    trainer = Trainer(
        max_epochs=10, callbacks=[attack, rule, RoundProgress(), keep], logger=False, enable_model_summary=False
    )
    trainer.fit(module, Digits(batch_size=32, local_epochs=3))
    print("honest TER by round:", [round(row["ter/mean"], 3) for row in module.history])

    # One node's model, as an ordinary module.
    model = load_node("runs/plain_python/last.ckpt", node=0)
    print("node 0 says", model(torch.rand(1, 1, 8, 8)).argmax().item())

    # A rule on vectors, without a Trainer: ten rows, the last three far away.
    vectors = torch.randn(1000) + 0.1 * torch.randn(10, 1000)
    vectors[7:] *= -5
    mixed, accepted = SketchGuard(sketch_size=100)(vectors)
    print("node 0 accepts", accepted[0].nonzero()[:, 0].tolist(), "and moved by", (mixed[0] - vectors[0]).norm().item())


if __name__ == "__main__":
    main()
