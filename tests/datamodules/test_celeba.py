from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image

from datamodules import CelebA
from dfl_lightning.errors import UserError

PLACE = "raw/img_align_celeba"
COLOURS = {f"00000{k}.jpg": (40 * k, 250 - 40 * k, 90) for k in range(6)}


@pytest.fixture
def root(tmp_path: Path, write_leaf: Callable) -> Path:
    """Three people with two pictures each, and files as LEAF writes them: float labels, user ids of digits."""
    pictures = tmp_path / PLACE
    pictures.mkdir(parents=True)
    for name, colour in COLOURS.items():
        Image.new("RGB", (178, 218), colour).save(pictures / name, quality=95)
    names = list(COLOURS)
    for split, chosen in (("train", names[::2]), ("test", names[1::2])):
        users = {str(17 * k + 3): ([name], [float(k == 1)]) for k, name in enumerate(chosen)}
        write_leaf(tmp_path / "data" / split / "a.json", users)
    return tmp_path


def test_pictures_are_decoded_and_resized(root: Path) -> None:
    data = CelebA(str(root)).load(3, 0)
    assert data.warning is None
    assert data.train.images.shape == (6, 3, 84, 84)
    for node, (user,) in enumerate(data.users):
        k = (int(user) - 3) // 17
        for split, number in ((data.train, 2 * k), (data.test, 2 * k + 1)):
            (row,) = split.indices[node].tolist()
            colour = np.array(COLOURS[f"00000{number}.jpg"]).reshape(3, 1, 1)
            assert np.abs(split.images[row].numpy() - colour).max() <= 5
            assert split.labels[row] == (k == 1)


@pytest.mark.parametrize("place", ["data/raw/img_align_celeba", "img_align_celeba"])
def test_pictures_may_lie_elsewhere(root: Path, place: str) -> None:
    (root / place).parent.mkdir(exist_ok=True, parents=True)
    (root / PLACE).rename(root / place)
    assert len(CelebA(str(root)).load(3, 0).train.images) == 6


def test_the_decoded_pictures_are_reused(root: Path) -> None:
    first = CelebA(str(root)).load(3, 0).fingerprint()
    (cache,) = (root / "cache").iterdir()
    with patch("datamodules.celeba.decode_image", side_effect=AssertionError("decoded again")):
        assert CelebA(str(root)).load(3, 0).fingerprint() == first
    cache.write_bytes(cache.read_bytes()[:-7])  # damaged: made anew
    assert CelebA(str(root)).load(3, 0).fingerprint() == first
    assert list((root / "cache").iterdir()) == [cache]


def test_another_list_of_pictures_makes_another_cache(root: Path, write_leaf: Callable) -> None:
    CelebA(str(root)).load(3, 0)
    write_leaf(root / "data/train/a.json", {"3": (["000000.jpg"], [0.0])})
    data = CelebA(str(root)).load(1, 0)
    assert len(data.train.images) == 4
    assert len(list((root / "cache").iterdir())) == 2


def test_the_pictures_in_memory_do_not_write_to_the_cache(root: Path) -> None:
    data = CelebA(str(root)).load(3, 0)
    before = data.train.images[0].clone()
    data.train.images[0] = 7
    assert (CelebA(str(root)).load(3, 0).train.images[0] == before).all()


def test_a_missing_picture_is_named_and_leaves_no_cache(root: Path) -> None:
    (path,) = root.rglob("000003.jpg")
    path.unlink()
    with pytest.raises(UserError, match=r"000003\.jpg is not there"):
        CelebA(str(root)).load(3, 0)
    assert not list((root / "cache").iterdir())


def test_a_damaged_picture_is_named(root: Path) -> None:
    (path,) = root.rglob("000003.jpg")
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(UserError, match=r"000003\.jpg is not a JPEG or PNG"):
        CelebA(str(root)).load(3, 0)


@pytest.mark.parametrize("name", ["../secret.jpg", "/etc/passwd", "", "..", 7, [0.5]])
def test_names_that_lead_out_of_the_folder_are_refused(root: Path, write_leaf: Callable, name: object) -> None:
    write_leaf(root / "data/train/b.json", {"99": ([name], [0.0])})
    with pytest.raises(UserError, match=r"b\.json: user '99' has the picture"):
        CelebA(str(root)).load(3, 0)


@pytest.mark.parametrize("label", [2.0, 0.5, -1.0])
def test_labels_are_0_or_1(root: Path, write_leaf: Callable, label: float) -> None:
    write_leaf(root / "data/train/b.json", {"99": (["000000.jpg"], [label])})
    with pytest.raises(UserError, match="whole numbers from 0 to 1;"):
        CelebA(str(root)).load(3, 0)


def test_one_picture_with_two_labels_is_an_error(root: Path, write_leaf: Callable) -> None:
    write_leaf(root / "data/train/b.json", {"99": (["000000.jpg"], [1.0])})
    with pytest.raises(UserError, match=r"000000\.jpg has two different labels"):
        CelebA(str(root)).load(3, 0)


def test_a_missing_folder_of_pictures_is_an_error(tmp_path: Path, write_leaf: Callable) -> None:
    for split in ("train", "test"):
        write_leaf(tmp_path / split / "a.json", {"3": ([f"{split}.jpg"], [0.0])})
    with pytest.raises(UserError, match=r"raw/img_align_celeba is not there; unpack"):
        CelebA(str(tmp_path)).load(1, 0)


def test_a_cache_that_cannot_be_written_is_an_error(root: Path) -> None:
    (root / "cache").write_text("a file where the folder should be")
    with pytest.raises(UserError, match="cache cannot be made"):
        CelebA(str(root)).load(3, 0)


def test_without_data_faces_are_rendered(tmp_path: Path) -> None:
    data = CelebA(str(tmp_path), rendered_samples=10).load(2, 0)
    assert "NOT CelebA" in str(data.warning)
    assert data.train.images.shape[1:] == (3, 84, 84)
