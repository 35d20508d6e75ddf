"""Real handwritten digits that need no download: scikit-learn ships them."""

import torch
from torch import Tensor

from datamodules.spread import Partition, SpreadDataModule
from dfl_lightning.data import NodeData, NodeSplit
from dfl_lightning.errors import UserError
from dfl_lightning.seeding import generator


class Digits(SpreadDataModule):
    """1,797 real handwritten digits, 1x8x8, spread over the nodes.

    Args:
        partition: how the digits are spread: "dirichlet" (a node has more of some digits than of others) or "iid".
        beta: the Dirichlet parameter; the smaller, the more the nodes differ.
        test_share: the share of all digits that is held out before the rest is spread.
        min_samples: every node has at least so many training samples.
        batch_size: samples in one local step of a node.
        local_epochs: passes over a node's data in one round.
        max_samples: a node keeps at most so many training samples (default: all).
        evaluate_union: also measure every node on the union of all test data.
    """

    num_classes = 10
    name = "Digits"

    def __init__(
        self,
        partition: Partition = "dirichlet",
        beta: float = 1.0,
        test_share: float = 0.2,
        min_samples: int = 10,
        batch_size: int = 64,
        local_epochs: int = 1,
        max_samples: int | None = None,
        evaluate_union: bool = False,
    ) -> None:
        super().__init__(partition, beta, min_samples, batch_size, local_epochs, max_samples, evaluate_union)
        if not 0 < test_share < 1:
            raise UserError(f"data.test_share is {test_share}, but must lie between 0 and 1.")
        self.test_share = test_share

    def load(self, num_nodes: int, seed: int) -> NodeData:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.from_numpy(digits.images).mul(255 / 16).round().to(torch.uint8).unsqueeze(1)  # [1797, 1, 8, 8]
        labels = torch.from_numpy(digits.target).to(torch.int64)
        train, test = _stratified(labels, self.test_share, seed)
        train_parts = self.spread(labels[train], num_nodes, seed, "train")
        test_parts = self.spread(labels[test], num_nodes, seed, "test")
        return NodeData(
            train=NodeSplit(images, labels, [train[part] for part in train_parts]),
            test=NodeSplit(images, labels, [test[part] for part in test_parts]),
            source=f"scikit-learn digits ({len(labels)} real handwritten digits, 8x8), {self.partition} partition",
            class_names=[str(digit) for digit in range(10)],
        )


def _stratified(labels: Tensor, test_share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Rows for training and for testing, ascending; each label has the same share of its samples in the test part."""
    train, test = [], []
    for label in labels.unique().tolist():
        rows = (labels == label).nonzero().squeeze(1)
        rows = rows[torch.randperm(len(rows), generator=generator(seed, "stratified", label))]
        count = round(test_share * len(rows))
        test.append(rows[:count])
        train.append(rows[count:])
    return torch.cat(train).sort().values, torch.cat(test).sort().values
