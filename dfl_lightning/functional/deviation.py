"""The directed deviation of Fang et al. 2020: against the direction in which honest training moves."""

import torch
from torch import Tensor

from dfl_lightning.functional.selection import krum_scores


def deviation_interval(highest: Tensor, lowest: Tensor, sign: Tensor, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    """Where the attack on the trimmed mean and the median draws its coordinates from.

    Where honest models decrease (sign -1) it is beyond their highest value, where they increase (+1) beyond their
    lowest, up to ``spread`` times as far from 0.

    Args:
        highest: coordinate-wise maximum over honest models, [c].
        lowest: likewise the minimum, [c].
        sign: the direction of the honest mean against the attacker's reference model, -1, 0 or 1, [..., c].
        spread: b in the paper, more than 1.

    Returns:
        Lower and upper ends, each [..., c], for sign -1 and +1; a coordinate of sign 0 is the caller's.

    >>> one = torch.ones(2)
    >>> deviation_interval(one, -one, torch.tensor([-1.0, 1.0]))
    (tensor([ 1., -2.]), tensor([ 2., -1.]))
    """
    falling = sign < 0
    lower = torch.where(falling, highest, torch.where(lowest > 0, lowest / spread, lowest * spread))
    upper = torch.where(falling, torch.where(highest > 0, highest * spread, highest / spread), lowest)
    return lower, upper


def krum_deviation(gram: Tensor, byzantine: int, dim: int, smallest: float = 1e-5) -> float:
    """How far the attack on Krum can go: the largest tried lambda for which Krum picks ``w_Re - lambda s``.

    It starts at the paper's upper bound and is halved until Krum, run over the honest models and f copies of the
    forged one, picks a forged one, or it is down to ``smallest``.

    Args:
        gram: inner products [h + 1, h + 1], float64, of the honest models minus the attacker's reference w_Re, and of
            the direction s, a vector of -1, 0 and 1.
        byzantine: f, the number of attackers.
        dim: d, the number of coordinates.

    Raises:
        ValueError: there is no honest model or no attacker.
    """
    h = len(gram) - 1
    if h < 1 or byzantine < 1:
        raise ValueError(f"The attack on Krum needs an honest model and an attacker, but got {h} and {byzantine}.")
    n = h + byzantine
    own, cross, length = gram.diagonal()[:h], gram[:h, h], gram[h, h]
    honest = (own[:, None] + own - 2 * gram[:h, :h]).clamp(min=0)
    nearest = honest.fill_diagonal_(0).sort(1).values[:, : 1 + max(n - byzantine - 2, 1)].sum(1).min()
    lam = float((nearest / (max(n - 2 * byzantine - 1, 1) * dim)).sqrt() + (own.max() / dim).sqrt())
    squared = gram.new_zeros(n, n)
    squared[:h, :h] = honest
    while lam > smallest:
        to_forged = own + 2 * lam * cross + lam**2 * length
        squared[:h, h:], squared[h:, :h] = to_forged[:, None], to_forged
        if int(krum_scores(squared, min(byzantine, max((n - 3) // 2, 0))).argmin()) >= h:
            break
        lam /= 2
    return lam
