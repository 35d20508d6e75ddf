"""Scores by which a rule selects vectors."""

import torch
from torch import Tensor


def krum_scores(squared: Tensor, byzantine: int) -> Tensor:
    """Krum's scores: the sum of the n - f - 2 smallest squared distances to others (Blanchard et al. 2017).

    Args:
        squared: squared distances [..., n, n].
        byzantine: f, the declared number of Byzantine vectors.

    Returns:
        [..., n]; where n - f - 2 is below 1, the nearest vector alone counts.

    >>> krum_scores(torch.tensor([[0.0, 1.0, 9.0], [1.0, 0.0, 4.0], [9.0, 4.0, 0.0]]), 0)
    tensor([1., 1., 4.])
    """
    n = squared.shape[-1]
    others = squared.masked_fill(torch.eye(n, dtype=torch.bool, device=squared.device), torch.inf)
    return others.sort(-1).values[..., : max(n - byzantine - 2, 1)].sum(-1)
