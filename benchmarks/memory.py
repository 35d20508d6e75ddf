"""Peak memory of a whole run, checkpoints included: ``python -m benchmarks.memory --network standard --nodes 20``.

The floor is what must be there: the replicas, the momentum rows, the rows of the round's start if the attack needs
them, one node's gradients, and the data. Both are counted beyond the process after its imports.
"""

import argparse
import json
import resource
import tempfile
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from benchmarks.random_data import RandomImages
from benchmarks.training import quiet_trainer
from callbacks.aggregators import SketchGuard
from callbacks.attacks import DirectedDeviation, Gaussian, ScaledModel
from dfl_lightning import Attack, DFLModule, ErdosRenyi
from dfl_lightning.networks import FemnistCNN

ATTACKS: dict[str, type[Attack]] = {
    "scaled": ScaledModel,
    "gaussian": Gaussian,
    "directed_deviation": DirectedDeviation,
}


def resident() -> int:
    """Bytes of this process that are in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=["tiny", "small", "standard", "large", "xlarge"], default="standard")
    parser.add_argument("--attack", choices=ATTACKS, default="scaled")
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--samples", type=int, default=128, help="training samples of each node")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    before = resident()
    module = DFLModule(
        partial(FemnistCNN, size=args.network), ErdosRenyi(args.nodes, 0.45), lr=0.01, momentum=args.momentum
    )
    data = RandomImages(args.samples)
    attack = ATTACKS[args.attack](fraction=0.5)
    with tempfile.TemporaryDirectory() as folder:
        keep = ModelCheckpoint(folder, "last", enable_version_counter=False)
        trainer = quiet_trainer(args.rounds, attack, SketchGuard(), keep, limit_val_batches=1.0, checkpoints=True)
        trainer.fit(module, data)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    assert data.nodes is not None
    row = module.replicas.rows[0].nbytes
    rows = args.nodes * (1 + (args.momentum > 0) + attack.needs_start) + 1
    floor = rows * row + data.nodes.train.images.nbytes + data.nodes.test.images.nbytes
    print(
        json.dumps(
            {
                "memory_mib": peak >> 20,
                "floor_mib": floor >> 20,
                "beyond_floor_mib": (peak - floor) >> 20,
                "ratio": round(peak / floor, 3),
                "what": "peak memory of a run, beyond imports",
                "network": args.network,
                "attack": args.attack,
                "nodes": args.nodes,
                "momentum": args.momentum,
                "threads": torch.get_num_threads(),
            }
        )
    )


if __name__ == "__main__":
    main()
