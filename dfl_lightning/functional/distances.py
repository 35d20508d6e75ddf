"""Distances between all rows of a matrix, exact where models are close and one of them is huge."""

import torch
from torch import Tensor

LIMIT = torch.finfo(torch.float32).max  # a row whose squares sum up to more counts as not finite

ROUNDING = 8  # equal rows come out at a squared distance of up to half as many units in the last place, not at 0

SLICES = 4  # the Gram product is cut into a fixed number of column slices, so that its bits do not depend on threads


def squared_distances(rows: Tensor, sane: int | None = None) -> Tensor:
    """Squared Euclidean distances between all rows, and their squared norms.

    A float32 Gram matrix cancels when rows are close to each other and far from the origin, and loses everything
    beside one huge row. So the rows are centred on the row of median norm among the first ``sane`` ones, which an
    attacker does not choose.

    Args:
        rows: Tensor [m, c].
        sane: how many leading rows nobody forged (default: all).

    Returns:
        Tensor [m, m + 1], float64: the squared distances, then a column of squared norms. Exactly symmetric, zero on
        the diagonal; what belongs to a row that is not finite is not finite either.

    >>> squared_distances(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
    tensor([[ 0., 25.,  0.],
            [25.,  0., 25.]], dtype=torch.float64)
    """
    norms = rows.square().sum(1, dtype=torch.float64)
    m, c = rows.shape
    own = norms[: sane or m]
    order = own.where(own <= LIMIT, torch.inf).argsort(stable=True)
    centred = rows - rows[order[(int((own <= LIMIT).sum()) - 1) // 2]]
    centred = torch.nn.functional.pad(centred, (0, -c % SLICES)).view(m, SLICES, -1).transpose(0, 1)
    gram = torch.bmm(centred, centred.transpose(1, 2)).sum(0, dtype=torch.float64)
    diagonal = gram.diagonal()
    lengths = diagonal[:, None] + diagonal
    squared = lengths - 2 * gram
    squared = squared.masked_fill(squared < ROUNDING * torch.finfo(rows.dtype).eps * lengths, 0).triu(1)
    return torch.cat([squared + squared.T, norms[:, None]], 1)
