"""CIFAR-10 and CIFAR-100, read from their binary versions: the Python versions are pickles, which can run any code."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from datamodules.labelled import LabelledData, LabelledDataModule
from dfl_lightning.errors import UserError

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class CifarFiles:
    """Where the images lie: records of a few labels and all pixels of an image, each one byte.

    Attributes:
        url: of the archive.
        md5: of the archive, as published.
        folder: the one folder in the archive.
        train: files with the training images.
        test: the file with the test images.
        names: the file with the names of the classes, one in a line.
        label_bytes: labels in a record; the last one counts.
        python_folder: the folder of the Python version's archive.
    """

    url: str
    md5: str
    folder: str
    train: tuple[str, ...]
    test: str
    names: str
    label_bytes: int
    python_folder: str


class CIFAR10(LabelledDataModule):
    """Photographs of ten kinds of animals and vehicles, 3x32x32, 50,000 for training and 10,000 for testing."""

    num_classes = 10
    name = "CIFAR10"
    shape = SHAPE
    padding = 4
    files = CifarFiles(
        url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        md5="c32a1d4ab5d03f1284b67883e8d87530",
        folder="cifar-10-batches-bin",
        train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        test="test_batch.bin",
        names="batches.meta.txt",
        label_bytes=1,
        python_folder="cifar-10-batches-py",
    )

    def find(self) -> Path | None:
        names = (*self.files.train, self.files.test)
        for folder in (self.root, self.root / self.files.folder):
            if any((folder / name).is_file() for name in names):
                return folder
        return None

    def read(self, folder: Path) -> LabelledData:
        train = self._read([folder / name for name in self.files.train])
        test = self._read([folder / self.files.test])
        return LabelledData(train, test, self._class_names(folder / self.files.names))

    def _read(self, paths: list[Path]) -> tuple[Tensor, Tensor]:
        """Images uint8 [total, 3, 32, 32] and labels int64 [total]."""
        records = [self._records(path) for path in paths]
        images = np.concatenate([part[:, self.files.label_bytes :] for part in records])
        labels = np.concatenate([part[:, self.files.label_bytes - 1] for part in records])
        return torch.from_numpy(images).view(-1, *SHAPE), torch.from_numpy(labels).to(torch.int64)

    def _records(self, path: Path) -> np.ndarray:
        """The records of one file, uint8 [total, label_bytes + pixels]."""
        again = f"remove {path.parent} and {self.remedy()}"
        try:
            content = np.fromfile(path, dtype=np.uint8)
        except FileNotFoundError as error:
            raise UserError(f"{path} is missing, though other files of {self.name} are there; {again}") from error
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}); make it readable or {again}") from error
        width = self.files.label_bytes + PIXELS
        if not len(content) or len(content) % width:
            raise UserError(
                f"{path} has {len(content)} bytes, but must hold one or more whole records of {width} bytes; {again}"
            )
        records = content.reshape(-1, width)
        largest = int(records[:, self.files.label_bytes - 1].max())
        if largest >= self.num_classes:
            raise UserError(
                f"{path} has the label {largest}, but labels lie between 0 and {self.num_classes - 1}; {again}"
            )
        return records

    def _class_names(self, path: Path) -> list[str]:
        """From the file that says them; numbers if it is not there, since nothing depends on them."""
        try:
            names = path.read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError):
            names = []
        return names if len(names) == self.num_classes else [str(label) for label in range(self.num_classes)]

    def missing(self) -> str:
        folders = (self.root, self.root / self.files.python_folder)
        if any((folder / "batches.meta").is_file() or (folder / "meta").is_file() for folder in folders):
            return (
                f"{self.root} holds {self.name}'s Python version only, whose pickles are not read as they can run code"
            )
        return super().missing()

    def remedy(self) -> str:
        return f"run: python -m datamodules.download {self.name.lower()} --root {self.root}"


class CIFAR100(CIFAR10):
    """Photographs of a hundred kinds of things, 3x32x32, 50,000 for training and 10,000 for testing."""

    num_classes = 100
    name = "CIFAR100"
    files = CifarFiles(
        url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        md5="03b5dce01913d631647c71ecec9e9cb8",
        folder="cifar-100-binary",
        train=("train.bin",),
        test="test.bin",
        names="fine_label_names.txt",
        label_bytes=2,  # of twenty groups, then of a hundred classes
        python_folder="cifar-100-python",
    )
