"""Whom to accept: the screening that BALANCE and SketchGuard share."""

import math

import torch
from torch import Tensor

from dfl_lightning.functional.selection import ranks


def threshold_factor(gamma: float, kappa: float, index: int, total: int) -> float:
    """gamma exp(-kappa t / T), with t from 0 (SketchGuard, eq. 6, without the norm).

    >>> threshold_factor(2.0, 1.0, 0, 10)
    2.0
    """
    return gamma * math.exp(-kappa * index / total)


def screen(distances: Tensor, bounds: Tensor, candidates: Tensor, fallback: bool = True) -> Tensor:
    """Accepts candidates within each receiver's bound; who accepts nobody takes the nearest (SketchGuard, Alg. 1).

    Args:
        distances: [n, n], receiver by sender; not finite where there is nothing to compare.
        bounds: [n], one per receiver.
        candidates: bool [n, n], whom a receiver may accept; its diagonal is False.
        fallback: whether the nearest candidate is taken when nobody is within the bound. Ties, up to
            rounding: lowest index.

    Returns:
        bool [n, n].

    >>> d = torch.tensor([[0.0, 1.0, 5.0], [1.0, 0.0, 4.0], [5.0, 4.0, 0.0]])
    >>> others = ~torch.eye(3, dtype=torch.bool)
    >>> screen(d, torch.tensor([2.0, 2.0, 2.0]), others).long()
    tensor([[0, 1, 0],
            [1, 0, 0],
            [0, 1, 0]])
    """
    open_ = candidates & distances.isfinite()
    accepted = open_ & (distances <= bounds[:, None])
    if fallback:
        shut = distances.masked_fill(~open_, torch.inf)
        nearest = ranks(shut).argmin(1)
        alone = open_.any(1) & ~accepted.any(1)
        accepted[alone, nearest[alone]] = True
    return accepted
