"""Statistics of every coordinate by itself."""

import torch
from torch import Tensor

from dfl_lightning.functional.sorting import ascending


def median(vectors: Tensor) -> Tensor:
    """The coordinate-wise median of vectors [n, ...]; of an even number, the mean of the two middle values.

    >>> median(torch.tensor([[1.0], [5.0], [2.0], [9.0]]))
    tensor([3.5000])
    """
    n = len(vectors)
    middle = ascending(vectors, (n - 1) // 2, n // 2 + 1)
    return (middle[0] + middle[-1]) / 2


def trimmed_mean(vectors: Tensor, trimmed: int) -> Tensor:
    """The mean of every coordinate without its ``trimmed`` largest and smallest values (Yin et al. 2018).

    Args:
        vectors: [n, ...].
        trimmed: b, less than n / 2.

    >>> trimmed_mean(torch.tensor([[1.0], [5.0], [2.0], [90.0]]), 1)
    tensor([3.5000])
    """
    kept = ascending(vectors, trimmed, len(vectors) - trimmed)
    return torch.stack(kept).mean(0)


def mean_around_median(ranked: list[Tensor], count: int) -> Tensor:
    """The mean of the ``count`` values of every coordinate that are nearest to its median (Bulyan's last step).

    In ascending order these lie side by side: the window moves up as long as the value that enters is nearer than the
    one that leaves. Of two equally near values the lower one is taken.

    Args:
        ranked: n tensors [...], ascending in every coordinate.
        count: beta, from 1 to n.

    >>> mean_around_median([torch.tensor(value) for value in (0.0, 1.0, 2.0, 9.0)], 3)
    tensor(1.)
    """
    n = len(ranked)
    middle = (ranked[(n - 1) // 2] + ranked[n // 2]) / 2
    moves: list[Tensor] = []  # whether the window leaves the k-th value behind
    for first in range(n - count):
        nearer = ranked[first + count] - middle < middle - ranked[first]
        moves.append(nearer & moves[-1] if moves else nearer)
    total = torch.zeros_like(middle)
    for place, value in enumerate(ranked):
        if place < n - count:
            value = value.masked_fill(moves[place], 0)
        if place >= count:
            value = value.masked_fill(~moves[place - count], 0)
        total += value
    return total / count
