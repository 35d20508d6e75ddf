import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datamodules.dealing import UserData
from datamodules.leaf import encode_pixels, find_leaf, read_leaf
from dfl_lightning.errors import UserError

GOOD: dict[str, Any] = {"users": ["anna"], "num_samples": [1], "user_data": {"anna": {"x": [[1.0] * 784], "y": [3]}}}


def read(root: Path, seed: int = 0) -> UserData:
    files = find_leaf(root, "femnist")
    assert files is not None
    return read_leaf(files, encode_pixels((1, 28, 28)), 62, seed)


@pytest.fixture(scope="module")
def real(femnist_sample: Path) -> UserData:
    return read(femnist_sample)


def test_the_real_sample_is_read_completely(real: UserData) -> None:
    assert (len(real.train.labels), len(real.test.labels)) == (7236, 829)
    assert real.train.rows.keys() == real.test.rows.keys()
    assert len(real.train.rows) == 51
    assert real.train.images.dtype == np.uint8
    assert real.train.images.shape == (7236, 1, 28, 28)
    assert set(real.train.labels.tolist()) == set(range(62))
    assert (real.train.images == 255).mean() > 0.8  # paper is white


def test_bytes_are_those_of_the_file(femnist_sample: Path, real: UserData) -> None:
    path = sorted(femnist_sample.glob("*/test/*.json"))[3]
    content = json.loads(path.read_text())
    user = content["users"][-1]
    split = real.test
    expected = np.round(np.array(content["user_data"][user]["x"]) * 255).reshape(-1, 1, 28, 28)
    np.testing.assert_array_equal(split.images[split.rows[user]], expected)
    assert split.labels[split.rows[user]].tolist() == content["user_data"][user]["y"]


def test_no_training_image_is_a_copy_of_a_held_out_image_of_the_same_user(real: UserData) -> None:
    assert real.copies == 13  # as many as this sample has
    for user, rows in real.test.rows.items():
        held_out = {image.tobytes() for image in real.test.images[rows]}
        assert not held_out & {image.tobytes() for image in real.train.images[real.train.rows[user]]}


@pytest.mark.parametrize("place", [".", "data", "femnist/data", "leaf_femnist", "leaf_femnist/data"])
def test_the_folders_are_found_where_leaf_and_people_put_them(
    tmp_path: Path, write_leaf: Callable, characters: Callable, place: str
) -> None:
    for split in ("train", "test"):
        write_leaf(tmp_path / place / split / "a.json", {"anna": characters(4, len(split))})
    assert list(read(tmp_path).train.rows) == ["anna"]


def test_a_folder_without_json_files_is_not_leaf_data(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    assert find_leaf(tmp_path, "femnist") is None
    assert find_leaf(tmp_path / "nothing", "femnist") is None


def test_a_user_may_be_in_several_files(tmp_path: Path, write_leaf: Callable, characters: Callable) -> None:
    first, other, second = characters(3, 1), characters(2, 2), characters(5, 3)
    write_leaf(tmp_path / "train/a.json", {"anna": first, "berta": other})
    write_leaf(tmp_path / "train/b.json", {"anna": second})
    write_leaf(tmp_path / "test/a.json", {"anna": characters(1, 4)})
    train = read(tmp_path).train
    assert train.labels[train.rows["anna"]].tolist() == first[1] + second[1]
    pixels = train.images[train.rows["anna"]].reshape(8, 784) / 255
    np.testing.assert_allclose(pixels, first[0] + second[0])


def test_hierarchies_and_extra_keys_do_no_harm(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.json").write_text(json.dumps({**GOOD, "hierarchies": ["class_1"]}))
    assert list(read(tmp_path).test.rows) == ["anna"]


@pytest.mark.parametrize("place", ["all_data", "."])
def test_files_without_a_split_are_split_per_user(
    tmp_path: Path, write_leaf: Callable, characters: Callable, place: str
) -> None:
    counts = {"anna": 40, "berta": 2, "carla": 1}
    write_leaf(tmp_path / place / "a.json", {user: characters(n, n) for user, n in counts.items()})
    data = read(tmp_path)
    sizes = {user: (len(data.train.rows[user]), len(data.test.rows.get(user, []))) for user in counts}
    assert sizes == {"anna": (36, 4), "berta": (1, 1), "carla": (1, 0)}
    for user, rows in data.test.rows.items():
        assert not set(rows) & set(data.train.rows[user])
    again, other = read(tmp_path), read(tmp_path, seed=1)
    assert again.test.rows["anna"].tolist() == data.test.rows["anna"].tolist()
    assert other.test.rows["anna"].tolist() != data.test.rows["anna"].tolist()


def changed(x: object = None, y: object = None, **content: object) -> str:
    anna: dict[str, Any] = {"x": [[1.0] * 784] if x is None else x, "y": [3] if y is None else y}
    return json.dumps({**GOOD, "user_data": {"anna": anna}, **content})


BROKEN = {
    "empty file": ("", "is empty"),
    "cut off": (changed()[:-20], "not well-formed JSON"),
    "not UTF-8": (b"\xff\xfe{", "not well-formed JSON"),
    "too deep": ("[" * 200_000, "not well-formed JSON"),
    "a list": ("[1, 2]", "no key 'users'"),
    "no users": (json.dumps({"user_data": {}}), "no key 'users'"),
    "no user_data": (json.dumps({"users": ["anna"]}), "no key 'user_data'"),
    "nobody": (json.dumps({"users": [], "user_data": {}}), "one or more users"),
    "nameless user": (changed(users=[["anna"]]), "one or more users"),
    "user without entry": (changed(users=["anna", "berta"]), "user 'berta' must be both"),
    "entry without user": (changed(users=["berta"]), "user 'anna' must be both"),
    "no y": (json.dumps({"users": ["anna"], "user_data": {"anna": {"x": []}}}), "user 'anna' has no list 'y'"),
    "more images": (changed(x=[[1.0] * 784] * 2), "user 'anna' has 2 images but 1 labels"),
    "no data": (changed(x=[], y=[]), "user 'anna' has no data"),
    "short image": (changed(x=[[1.0] * 783]), "user 'anna' has an image of 783 values, but an image has 784"),
    "number for an image": (changed(x=[0.5]), "user 'anna' has an image of float values"),
    "text in an image": (changed(x=[["0.5"] * 784]), "user 'anna' has an image that is not made of numbers"),
    "list in an image": (changed(x=[[[0.5]] + [0.5] * 783]), "user 'anna' has an image that is not made of numbers"),
    "null in an image": (changed(x=[[None] * 784]), "user 'anna' has an image that is not made of numbers"),
    "255 for white": (changed(x=[[255] * 784]), "pixel value 255.0, but pixels lie between 0 and 1"),
    "below 0": (changed(x=[[-0.25] * 784]), "pixel value -0.25"),
    "NaN": (changed(x=[[float("nan")] * 784]), "pixel value nan"),
    "infinity": (changed(x=[[float("inf")] * 784]), "pixel value inf"),
    "label 62": (changed(y=[62]), "label 62, but labels are whole numbers from 0 to 61"),
    "label -1": (changed(y=[-1]), "label -1"),
    "label 1.5": (changed(y=[1.5]), "label 1.5"),
    "label NaN": (changed(y=[float("nan")]), "label nan"),
    "label text": (changed(y=["3"]), "user 'anna' has a label that is not made of numbers"),
}


@pytest.mark.parametrize(("content", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_one_sentence_that_names_it(tmp_path: Path, content: str | bytes, message: str) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.json").write_text(changed())
    broken = tmp_path / "test" / "b.json"
    broken.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        read(tmp_path)
    sentence = str(caught.value)
    assert message in sentence
    assert str(broken) in sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence


@pytest.mark.parametrize("missing", ["train", "test"])
def test_half_a_split_is_an_error(tmp_path: Path, missing: str) -> None:
    there = "train" if missing == "test" else "test"
    (tmp_path / there).mkdir()
    (tmp_path / there / "a.json").write_text(changed())
    with pytest.raises(UserError, match=f"{missing} holds no JSON files"):
        read(tmp_path)
