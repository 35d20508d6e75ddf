import inspect
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from datamodules import FEMNIST, CelebA, Digits
from dfl_lightning.data import NodeData
from dfl_lightning.errors import UserError


def images_of(data: NodeData, split: str) -> list[set[bytes]]:
    part = getattr(data, split)
    return [{part.images[row].numpy().tobytes() for row in rows} for rows in part.indices]


def test_real_writers_become_nodes(femnist_sample: Path) -> None:
    data = FEMNIST(str(femnist_sample)).load(20, seed=1)
    assert data.warning is None
    assert "LEAF files in" in data.source
    assert sum(len(rows) for rows in data.test.indices) == 829
    assert sum(len(rows) for rows in data.train.indices) == 7236 - 13
    assert sorted(len(mine) for mine in data.users) == [2] * 9 + [3] * 11
    for train, test in zip(images_of(data, "train"), images_of(data, "test")):
        assert not train & test
    assert data.class_names[0] == "0"
    assert data.class_names[10] == "A"
    assert data.class_names[36] == "a"
    assert len(data.class_names) == FEMNIST.num_classes


@pytest.fixture
def ten_writers(tmp_path: Path, write_leaf: Callable, characters: Callable) -> Path:
    for split, count in (("train", 6), ("test", 2)):
        users = {f"writer_{k}": characters(count, 100 * count + k) for k in range(10)}
        write_leaf(tmp_path / "leaf_femnist" / split / "a.json", users)
    return tmp_path


def test_the_same_seed_gives_the_same_nodes(ten_writers: Path) -> None:
    module = FEMNIST(str(ten_writers / "leaf_femnist"), users_per_node=1)
    first, again, other = module.load(8, 1), module.load(8, 1), module.load(8, 2)
    assert first.fingerprint() == again.fingerprint()
    assert first.fingerprint() != other.fingerprint()
    assert [len(mine) for mine in first.users] == [1] * 8


def test_more_nodes_than_writers_is_an_error(ten_writers: Path) -> None:
    with pytest.raises(UserError, match="11 nodes need at least 11 users, but the data has 10"):
        FEMNIST(str(ten_writers)).load(11, 0)


def test_disjoint_test_writers(tmp_path: Path, write_leaf: Callable, characters: Callable) -> None:
    write_leaf(tmp_path / "train/a.json", {f"train_{k}": characters(5, k) for k in range(6)})
    write_leaf(tmp_path / "test/a.json", {f"test_{k}": characters(3, 100 + k) for k in range(2)})
    data = FEMNIST(str(tmp_path), source="leaf").load(3, 0)
    assert [len(rows) for rows in data.train.indices] == [10] * 3
    assert [len(rows) for rows in data.test.indices] == [3] * 3


def test_without_data_auto_renders_and_says_so(tmp_path: Path) -> None:
    data = FEMNIST(str(tmp_path / "nothing"), rendered_samples=20).load(3, 0)
    assert data.warning is not None
    assert "RENDERED" in data.warning
    assert f"the folder {tmp_path / 'nothing'} was not found" in data.warning
    assert "python -m datamodules.download femnist" in data.warning
    assert "\n" not in data.warning
    assert "not FEMNIST" in data.source
    empty = FEMNIST(str(tmp_path), rendered_samples=20).load(3, 0)
    assert "no LEAF JSON files were found" in str(empty.warning)
    asked_for = FEMNIST(str(tmp_path), source="rendered", rendered_samples=20).load(3, 0)
    assert asked_for.warning is None
    assert "not FEMNIST" in asked_for.source


def test_broken_leaf_files_are_an_error_and_never_replaced_by_rendered_ones(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train/a.json").write_text(json.dumps({"users": []}))
    with pytest.raises(UserError, match="test holds no JSON files"):
        FEMNIST(str(tmp_path)).load(2, 0)


@pytest.mark.parametrize(
    ("source", "message"), [("leaf", "was not found"), ("hub", "python -m datamodules.download femnist")]
)
def test_a_source_that_is_asked_for_must_be_there(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        FEMNIST(str(tmp_path / "nothing"), source=source).load(2, 0)  # type: ignore[arg-type]


def test_max_samples_keeps_so_many(set_up: Callable) -> None:
    module = FEMNIST("nothing", source="rendered", rendered_samples=60, max_samples=20)
    set_up(module, 3)
    assert module.nodes is not None
    assert [len(rows) for rows in module.nodes.train.indices] == [20] * 3
    batch = next(iter(module.train_dataloader()))
    assert batch.images.dtype == torch.uint8
    assert batch.sizes == [20] * 3


@pytest.mark.parametrize("cls", [FEMNIST, CelebA])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("source", "leave"),
        ("users_per_node", 0),
        ("rendered_users", 0),
        ("rendered_samples", 9),
        ("batch_size", 0),
        ("max_samples", 0),
    ],
)
def test_a_wrong_option_is_refused_before_data_is_read(cls: type, option: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"data\.{option} is '?{value}"):
        cls(**{option: value})


@pytest.mark.parametrize("cls", [FEMNIST, CelebA, Digits])
def test_the_help_describes_every_option(cls: type) -> None:
    for option in list(inspect.signature(cls).parameters):
        assert any(f"        {option}: " in str(base.__doc__) for base in cls.__mro__)
