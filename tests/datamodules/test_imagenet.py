from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image

from datamodules import ImageNet12
from dfl_lightning.errors import UserError

CLASSES = [f"n{number:08d}" for number in range(12)]
SIZE = 16


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Wide and high pictures, four of a class to train and two to test; the class is the colour of their middle."""
    for split, count in (("train", 4), ("val", 2)):
        for label, name in enumerate(CLASSES):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                wide = number % 2 == 0
                pixels = np.full((32, 96, 3), 255, dtype=np.uint8)
                pixels[:, 32:64] = (20 * label, 200, 10 * number)
                picture = Image.fromarray(pixels if wide else pixels.transpose(1, 0, 2).copy())
                picture.save(folder / f"{name}_{number}.{'JPEG' if number else 'png'}", quality=95)
            (folder / "notes.txt").write_text("no picture")
            (folder / "._hidden.jpg").write_text("no picture")
    return tmp_path


def load(root: Path, **options: object):
    return ImageNet12(str(root), size=SIZE, min_samples=1, **options).load(3, 0)  # type: ignore[arg-type]


def test_folders_are_classes_and_the_middle_of_a_picture_is_cut_out(root: Path) -> None:
    data = load(root)
    assert data.warning is None
    assert data.class_names == CLASSES
    for split, count in ((data.train, 4), (data.test, 2)):
        assert split.images.shape == (12 * count, 3, SIZE, SIZE)
        assert split.images.dtype == torch.uint8
        assert split.labels.tolist() == [label for label in range(12) for _ in range(count)]
        assert sorted(torch.cat(split.indices).tolist()) == list(range(12 * count))
        middle = split.images[:, :, 4:12, 4:12].float()
        expected = torch.stack([20.0 * split.labels, torch.full((12 * count,), 200.0)], dim=1)
        assert (middle[:, :2].mean((2, 3)) - expected).abs().max() < 6
    corners = data.train.images[:, 1, ::15, ::15].float()  # not the white sides, but for what blurs into the edges
    assert (corners - 200).abs().max() < 30


def test_pictures_are_decoded_once_per_size(root: Path) -> None:
    first = load(root).fingerprint()
    assert len(list((root / "cache").iterdir())) == 2
    with patch("datamodules.imagenet.decode_image", side_effect=AssertionError("decoded again")):
        assert load(root).fingerprint() == first
    assert ImageNet12(str(root), size=24).load(2, 0).test.images.shape == (24, 3, 24, 24)
    assert len(list((root / "cache").iterdir())) == 4


def test_a_damaged_picture_is_named_and_leaves_no_cache(root: Path) -> None:
    path = next((root / "train" / CLASSES[5]).glob("*.JPEG"))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match=rf"{path.name} is not a JPEG or PNG that can be decoded; replace it\.$"):
        load(root)
    assert not list((root / "cache").iterdir())


def test_folders_that_do_not_fit_are_one_sentence(root: Path) -> None:
    (root / "val" / CLASSES[3]).rename(root / "val" / "other")
    with pytest.raises(UserError, match=f"class {CLASSES[3]} is in only one of"):
        load(root)
    (root / "val" / "other").rename(root / "moved")
    with pytest.raises(UserError, match=r"val has 11 class folders, but ImageNet12 has 12 classes; put the pictures"):
        load(root)
    (root / "val").rename(root / "away")
    with pytest.raises(UserError, match=r"val is not there, but ImageNet12 needs both train and val"):
        load(root)


def test_a_class_without_pictures_is_an_error(root: Path) -> None:
    for path in (root / "val" / CLASSES[0]).glob("n*"):
        path.unlink()
    with pytest.raises(UserError, match=f"{CLASSES[0]} has no JPEG or PNG"):
        load(root)


def test_without_data_small_stand_ins_are_drawn(tmp_path: Path) -> None:
    data = load(tmp_path, rendered_samples=60)
    assert "NOT ImageNet12" in str(data.warning)
    assert f"put the pictures of 12 classes into {tmp_path}/train/CLASS/" in str(data.warning)
    assert data.train.images.shape == (60, 3, SIZE, SIZE)
    assert data.test.images.shape == (12, 3, SIZE, SIZE)
    assert len(data.class_names) == 12
    with pytest.raises(UserError, match=r"data\.source is 'files', but the folder"):
        load(tmp_path, source="files")


@pytest.mark.parametrize(("option", "value"), [("size", 15), ("source", "hub"), ("rendered_samples", 11)])
def test_a_wrong_option_is_refused(option: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"data\.{option} is '?{value}"):
        ImageNet12(**{option: value})  # type: ignore[arg-type]


def test_without_a_size_images_are_those_of_imagenet() -> None:
    assert ImageNet12().shape == (3, 224, 224)
