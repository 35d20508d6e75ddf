"""What is done to training images, all images of a batch at once."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dfl_lightning.data import NodeBatch
from dfl_lightning.seeding import generator


def draw_per_node(batch: NodeBatch, choices: int, columns: int, *seed: object) -> Tensor:
    """Numbers below ``choices`` for each sample, int64 [total, columns], drawn for each node by itself."""
    drawn = [
        torch.randint(choices, (size, columns), generator=generator(*seed, node))
        for node, size in zip(batch.nodes, batch.sizes)
    ]
    return torch.cat(drawn)


def crop(images: Tensor, padding: int, offsets: Tensor) -> Tensor:
    """Cuts images of the same size out of images with a black border.

    Args:
        images: uint8 [n, C, H, W].
        padding: width of the border.
        offsets: where to cut, from the top and from the left, int64 [n, 2] from 0 to 2 * padding.
    """
    padded = F.pad(images, (padding,) * 4).numpy()
    windows = np.lib.stride_tricks.sliding_window_view(padded, images.shape[2:], axis=(2, 3))
    down, right = offsets.numpy().T
    return torch.from_numpy(windows[np.arange(len(images)), :, down, right])


def mirror_(images: Tensor, chosen: Tensor) -> Tensor:
    """Swaps left and right in those images [n, C, H, W] that are chosen, bool [n], in place."""
    images[chosen] = images[chosen].flip(3)
    return images
