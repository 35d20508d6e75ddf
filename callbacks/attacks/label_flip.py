"""Training on wrong labels."""

from typing import Any

import torch

from dfl_lightning.phases import Attack
from dfl_lightning.round import Round


class LabelFlip(Attack):
    """Byzantine nodes train on the label C - 1 - y in place of y, and send what they have learnt.

    Knows nothing about the others, and forges nothing.
    """

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        sizes = torch.tensor(batch.sizes, dtype=torch.long)
        flipped = pl_module.byzantine_here[batch.nodes].repeat_interleave(sizes).to(batch.labels.device)
        batch.labels = torch.where(flipped, trainer.datamodule.num_classes - 1 - batch.labels, batch.labels)

    def attack(self, round: Round) -> None:
        pass
