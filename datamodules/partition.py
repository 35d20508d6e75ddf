"""Spreads a labelled data set without users over nodes."""

import numpy as np
import torch
from torch import Tensor

from dfl_lightning.errors import UserError
from dfl_lightning.seeding import derive_seed, generator


def check_beta(beta: float, setting: str = "beta") -> None:
    """Raises UserError unless there is a Dirichlet distribution with this parameter."""
    if not 0 < beta < float("inf"):
        raise UserError(f"{setting} is {beta}, but must be a number above 0.")


def iid_partition(labels: Tensor, num_nodes: int, seed: int, minimum: int = 1) -> list[Tensor]:
    """Shuffles the samples and cuts them into parts that differ by at most one sample.

    Args:
        labels: int64 [total].
        num_nodes: how many parts.
        seed: the same seed gives the same parts.
        minimum: the least number of samples of a node.

    Returns:
        for each node the rows that it holds, ascending.
    """
    _check_enough(len(labels), num_nodes, minimum)
    order = torch.randperm(len(labels), generator=generator(seed, "iid"))
    return [part.sort().values for part in order.tensor_split(num_nodes)]


def dirichlet_shares(num_classes: int, num_nodes: int, beta: float, seed: int) -> np.ndarray:
    """For each label y how its samples are shared out: p^y ~ Dir_n(beta), float64 [num_classes, num_nodes].

    Small beta: a label sits on few nodes; large beta: the shares become equal. The shares are those of Li, Diao, Chen
    and He, "Federated Learning on Non-IID Data Silos" (2022).

    Raises:
        UserError: beta is not a number above 0.
    """
    check_beta(beta)
    random = np.random.default_rng(derive_seed(seed, "dirichlet"))
    # From 1e12 on the shares are equal to six digits; near the largest number their sum would overflow.
    shares = random.dirichlet(np.full(num_nodes, min(beta, 1e12)), size=num_classes)
    # For a very small beta all of a draw can underflow to 0; its limit is that one node holds the label.
    empty = np.flatnonzero(~(np.abs(shares.sum(1) - 1) < 1e-6))
    shares[empty] = np.eye(num_nodes)[random.integers(num_nodes, size=len(empty))]
    return shares


def partition_by_shares(labels: Tensor, shares: np.ndarray, seed: int, minimum: int = 1) -> list[Tensor]:
    """Gives node i the share ``shares[y, i]`` of the samples with label y.

    A node below ``minimum`` is then filled up from the node that has most of the label that it has the largest share
    of, so this ends after at most num_nodes * minimum moves, where drawing new shares until they fit might not end.

    Args:
        labels: int64 [total].
        shares: [num_classes, num_nodes], each row sums to 1.
        seed: the same seed gives the same parts.
        minimum: the least number of samples of a node.

    Returns:
        for each node the rows that it holds, ascending.

    Raises:
        UserError: there are too few samples.
    """
    num_classes, num_nodes = shares.shape
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise ValueError(f"Labels must lie between 0 and {num_classes - 1}, since there are shares of so many labels.")
    _check_enough(len(labels), num_nodes, minimum)
    held: list[list[list[int]]] = []  # [label][node] -> rows
    for label in range(num_classes):
        rows = (labels == label).nonzero().squeeze(1)
        rows = rows[torch.randperm(len(rows), generator=generator(seed, "shares", label))]
        cuts = np.rint(np.cumsum(shares[label])[:-1] * len(rows)).astype(np.int64)
        held.append([part.tolist() for part in rows.tensor_split(torch.from_numpy(cuts))])
    _fill_up(held, shares, minimum)
    return [
        torch.tensor(sorted(row for label in range(num_classes) for row in held[label][node]), dtype=torch.int64)
        for node in range(num_nodes)
    ]


def dirichlet_partition(labels: Tensor, num_nodes: int, beta: float, seed: int, minimum: int = 1) -> list[Tensor]:
    """:func:`partition_by_shares` with :func:`dirichlet_shares`."""
    num_classes = int(labels.max()) + 1 if len(labels) else 1
    return partition_by_shares(labels, dirichlet_shares(num_classes, num_nodes, beta, seed), seed, minimum)


def _fill_up(held: list[list[list[int]]], shares: np.ndarray, minimum: int) -> None:
    num_nodes = shares.shape[1]
    sizes = [sum(len(parts[node]) for parts in held) for node in range(num_nodes)]
    for node in range(num_nodes):
        favourites = np.argsort(-shares[:, node], kind="stable").tolist()
        while sizes[node] < minimum:
            rich = [other for other in range(num_nodes) if sizes[other] > minimum]
            label = next(label for label in favourites if any(held[label][other] for other in rich))
            giver = max(rich, key=lambda other: len(held[label][other]))
            held[label][node].append(held[label][giver].pop())
            sizes[giver] -= 1
            sizes[node] += 1


def _check_enough(samples: int, num_nodes: int, minimum: int) -> None:
    if samples < num_nodes * minimum:
        raise UserError(
            f"{num_nodes} nodes with at least {minimum} samples each need {num_nodes * minimum} samples, "
            f"but there are {samples}; use fewer nodes or a smaller minimum."
        )
