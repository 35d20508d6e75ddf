"""Random images of FEMNIST's shape, the same number for every node."""

import torch

from dfl_lightning import NodeData, NodeDataModule, NodeSplit
from dfl_lightning.seeding import generator


class RandomImages(NodeDataModule):
    """Nothing to learn, and everything to compute."""

    num_classes = 62

    def __init__(self, samples: int, batch_size: int = 64, local_epochs: int = 1) -> None:
        super().__init__(batch_size, local_epochs)
        self.samples = samples

    def load(self, num_nodes: int, seed: int) -> NodeData:
        draw = generator(seed, "images")
        count = num_nodes * self.samples
        images = torch.randint(256, (count, 1, 28, 28), dtype=torch.uint8, generator=draw)
        labels = torch.randint(62, (count,), generator=draw)
        rows = list(torch.arange(count).split(self.samples))
        few = list(torch.arange(4 * num_nodes).split(4))
        held_out = NodeSplit(images[: 4 * num_nodes].clone(), labels[: 4 * num_nodes].clone(), few)
        return NodeData(NodeSplit(images, labels, rows), held_out, "random images")
