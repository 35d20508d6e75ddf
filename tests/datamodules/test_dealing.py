import numpy as np
import pytest

from datamodules.dealing import UserData, UserSplit, deal, drop_copies, hold_out
from dfl_lightning.errors import UserError


def split(counts: dict[str, int], first_value: int = 0) -> UserSplit:
    """Users with so many images, all of them different; labels are the users' numbers."""
    total = sum(counts.values())
    images = np.arange(first_value, first_value + total, dtype=np.uint8).reshape(-1, 1, 1, 1)
    bounds = np.cumsum([0, *counts.values()])
    rows = {user: np.arange(bounds[k], bounds[k + 1]) for k, user in enumerate(counts)}
    return UserSplit(images, np.repeat(np.arange(len(counts)), list(counts.values())), rows)


def people(count: int) -> UserData:
    names = [f"user_{k}" for k in range(count)]
    return UserData(split(dict.fromkeys(names, 4)), split(dict.fromkeys(names, 2), 100))


@pytest.mark.parametrize(("num_nodes", "each", "sizes"), [(4, None, [3, 3, 2, 2]), (4, 2, [2] * 4), (10, 1, [1] * 10)])
def test_users_are_dealt_out_whole_and_once(num_nodes: int, each: int | None, sizes: list[int]) -> None:
    train, test, users = deal(people(10), num_nodes, each, seed=1)
    assert [len(mine) for mine in users] == sizes
    dealt = [user for mine in users for user in mine]
    assert len(set(dealt)) == len(dealt)
    for node, mine in enumerate(users):
        owners = {int(user.removeprefix("user_")) for user in mine}
        assert set(train.labels[train.indices[node]].tolist()) == owners
        assert set(test.labels[test.indices[node]].tolist()) == owners
        assert len(train.indices[node]) == 4 * len(mine)


def test_the_deal_depends_on_the_seed_alone() -> None:
    assert deal(people(10), 3, None, 1)[2] == deal(people(10), 3, None, 1)[2]
    assert deal(people(10), 3, None, 1)[2] != deal(people(10), 3, None, 2)[2]


@pytest.mark.parametrize(("num_nodes", "each"), [(11, None), (11, 1), (4, 3)])
def test_too_few_users_is_an_error_with_both_numbers(num_nodes: int, each: int | None) -> None:
    with pytest.raises(UserError, match=f"{num_nodes * (each or 1)} users, but the data has 10"):
        deal(people(10), num_nodes, each, 0)


def test_users_who_are_only_held_out_are_dealt_on_their_own() -> None:
    data = UserData(split({"a": 3, "b": 3, "c": 3}), split({"x": 2, "y": 2, "z": 2}, 100))
    _, test, users = deal(data, 3, None, 0)
    assert sorted(user for mine in users for user in mine) == ["a", "b", "c"]
    assert sorted(row for rows in test.indices for row in rows.tolist()) == list(range(6))
    assert all(len(rows) == 2 for rows in test.indices)


def test_nodes_share_held_out_users_where_there_are_too_few() -> None:
    data = UserData(split({"a": 3, "b": 3, "c": 3}), split({"x": 2}, 100))
    _, test, _ = deal(data, 3, None, 0)
    assert [rows.tolist() for rows in test.indices] == [[0, 1]] * 3


def test_every_node_is_measured_as_long_as_enough_users_have_held_out_images() -> None:
    data = hold_out(split({**{f"lonely_{k}": 1 for k in range(5)}, "a": 4, "b": 4}), 0)
    for seed in range(5):
        _, test, _ = deal(data, 2, 1, seed)
        assert all(len(rows) for rows in test.indices)
    with pytest.raises(UserError, match="no held-out images, because only 2 of the 7 users"):
        deal(data, 3, 1, 0)


def test_copies_of_held_out_images_are_not_trained_on() -> None:
    train, test = split({"a": 3, "b": 3, "c": 1}), split({"a": 1, "b": 1, "c": 1}, 100)
    test.images[0] = train.images[1]
    test.images[2] = train.images[6]
    data = drop_copies(UserData(train, test))
    assert data.copies == 1
    assert data.train.rows["a"].tolist() == [0, 2]
    assert data.train.rows["b"].tolist() == [3, 4, 5]
    assert data.train.rows["c"].tolist() == [6]  # else c would have nothing to train on
