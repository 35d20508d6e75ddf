"""From the images of users (writers, people) to the images of nodes."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch

from dfl_lightning.data import NodeSplit
from dfl_lightning.errors import UserError
from dfl_lightning.seeding import generator

HELD_OUT = 0.1  # the share of a user's images that is held out where the source has no split of its own


@dataclass
class UserSplit:
    """The training or the held-out images of every user.

    Attributes:
        images: uint8 [total, C, H, W]; a reader may hold the names of image files here, [total].
        labels: int64 [total].
        rows: for each user the rows that are theirs.
    """

    images: np.ndarray
    labels: np.ndarray
    rows: dict[str, np.ndarray]


@dataclass
class UserData:
    """The training and the held-out images of users; the two may be rows of the same array.

    Attributes:
        train: what may be trained on.
        test: what is held out.
        copies: how many training images were left out because they are copies of held-out ones.
    """

    train: UserSplit
    test: UserSplit
    copies: int = 0


def shuffled(users: Iterable[str], *seed: object) -> list[str]:
    """The users in an order that depends on their names and the seed, not on the files that they came from."""
    names = sorted(users)
    return [names[k] for k in torch.randperm(len(names), generator=generator(*seed)).tolist()]


def hold_out(samples: UserSplit, seed: int) -> UserData:
    """Splits each user's images 0.9 / 0.1; who has two or more images has at least one on either side."""
    train: dict[str, np.ndarray] = {}
    test: dict[str, np.ndarray] = {}
    for user, rows in samples.rows.items():
        order = rows[torch.randperm(len(rows), generator=generator(seed, "hold out", user)).numpy()]
        count = max(1, round(HELD_OUT * len(rows))) if len(rows) > 1 else 0
        train[user] = np.sort(order[count:])
        if count:
            test[user] = np.sort(order[:count])
    return UserData(replace(samples, rows=train), replace(samples, rows=test))


def drop_copies(data: UserData) -> UserData:
    """Leaves training images out that are copies of a held-out image of any user.

    LEAF's FEMNIST holds some images twice, and its split may put one copy on either side. The held-out images stay as
    they are published. A user who would have nothing left to train on is left alone: such data is made up.
    """
    train = dict(data.train.rows)
    held_out = {data.test.images[row].tobytes() for rows in data.test.rows.values() for row in rows}
    copies = 0
    for user in train:
        kept = [row for row in train[user] if data.train.images[row].tobytes() not in held_out]
        if kept:
            copies += len(train[user]) - len(kept)
            train[user] = np.array(kept, dtype=np.int64)
    return UserData(replace(data.train, rows=train), data.test, copies)


def deal(
    data: UserData, num_nodes: int, users_per_node: int | None, seed: int
) -> tuple[NodeSplit, NodeSplit, list[list[str]]]:
    """Deals shuffled users to nodes round-robin, all of them or ``users_per_node`` each.

    A node is measured on the held-out images of its own users. Users who have held-out images only are dealt on their
    own; where there are too few of them, a node that would have nothing to be measured on shares one with others.

    Returns:
        the training split, the held-out split, and each node's users.

    Raises:
        UserError: there are too few users.
    """
    order = shuffled(data.train.rows, seed, "deal")
    needed = num_nodes * (users_per_node or 1)
    if needed > len(order):
        each = f" with {users_per_node} users each" if users_per_node else ""
        raise UserError(
            f"{num_nodes} nodes{each} need at least {needed} users, but the data has {len(order)}; "
            "use fewer nodes, fewer users per node or more data."
        )
    # Who has nothing held out comes last, so that each node's first user is one on whom it can be measured.
    order.sort(key=lambda user: user not in data.test.rows)
    if users_per_node:
        order = order[:needed]
    users = [order[node::num_nodes] for node in range(num_nodes)]
    alone = shuffled(data.test.rows.keys() - data.train.rows.keys(), seed, "deal held-out")
    measured = [[user for user in mine if user in data.test.rows] + alone[k::num_nodes] for k, mine in enumerate(users)]
    for node, mine in enumerate(measured):
        if not mine and not alone:
            raise UserError(
                f"Node {node} would have no held-out images, because only {len(data.test.rows)} of the "
                f"{len(data.train.rows)} users have any; use at most {len(data.test.rows)} nodes or more data."
            )
        if not mine:
            mine.append(alone[node % len(alone)])
    return _gather(data.train, users), _gather(data.test, measured), users


def _gather(split: UserSplit, users: list[list[str]]) -> NodeSplit:
    indices = [torch.from_numpy(np.concatenate([split.rows[user] for user in mine])) for mine in users]
    return NodeSplit(torch.from_numpy(split.images), torch.from_numpy(split.labels), indices)
