"""Scores by which a rule selects vectors, and selection by scores."""

import itertools

import torch
from torch import Tensor

from dfl_lightning.functional.sorting import ascending

TIE = 1e-5  # scores that differ by less, relatively, differ by rounding


def krum_scores(squared: Tensor, byzantine: int | Tensor, members: Tensor | None = None) -> Tensor:
    """Krum's scores: the sum of the n - f - 2 smallest squared distances to others (Blanchard et al. 2017).

    Further dimensions are problems of their own: neighbourhoods, or groups of coordinates.

    Args:
        squared: squared distances [n, n, ...], zero on the diagonal.
        byzantine: f, the declared number of Byzantine vectors, one or [...].
        members: bool [n, ...], which vectors take part (default: all).

    Returns:
        [n, ...]; where n - f - 2 is below 1, the nearest vector alone counts. Infinite for those that take no part.

    >>> krum_scores(torch.tensor([[0.0, 1.0, 9.0], [1.0, 0.0, 4.0], [9.0, 4.0, 0.0]]), 0)
    tensor([1., 1., 4.])
    """
    n = len(squared)
    if n == 1:
        return squared.new_zeros(squared.shape[1:])
    if members is None:
        few = max(min(n - int(byzantine) - 2, n - 1), 1)
        return sum(ascending(squared, 1, few + 1), torch.zeros_like(squared[0]))  # the lowest is the own one, 0
    others = ~torch.eye(n, dtype=torch.bool, device=squared.device).view(n, n, *[1] * (squared.dim() - 2))
    ranked = ascending(squared.masked_fill(~(others & members[:, None]), torch.inf), 0, n - 1)
    count = members.sum(0)
    nearest = torch.minimum((count - byzantine - 2).clamp(min=1), count - 1)  # nobody else: 0
    scores = torch.zeros_like(squared[0])
    for place, values in enumerate(ranked):
        scores += values.masked_fill(nearest <= place, 0)
    return scores.masked_fill(~members, torch.inf)


def ranks(scores: Tensor, dim: int = -1) -> Tensor:
    """The place of every score in ascending order along a dimension; among equal ones, up to rounding, lowest first.

    >>> ranks(torch.tensor([3.0, 1.0, 3.0, 0.5]))
    tensor([2, 1, 3, 0])
    """
    scores = scores.movedim(dim, -1)
    values, order = scores.sort(dim=-1, stable=True)
    jumps = values[..., 1:] > values[..., :-1] + TIE * values[..., :-1].abs()
    level = torch.nn.functional.pad(jumps.cumsum(-1), (1, 0))
    levels = torch.empty_like(level).scatter_(-1, order, level)
    return levels.argsort(dim=-1, stable=True).argsort(dim=-1).movedim(-1, dim)


def lowest(scores: Tensor, count: int) -> Tensor:
    """Which of scores [n, ...] are the ``count`` lowest along the first dimension, bool; of equal ones the first.

    As ``ranks(scores, 0) < count``, for few scores of many problems: a few passes over whole rows.

    >>> lowest(torch.tensor([3.0, 1.0, 3.0, 0.5]), 3)
    tensor([ True,  True, False,  True])
    """
    limit = ascending(scores, count - 1, count)[0]
    limit = limit + TIE * limit.abs()
    below = scores <= limit  # too many where several are equal to the last one
    slack = count - (scores < limit - 2 * TIE * limit.abs()).sum(0)
    equal = below & ~(scores < limit - 2 * TIE * limit.abs())
    return below & (~equal | (equal.cumsum(0) <= slack))


def krum_in_turn(squared: Tensor, byzantine: int, count: int) -> Tensor:
    """Which vectors Krum picks if it runs ``count`` times on those that are left, bool [n, ...] (Bulyan's selection).

    Distances are sorted once; of the vector that is picked they are then deleted, which moves the later ones up. In the
    last steps, where n - f - 2 is below 1, the nearest vector alone counts.

    Args:
        squared: squared distances [n, n, ...], exactly symmetric, zero on the diagonal; further dimensions are problems
            of their own.
        byzantine: f.
        count: how many to pick, from 1 to n.

    >>> krum_in_turn(torch.tensor([[0.0, 1.0, 9.0], [1.0, 0.0, 4.0], [9.0, 4.0, 0.0]]), 0, 2)
    tensor([ True,  True, False])
    """
    n, finite = len(squared), torch.finfo(squared.dtype).max / 2
    places = torch.arange(n, device=squared.device, dtype=squared.dtype).view(n, *[1] * (squared.dim() - 2))
    nearest = ascending(squared, 1, 1 + min(n - 1, max(n - byzantine - 2, count)))  # the lowest is the own one, 0
    taken, behind = torch.zeros_like(squared[0]), torch.empty_like(squared[0])
    for left in range(n, n - count, -1):
        scores = torch.zeros_like(taken)
        for distances in nearest[: max(left - byzantine - 2, 1)]:  # none for the last one left
            scores += distances
        scores.clamp_(max=finite).add_(taken)
        torch.gt(scores, scores.amin(0) * (1 + TIE), out=behind)  # as numbers, which is faster than a mask
        picked = behind.mul_(n).add_(places).amin(0, keepdim=True).long()
        taken.scatter_(0, picked, torch.inf)
        gone = squared.gather(0, picked[None].expand(1, n, *picked.shape[1:]))[0]
        nearest = [_without(gone, low, high) for low, high in itertools.pairwise(nearest)]
    return taken > 0


def _without(gone: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Of two neighbours in an ascending list the one that takes the lower's place once ``gone`` is deleted.

    It is the one of the two that is farther from ``gone``, which is one of the list's numbers; the exclusive or gives
    it to the bit, in a third of the time of a choice by a mask.
    """
    near = torch.minimum(torch.maximum(gone, low), high)
    bits = torch.int32 if near.dtype == torch.float32 else torch.int64
    return (low.view(bits) ^ high.view(bits)).bitwise_xor_(near.view(bits)).view(near.dtype)


def smallest_diameter(squared: Tensor, keep: int) -> Tensor:
    """The ``keep`` vectors whose largest distance to each other is smallest (minimum diameter averaging, MDA).

    Exact: distances are tried in ascending order (by bisection), and whether enough vectors lie within one of each
    other is a maximum-clique question, which networkx answers. Of several such sets one is taken, always the same.

    Args:
        squared: squared distances [n, n].
        keep: how many vectors, from 1 to n.

    Returns:
        Ascending indices, long [keep].

    >>> smallest_diameter(torch.tensor([[0.0, 1.0, 9.0], [1.0, 0.0, 4.0], [9.0, 4.0, 0.0]]), 2)
    tensor([0, 1])
    """
    import networkx as nx

    def clique(diameter: Tensor) -> list[int]:
        graph = nx.from_numpy_array((squared <= diameter).fill_diagonal_(False).cpu().numpy())
        return sorted(nx.max_weight_clique(graph, weight=None)[0])

    diameters = squared.unique()  # ascending; the first is 0
    low, high = -1, len(diameters) - 1
    best = clique(diameters[high])
    while high - low > 1:
        middle = (low + high) // 2
        found = clique(diameters[middle])
        low, high, best = (low, middle, found) if len(found) >= keep else (middle, high, best)
    return torch.tensor(best[:keep])


def largest_gap(distances: Tensor, ratio: float) -> Tensor:
    """The distance below the largest ratio between successive distances, where that ratio exceeds ``ratio``.

    Args:
        distances: [m, n]; infinite where there is none.
        ratio: what the largest ratio must exceed.

    Returns:
        [m]; infinite where there is no such gap.

    >>> largest_gap(torch.tensor([[1.0, 1.2, 5.0, 5.5], [1.0, 1.1, 1.2, torch.inf]]), 1.5)
    tensor([1.2000,    inf])
    """
    ranked = distances.sort(1).values
    if ranked.shape[1] < 2:
        return ranked.new_full((len(ranked),), torch.inf)
    ratios = (ranked[:, 1:] / ranked[:, :-1]).masked_fill(~((ranked[:, :-1] > 0) & ranked[:, 1:].isfinite()), 0)
    widest, place = ratios.max(1)
    return ranked.gather(1, place[:, None])[:, 0].masked_fill(widest <= ratio, torch.inf)
