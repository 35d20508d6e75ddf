"""The form in which a downloaded data set lies on the disk, in ``<root>/hub``.

images.npy is uint8 [total, C, H, W], labels.npy int64 [total], users.json holds the users' names and the number of the
user of each row, and SHA256SUMS the checksums of these three files.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from datamodules.dealing import UserSplit
from datamodules.images import open_images, write_images
from dfl_lightning.errors import UserError

FILES = ("images.npy", "labels.npy", "users.json")
SUMS = "SHA256SUMS"


@dataclass
class Rows:
    """Some rows of a data set: images uint8 [n, C, H, W], and the label and the user of each."""

    images: np.ndarray
    labels: list[int]
    users: list[str]


def write_hub(folder: Path, batches: Iterator[Rows], shape: tuple[int, int, int]) -> None:
    """Writes the batches to a folder next to ``folder`` and renames it when it is complete."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    labels: list[int] = []
    users: list[str] = []

    def images() -> Iterator[np.ndarray]:
        for batch in batches:
            labels.extend(batch.labels)
            users.extend(batch.users)
            yield batch.images

    try:
        write_images(temporary / "images.npy", images(), shape)
        names = sorted(set(users))
        number = {name: k for k, name in enumerate(names)}
        np.save(temporary / "labels.npy", np.array(labels, dtype=np.int64), allow_pickle=False)
        with (temporary / "users.json").open("w", encoding="utf-8") as file:
            json.dump({"users": names, "rows": [number[user] for user in users]}, file)
        (temporary / SUMS).write_text("".join(f"{_sha256(temporary / name)}  {name}\n" for name in FILES))
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def broken_file(folder: Path, names: tuple[str, ...] = FILES) -> str | None:
    """The name of a file that is missing or does not match its checksum, if there is one."""
    try:
        lines = (folder / SUMS).read_text().split("\n")
    except (OSError, UnicodeDecodeError):
        return SUMS
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    for name in names:
        if not (folder / name).is_file() or _sha256(folder / name) != sums.get(name):
            return name
    return None


def load_hub(folder: Path, shape: tuple[int, int, int], num_classes: int, command: str) -> UserSplit:
    """Opens what :func:`write_hub` wrote; the images stay on the disk.

    The checksums of the two small files and the size of the images are checked. Reading gigabytes of images only to
    check them is left to the download command, which does so when it is run again.

    Raises:
        UserError: a file is missing or damaged.
    """
    if not folder.is_dir():
        raise UserError(f"There is no downloaded data in {folder}; run: {command}")
    damaged = UserError(f"The downloaded data in {folder} is damaged; remove that folder and run: {command}")
    if broken_file(folder, ("labels.npy", "users.json")):
        raise damaged
    labels = np.load(folder / "labels.npy", allow_pickle=False)
    content = json.loads((folder / "users.json").read_text(encoding="utf-8"))
    images = open_images(folder / "images.npy", shape, len(labels))
    owner = np.array(content["rows"], dtype=np.int64)
    if (
        images is None
        or len(owner) != len(labels)
        or not len(labels)
        or not 0 <= labels.min() <= labels.max() < num_classes
    ):
        raise damaged
    order = np.argsort(owner, kind="stable")
    bounds = np.searchsorted(owner[order], np.arange(len(content["users"]) + 1))
    rows = {user: order[bounds[k] : bounds[k + 1]] for k, user in enumerate(content["users"])}
    return UserSplit(images, labels, rows)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
