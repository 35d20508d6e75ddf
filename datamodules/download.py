"""Downloads FEMNIST or CelebA (from the Hugging Face Hub), CIFAR-10 or CIFAR-100 (from their authors' page).

For example: ``python -m datamodules.download femnist``.
"""

import argparse
import hashlib
import io
import os
import shutil
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.celeba import CelebA
from datamodules.cifar import CIFAR10, CIFAR100, CifarFiles
from datamodules.femnist import FEMNIST
from datamodules.hub import Rows, broken_file, write_hub
from datamodules.images import decode_image
from dfl_lightning.errors import UserError

INSTALL = "pip install huggingface_hub pyarrow"
ROWS_AT_ONCE = 512


@dataclass
class HubSource:
    """Where a data set lies on the Hub, and the columns that hold an image's user and its label."""

    repository: str
    user: str
    label: str
    shape: tuple[int, int, int]
    num_classes: int


SOURCES = {
    "femnist": HubSource("flwrlabs/femnist", "writer_id", "character", FEMNIST.shape, FEMNIST.num_classes),
    "celeba": HubSource("flwrlabs/celeba", "celeb_id", "Smiling", CelebA.shape, CelebA.num_classes),
}
ARCHIVES = {"cifar10": CIFAR10.files, "cifar100": CIFAR100.files}


def download(name: str, root: Path) -> Path:
    """Downloads, checks and decodes a data set; what is there already is not downloaded again.

    Returns:
        the folder that holds the result.
    """
    return fetch_archive(ARCHIVES[name], root) if name in ARCHIVES else fetch_hub(name, root)


def fetch_archive(files: CifarFiles, root: Path) -> Path:
    """Downloads and unpacks an archive whose checksum is known; its folder appears when it is complete."""
    from torchvision.datasets.utils import download_and_extract_archive

    folder, temporary = root / files.folder, root / f".{files.folder}.{os.getpid()}.tmp"
    if folder.is_dir():
        return folder
    try:
        download_and_extract_archive(files.url, root, temporary, md5=files.md5, remove_finished=True)
        (temporary / files.folder).rename(folder)
    except (OSError, RuntimeError, HTTPException, EOFError, tarfile.TarError) as error:  # RuntimeError: wrong checksum
        raise UserError(
            f"{files.url} could not be downloaded to {root} ({type(error).__name__}: {str(error).rstrip('.')}); "
            "check the connection and the disk and run the command again."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def fetch_hub(name: str, root: Path) -> Path:
    """Downloads, checks and decodes a data set of the Hub; what is there already is checked."""
    _check_installed()
    folder = root / "hub"
    if folder.is_dir() and broken_file(folder) is None:
        return folder
    source = SOURCES[name]
    parquet = root / "parquet"
    files = fetch_parquet(source.repository, parquet)
    write_hub(folder, decode_parquet(files, source), source.shape)
    shutil.rmtree(parquet)
    return folder


def fetch_parquet(repository: str, folder: Path) -> list[Path]:
    """Downloads the repository's parquet files, going on where an earlier try stopped, and checks their checksums."""
    from huggingface_hub import HfApi, hf_hub_download

    try:
        info = HfApi().dataset_info(repository, files_metadata=True)
        wanted = sorted((file for file in info.siblings or [] if file.rfilename.endswith(".parquet")), key=str)
        paths: list[tuple[Path, str | None]] = []
        for number, file in enumerate(wanted, start=1):
            print(f"{number}/{len(wanted)} {file.rfilename}", flush=True)
            path = hf_hub_download(repository, file.rfilename, repo_type="dataset", revision=info.sha, local_dir=folder)
            paths.append((Path(path), file.lfs.sha256 if file.lfs else None))
    except Exception as error:  # the library's errors for a lost connection differ between its versions
        raise UserError(
            f"{repository} could not be downloaded ({type(error).__name__}: {str(error).splitlines()[0]}); "
            "check the connection and run the command again, it goes on where it stopped."
        ) from error
    if not paths:
        raise UserError(f"{repository} holds no parquet files; please report this.")
    for downloaded, sha256 in paths:
        check_sha256(downloaded, sha256)
    return [downloaded for downloaded, _ in paths]


def check_sha256(path: Path, sha256: str | None) -> None:
    """Removes a file that does not match its checksum and raises; None means that none was published."""
    if sha256 is None:
        return
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        path.unlink()
        raise UserError(f"{path} does not match its published checksum and was removed; run the command again.")


def decode_parquet(files: list[Path], source: HubSource) -> Iterator[Rows]:
    """Decodes the files batch by batch; of equal images of a user with equal labels only the first is kept.

    FEMNIST holds some images twice, and each user's images are split later: copies would end up on both sides.
    """
    import pyarrow.parquet

    seen: set[bytes] = set()
    for path in files:
        try:
            table = pyarrow.parquet.ParquetFile(path)
            batches = table.iter_batches(ROWS_AT_ONCE, columns=["image", source.user, source.label])
            for number, batch in enumerate(batches):
                yield _decode_batch(batch.to_pydict(), source, f"{path}, batch {number}", seen)
        except pyarrow.ArrowException as error:
            raise UserError(f"{path} cannot be read as a parquet file; remove it and run the command again.") from error


def _decode_batch(columns: dict[str, list[Any]], source: HubSource, where: str, seen: set[bytes]) -> Rows:
    images: list[np.ndarray] = []
    labels: list[int] = []
    users: list[str] = []
    for picture, user, label in zip(columns["image"], columns[source.user], columns[source.label]):
        if picture is None or picture["bytes"] is None or user is None or label is None:
            raise UserError(f"{where} has a row without an image, a user or a label; please report this.")
        if not 0 <= int(label) < source.num_classes:
            raise UserError(
                f"{where} has the label {label}, but labels lie between 0 and {source.num_classes - 1}; "
                "please report this."
            )
        image = decode_image(io.BytesIO(picture["bytes"]), source.shape, f"An image of {where}")
        digest = hashlib.sha256(f"{user}|{int(label)}|".encode() + image.tobytes()).digest()[:16]
        if digest not in seen:
            seen.add(digest)
            images.append(image)
            labels.append(int(label))
            users.append(str(user))
    stacked = np.stack(images) if images else np.empty((0, *source.shape), dtype=np.uint8)
    return Rows(stacked, labels, users)


def _check_installed() -> None:
    try:
        import huggingface_hub  # noqa: F401
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise UserError(f"The download needs packages that are not installed ({error.name}); run: {INSTALL}") from error


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m datamodules.download", description=__doc__)
    parser.add_argument("name", choices=sorted([*SOURCES, *ARCHIVES]), help="the data set")
    parser.add_argument("--root", type=Path, help="where to put it (default: data/NAME)")
    options = parser.parse_args(arguments)
    root = options.root or Path("data") / options.name
    try:
        folder = download(options.name, root)
    except (UserError, OSError) as error:  # OSError: the disk is full, or the folder is not writable
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: stopped; run the command again to go on.", file=sys.stderr)
        return 130
    print(f"{options.name} is in {folder}; set data.root to {root}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
