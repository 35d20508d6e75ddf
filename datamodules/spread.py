"""What the data sets without users share: their samples are spread over the nodes."""

from typing import Literal

from torch import Tensor

from datamodules.partition import check_beta, dirichlet_shares, iid_partition, partition_by_shares
from dfl_lightning.data import NodeDataModule
from dfl_lightning.errors import UserError
from dfl_lightning.seeding import derive_seed

Partition = Literal["dirichlet", "iid"]


class SpreadDataModule(NodeDataModule):
    """Base of the data sets whose samples belong to nobody. A subclass says its name and loads the samples.

    Args:
        partition: how the samples are spread: "dirichlet" (a node has more of some labels than of others) or "iid".
        beta: the Dirichlet parameter; the smaller, the more the nodes differ.
        min_samples: every node has at least so many training samples.
        batch_size: samples in one local step of a node.
        local_epochs: passes over a node's data in one round.
        max_samples: a node keeps at most so many training samples (default: all).
        evaluate_union: also measure every node on the union of all test data.
    """

    name: str

    def __init__(
        self,
        partition: Partition = "dirichlet",
        beta: float = 0.5,
        min_samples: int = 10,
        batch_size: int = 64,
        local_epochs: int = 1,
        max_samples: int | None = None,
        evaluate_union: bool = False,
    ) -> None:
        super().__init__(batch_size, local_epochs, max_samples, evaluate_union)
        if partition not in ("dirichlet", "iid"):
            raise UserError(f"data.partition is '{partition}', but must be 'dirichlet' or 'iid'.")
        check_beta(beta, "data.beta")
        if min_samples < 1:
            raise UserError(f"data.min_samples is {min_samples}, but must be at least 1.")
        self.partition, self.beta, self.min_samples = partition, beta, min_samples

    def spread(self, labels: Tensor, num_nodes: int, seed: int, split: Literal["train", "test"]) -> list[Tensor]:
        """For each node which of the samples it holds, ascending; a node has at least one sample to be measured on."""
        minimum = self.min_samples if split == "train" else 1
        part_seed = derive_seed(seed, self.name.lower(), split)
        if self.partition == "iid":
            return iid_partition(labels, num_nodes, part_seed, minimum)
        # The same shares for both splits: a node is measured on the mix of labels that it trains on.
        shares = dirichlet_shares(self.num_classes, num_nodes, self.beta, seed)
        return partition_by_shares(labels, shares, part_seed, minimum)
