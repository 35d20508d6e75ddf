"""The geometric median by distances alone."""

from torch import Tensor


def weiszfeld(
    squared: Tensor, members: Tensor, iterations: int = 3, nu: float = 1e-6, first: Tensor | None = None
) -> Tensor:
    """Weights of the smoothed geometric median (RFA, Pillutla et al. 2019).

    Every iteration weighs each vector by the inverse of its distance to the last weighted mean z. Since the weights w
    sum to 1, that distance needs no z: ||x_i - z||^2 = (D w)_i - w' D w / 2, where D holds the squared distances.

    Args:
        squared: squared distances [n, n, ...]; further dimensions are problems of their own.
        members: bool [n, ...], which vectors take part; at least one.
        iterations: T.
        nu: the least distance that is divided by.
        first: squared distances [n, ...] to the point to start from (default: the mean).

    Returns:
        Weights [n, ...], float64, which sum to 1.

    >>> import torch
    >>> far = torch.tensor([[0.0, 0.0, 100.0], [0.0, 0.0, 100.0], [100.0, 100.0, 0.0]])
    >>> weiszfeld(far, torch.ones(3, dtype=torch.bool)).round(decimals=3)
    tensor([0.4710, 0.4710, 0.0590], dtype=torch.float64)
    """
    squared = squared.double().masked_fill(~(members[:, None] & members[None, :]), 0)
    weights = members.double() / members.sum(0)
    for iteration in range(iterations):
        if iteration == 0 and first is not None:
            to_mean = first.double().masked_fill(~members, 0)
        else:
            spread = (squared * weights).sum(1)
            to_mean = spread - (spread * weights).sum(0) / 2
        inverse = members / to_mean.clamp(min=0).sqrt().clamp(min=nu)
        weights = inverse / inverse.sum(0)
    return weights
