"""Dividing the coordinates of a model into groups."""

from typing import Literal

import torch
from torch import Tensor

Split = Literal["balanced", "chunk", "layer"]


def split_coordinates(order: Tensor, groups: int, how: Split, layers: list[int]) -> list[Tensor]:
    """The groups, those of equal size together: tensors [g, m] of g groups with m coordinates each.

    Args:
        order: long [d], a random order of the coordinates.
        groups: p, from 1 to d.
        how: ``balanced``: exactly p groups whose sizes differ by at most one; ``chunk``: ceil(d / p) to a group, which
            may give fewer than p; ``layer``: the tensors of the model, in place of p random groups.
        layers: how many coordinates each of them has.

    >>> [part.shape for part in split_coordinates(torch.arange(7), 3, "balanced", [7])]
    [torch.Size([1, 3]), torch.Size([2, 2])]
    >>> [part.shape for part in split_coordinates(torch.arange(7), 3, "chunk", [7])]
    [torch.Size([2, 3]), torch.Size([1, 1])]
    """
    dim = len(order)
    if how == "layer":
        return [part[None] for part in torch.arange(dim).split(layers)]
    if how == "chunk":
        size = -(-dim // groups)
        whole = dim - dim % size
        parts = [order[:whole].view(-1, size), order[whole:][None]]
    else:
        more = dim % groups
        wide = more * (dim // groups + 1)
        parts = [order[:wide].view(more, -1) if more else order[:0][None], order[wide:].view(groups - more, -1)]
    return [part for part in parts if part.numel()]
