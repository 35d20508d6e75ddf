"""Mixing weights: a matrix [n, n], receiver by sender, whose rows sum to 1."""

import torch
from torch import Tensor


def own_and_mean(accepted: Tensor, alpha: float) -> Tensor:
    """alpha for the own model, the rest shared by the accepted ones (SketchGuard, eq. 7); the own alone without any.

    >>> own_and_mean(torch.tensor([[False, True], [False, False]]), 0.5)
    tensor([[0.5000, 0.5000],
            [0.0000, 1.0000]], dtype=torch.float64)
    """
    count = accepted.sum(1)
    others = (1 - alpha) * accepted.double() / count.clamp(min=1)[:, None]
    own = torch.ones(len(count), dtype=torch.float64, device=count.device)
    return others + own.where(count == 0, alpha).diag()


def mean_of(chosen: Tensor) -> Tensor:
    """Equal weights for the chosen ones of each row; the own model alone where nobody was chosen.

    >>> mean_of(torch.tensor([[True, True], [False, False]]))
    tensor([[0.5000, 0.5000],
            [0.0000, 1.0000]], dtype=torch.float64)
    """
    chosen = chosen | ~chosen.any(1, keepdim=True) & torch.eye(len(chosen), dtype=torch.bool, device=chosen.device)
    return chosen.double() / chosen.sum(1, keepdim=True)


def uniform(links: Tensor) -> Tensor:
    """1 / (1 + |N_i|) for the own model and for every neighbour."""
    return mean_of(links | torch.eye(len(links), dtype=torch.bool, device=links.device))


def metropolis(links: Tensor) -> Tensor:
    """W_ij = 1 / (1 + max(deg_i, deg_j)) for neighbours, what is left for the own model; doubly stochastic.

    >>> metropolis(torch.tensor([[False, True], [True, False]]))
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]], dtype=torch.float64)
    """
    degree = links.sum(1)
    others = links / (1 + torch.maximum(degree[:, None], degree[None, :])).double()
    return others + (1 - others.sum(1)).diag()
