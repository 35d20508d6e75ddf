"""A subset of ImageNet with twelve classes."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datamodules.images import decode_image, decode_once
from datamodules.labelled import LabelledData, LabelledDataModule, Source
from dfl_lightning.errors import UserError

ENDINGS = {".jpeg", ".jpg", ".png"}
SMALLEST = 16


class ImageNet12(LabelledDataModule):
    """Photographs of twelve classes of ImageNet, 3x224x224, from a folder per class in train/ and in val/.

    They are decoded once, to a file in the root's folder cache/: the short side gets the right size, and the middle is
    cut out.

    Args:
        root: the folder with train/ and val/ (default: data/imagenet12).
        source: "files", "rendered" (drawn stand-ins: shapes with textures), or "auto": files if they are there.
        size: height and width of an image.
        augment: mirror training images at random, anew in every step.
        rendered_samples: how many training images to draw; a fifth as many are drawn for testing.
    """

    num_classes = 12
    name = "ImageNet12"
    padding = 0

    def __init__(
        self,
        root: str | None = None,
        source: Source = "auto",
        size: int = 224,
        augment: bool = True,
        rendered_samples: int = 1200,
        **options: Any,
    ) -> None:
        super().__init__(root, source, augment, rendered_samples, **options)
        if size < SMALLEST:
            raise UserError(f"data.size is {size}, but must be at least {SMALLEST}.")
        self.shape = (3, size, size)

    def find(self) -> Path | None:
        return self.root if any((self.root / split).is_dir() for split in ("train", "val")) else None

    def read(self, folder: Path) -> LabelledData:
        classes = self._classes(folder / "train")
        held_out = self._classes(folder / "val")
        if different := sorted(set(classes) ^ set(held_out)):
            raise UserError(
                f"The class {different[0]} is in only one of {folder / 'train'} and {folder / 'val'}, but both must "
                "have the same classes; rename or complete them."
            )
        train, test = (self._read(folder, split, classes) for split in ("train", "val"))
        return LabelledData(train, test, classes)

    def _classes(self, folder: Path) -> list[str]:
        if not folder.is_dir():
            raise UserError(f"{folder} is not there, but {self.name} needs both train and val; {self.remedy()}")
        classes = sorted(path.name for path in _visible(folder) if path.is_dir())
        if len(classes) != self.num_classes:
            raise UserError(
                f"{folder} has {len(classes)} class folders, but {self.name} has {self.num_classes} classes; "
                f"{self.remedy()}"
            )
        return classes

    def _read(self, root: Path, split: str, classes: list[str]) -> tuple[Tensor, Tensor]:
        """Images uint8 [total, 3, size, size], which stay on the disk, and labels int64 [total]."""
        names: list[str] = []
        labels: list[int] = []
        for label, name in enumerate(classes):
            folder = root / split / name
            found = sorted(path.name for path in _visible(folder) if path.suffix.lower() in ENDINGS)
            if not found:
                raise UserError(
                    f"{folder} has no JPEG or PNG, but every class needs an image; put some there or remove the class."
                )
            names += [f"{split}/{name}/{file}" for file in found]
            labels += [label] * len(found)
        images = decode_once(
            root / "cache",
            names,
            self.shape,
            lambda name: decode_image(root / name, self.shape, str(root / name), crop=True),
        )
        return torch.from_numpy(images), torch.tensor(labels)

    def remedy(self) -> str:
        return (
            f"put the pictures of {self.num_classes} classes into {self.root}/train/CLASS/ and {self.root}/val/CLASS/."
        )


def _visible(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith(".")]
