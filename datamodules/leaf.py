"""Reads the JSON folders of image data that LEAF's preprocess.sh writes, file by file."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.dealing import UserData, UserSplit, drop_copies, hold_out
from dfl_lightning.errors import UserError

REMEDY = "write the data anew with LEAF's preprocess.sh"
OWN_FOLDERS = {"train", "test", "all_data", "cache", "hub", "parquet", "raw"}  # never a nested LEAF folder

# Turns the list x of a user into an array with one row per image; the text says whose list it is.
Encode = Callable[[list[Any], str], np.ndarray]


@dataclass
class LeafFiles:
    """The JSON files under a root: split into train and test, or not split (``everything``)."""

    root: Path
    train: list[Path]
    test: list[Path]
    everything: list[Path]


def find_leaf(root: Path, name: str) -> LeafFiles | None:
    """Looks for LEAF's JSON files in ``root``, the folders that LEAF makes below it, or a single nested folder."""
    places = [root, root / "data", root / name / "data"]
    nested = [place for place in _folders(root) if place.name not in OWN_FOLDERS]
    if len(nested) == 1:
        places += [nested[0], nested[0] / "data"]
    for place in places:
        train, test = _json_files(place / "train"), _json_files(place / "test")
        if train or test:
            return LeafFiles(place, train, test, [])
    for place in places:
        everything = _json_files(place / "all_data") or _json_files(place)
        if everything:
            return LeafFiles(place, [], [], everything)
    return None


def read_leaf(files: LeafFiles, encode: Encode, num_classes: int, seed: int) -> UserData:
    """Reads the files; where they are not split, each user's images are split by the seed.

    Raises:
        UserError: a file is missing or malformed; the sentence names the file and the user.
    """
    if files.everything:
        return drop_copies(hold_out(_read_files(files.everything, encode, num_classes), seed))
    for split, paths in (("train", files.train), ("test", files.test)):
        if not paths:
            raise UserError(
                f"{files.root / split} holds no JSON files, but LEAF data has both a train and a test folder; {REMEDY}."
            )
    train, test = (_read_files(paths, encode, num_classes) for paths in (files.train, files.test))
    return drop_copies(UserData(train, test))


def encode_pixels(shape: tuple[int, int, int]) -> Encode:
    """For lists of C*H*W numbers k/255: gives uint8 [n, C, H, W]."""
    length = shape[0] * shape[1] * shape[2]

    def encode(x: list[Any], where: str) -> np.ndarray:
        for image in x:
            found = len(image) if isinstance(image, list) else type(image).__name__
            if found != length:
                raise UserError(f"{where} has an image of {found} values, but an image has {length}; {REMEDY}.")
        values = _numbers(x, where, "an image")
        valid = (values >= 0) & (values <= 1)  # False for NaN
        if not valid.all():
            raise UserError(
                f"{where} has the pixel value {values[~valid][0]}, but pixels lie between 0 and 1; {REMEDY}."
            )
        values *= 255
        return np.rint(values).astype(np.uint8).reshape(-1, *shape)

    return encode


def _folders(place: Path) -> list[Path]:
    return sorted(path for path in place.iterdir() if path.is_dir()) if place.is_dir() else []


def _json_files(place: Path) -> list[Path]:
    return sorted(path for path in place.glob("*.json") if path.is_file())


def _read_files(paths: list[Path], encode: Encode, num_classes: int) -> UserSplit:
    images: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    rows: dict[str, list[np.ndarray]] = {}
    total = 0
    for path in paths:
        for user, x, y in _read_users(path):
            where = f"{path}: user '{user}'"
            labels.append(_labels(y, where, num_classes))
            images.append(encode(x, where))
            rows.setdefault(user, []).append(np.arange(total, total + len(x), dtype=np.int64))
            total += len(x)
    return UserSplit(
        np.concatenate(images),
        np.concatenate(labels),
        {user: np.concatenate(pieces) for user, pieces in rows.items()},
    )


def _read_users(path: Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Yields (user, x, y), and lets go of each user's lists before the next one, so that memory falls as it reads."""
    content = _parse(path)
    missing = [key for key in ("users", "user_data") if key not in content] if isinstance(content, dict) else ["users"]
    if missing:
        raise UserError(f"{path} has no key '{missing[0]}', but LEAF files have 'users' and 'user_data'; {REMEDY}.")
    users, user_data = content["users"], content["user_data"]
    named = isinstance(users, list) and all(isinstance(user, str) for user in users)
    if not named or not isinstance(user_data, dict) or not users:
        raise UserError(
            f"{path} must hold the names of one or more users in 'users' and an object in 'user_data'; "
            f"{REMEDY} or remove it."
        )
    for user in sorted(set(users) ^ user_data.keys()):
        raise UserError(f"{path}: user '{user}' must be both in 'users' and in 'user_data', but is in one; {REMEDY}.")
    for user in list(user_data):
        data = user_data.pop(user)
        for key in ("x", "y"):
            if not isinstance(data, dict) or not isinstance(data.get(key), list):
                raise UserError(f"{path}: user '{user}' has no list '{key}', but every user has x and y; {REMEDY}.")
        x, y = data["x"], data["y"]
        if len(x) != len(y):
            raise UserError(f"{path}: user '{user}' has {len(x)} images but {len(y)} labels; {REMEDY}.")
        if not x:
            raise UserError(f"{path}: user '{user}' has no data, but every user needs an image; remove the user.")
        yield user, x, y


def _parse(path: Path) -> Any:
    try:
        if not path.stat().st_size:
            raise UserError(f"{path} is empty, but must be a LEAF JSON file; {REMEDY} or remove it.")
        with path.open(encoding="utf-8") as file:
            return json.load(file)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); make it readable or remove it.") from error
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not well-formed JSON ({error}); it may be cut off, so {REMEDY}.") from error


def _labels(y: list[Any], where: str, num_classes: int) -> np.ndarray:
    values = _numbers(y, where, "a label")
    valid = (values >= 0) & (values < num_classes) & (values == np.floor(values))
    if not valid.all():
        raise UserError(
            f"{where} has the label {values[~valid][0]:g}, but labels are whole numbers from 0 to {num_classes - 1}; "
            f"{REMEDY}."
        )
    return values.astype(np.int64)


def _numbers(values: list[Any], where: str, kind: str) -> np.ndarray:
    """float64; numpy alone would also take the text "0.5" for a number, and a list in place of one."""
    try:
        array = np.asarray(values)
    except ValueError:
        array = np.empty(0, dtype=object)
    if array.dtype.kind not in "iuf" or array.ndim != (2 if kind == "an image" else 1):
        raise UserError(f"{where} has {kind} that is not made of numbers; {REMEDY}.")
    return array.astype(np.float64)
