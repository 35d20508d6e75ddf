"""How far a forged vector can go and still look like an honest one."""

from typing import Literal

import torch
from torch import Tensor

Bound = Literal["max_distance", "max_sum", "min_sum"]


def alie_z(nodes: int, byzantine: int) -> float:
    """How many standard deviations "A little is enough" may deviate: the quantile at which enough honest ones agree.

    z = PhiInv((n - f - s) / (n - f)) with s = floor(n / 2) + 1 - f honest nodes to be won over, at least one (Baruch et
    al. 2019). It is 0 or less where f is small: a majority then needs honest nodes on the far side of the mean.

    >>> round(alie_z(50, 10), 4)
    0.2533
    """
    needed = max(nodes // 2 + 1 - byzantine, 1)
    honest = nodes - byzantine
    share = (honest - needed) / honest  # 0 with a single honest node, whose quantile is -infinity
    return float(torch.special.ndtri(torch.tensor(share, dtype=torch.float64))) if share > 0 else 0.0


def largest_deviation(gram: Tensor, bound: Bound, first: float = 10.0, tolerance: float = 1e-5) -> float:
    """The largest gamma for which mean - gamma * deviation stays within what honest vectors do among themselves.

    Min-Max (``max_distance``): its largest distance to an honest vector is at most the largest distance between two of
    them. Min-Sum: the sum of its squared distances is at most the largest such sum of an honest one (``max_sum``, the
    paper's), or the smallest (``min_sum``, the authors' code). All these are quadratic in gamma, so the authors' search
    by halving steps (Shejwalkar and Houmansadr 2021), which stays below twice ``first``, needs inner products only.

    Args:
        gram: inner products [h + 1, h + 1], float64, of the honest vectors minus their mean, and of the deviation.
        bound: which bound.
        first: gamma to start from.
        tolerance: how near to the largest one.

    >>> vectors = torch.tensor([[-1.0], [1.0], [1.0]], dtype=torch.float64)
    >>> round(largest_deviation(vectors @ vectors.T, "max_distance"), 3)
    1.0
    """
    own, cross, length = gram.diagonal()[:-1], gram[:-1, -1], gram[-1, -1]
    squared = (own[:, None] + own - 2 * gram[:-1, :-1]).clamp(min=0)
    sums = squared.sum(1)
    limit = {"max_distance": squared.max(), "max_sum": sums.max(), "min_sum": sums.min()}[bound]

    def holds(gamma: float) -> bool:
        to_honest = own + 2 * gamma * cross + gamma**2 * length  # ||mean - gamma v - x||^2, with x - mean in the Gram
        return bool((to_honest.max() if bound == "max_distance" else to_honest.sum()) <= limit)

    good, gamma, step = 0.0, first, first
    while abs(good - gamma) > tolerance:
        if holds(gamma):
            good, gamma = gamma, gamma + step / 2
        else:
            gamma -= step / 2
        step /= 2
    return good
