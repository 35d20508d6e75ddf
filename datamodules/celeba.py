"""Photographs of faces by person."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.dealing import UserData, UserSplit
from datamodules.images import decode_image, decode_once
from datamodules.leaf import REMEDY, LeafFiles, read_leaf
from datamodules.sources import UserDataModule
from dfl_lightning.errors import UserError

PICTURE_FOLDERS = ("raw/img_align_celeba", "data/raw/img_align_celeba", "img_align_celeba")


class CelebA(UserDataModule):
    """Faces, smiling (1) or not (0), 3x84x84; a node holds the pictures of one or more people.

    LEAF's JSON files name the pictures, which lie in raw/img_align_celeba/ below the root; they are decoded once, to a
    file in its folder cache/.
    """

    num_classes = 2
    name = "CelebA"
    shape = (3, 84, 84)
    class_names = ["not smiling", "smiling"]

    def read(self, files: LeafFiles, seed: int) -> UserData:
        data = read_leaf(files, _encode_names, self.num_classes, seed)
        names = np.unique(np.concatenate([data.train.images, data.test.images]))  # sorted; a picture is decoded once
        folder = cache(lambda: self._picture_folder(files.root))  # must be there only where pictures are decoded
        images = decode_once(
            self.root / "cache",
            names.tolist(),
            self.shape,
            lambda name: decode_image(folder() / name, self.shape, str(folder() / name)),
        )
        return _with_images(data, names, images)

    def render(self, num_users: int, seed: int) -> UserData:
        from datamodules.faces import render_faces

        return render_faces(num_users, self.rendered_samples, seed)

    def _picture_folder(self, leaf_root: Path) -> Path:
        for base in (self.root, leaf_root, leaf_root.parent):
            for name in PICTURE_FOLDERS:
                if (base / name).is_dir():
                    return base / name
        raise UserError(
            f"LEAF's JSON files in {leaf_root} name pictures, but {self.root / PICTURE_FOLDERS[0]} is not there; "
            "unpack CelebA's img_align_celeba.zip to that folder."
        )


def _encode_names(x: list[Any], where: str) -> np.ndarray:
    for name in x:
        # A name from a data file must not lead out of the folder of pictures.
        if not isinstance(name, str) or Path(name).name != name or name in ("", "..") or "\0" in name:
            raise UserError(
                f"{where} has the picture {name!r}, but pictures are file names without a folder; {REMEDY}."
            )
    return np.array(x)


def _with_images(data: UserData, names: np.ndarray, images: np.ndarray) -> UserData:
    """Rows of the list of names become rows of the decoded pictures, of which there is one per name."""
    labels = np.zeros(len(names), dtype=np.int64)
    splits = (data.train, data.test)
    positions = [np.searchsorted(names, split.images) for split in splits]
    for split, position in zip(splits, positions):
        labels[position] = split.labels
    for split, position in zip(splits, positions):
        wrong = split.images[labels[position] != split.labels]
        if len(wrong):
            raise UserError(f"The picture {wrong[0]} has two different labels; {REMEDY}.")
    train, test = (
        UserSplit(images, labels, {user: position[rows] for user, rows in split.rows.items()})
        for split, position in zip(splits, positions)
    )
    return UserData(train, test, data.copies)
