"""Picture files to bytes, and bytes to a file that is mapped into memory."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np
from lightning.pytorch.utilities import rank_zero_info

from dfl_lightning.errors import UserError

DECODED_AT_ONCE = 256


def decode_image(source: Path | BytesIO, shape: tuple[int, int, int], where: str, crop: bool = False) -> np.ndarray:
    """uint8 [C, H, W] from a JPEG or PNG, as grey levels (C = 1) or RGB (C = 3), resized where it has another size.

    Args:
        source: the file or its bytes.
        shape: (C, H, W).
        where: what it is called in errors.
        crop: keep the proportions and cut out the middle, where else the image would be squeezed.
    """
    from PIL import Image, ImageOps

    channels, height, width = shape
    try:
        with Image.open(source, formats=["JPEG", "PNG"]) as picture:
            pixels = picture.convert("L" if channels == 1 else "RGB")
    except FileNotFoundError as error:
        raise UserError(f"{where} is not there; put the file there or take it out of the JSON files.") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{where} is not a JPEG or PNG that can be decoded; replace it.") from error
    if crop:
        pixels = ImageOps.fit(pixels, (width, height), Image.Resampling.BICUBIC)
    elif pixels.size != (width, height):
        pixels = pixels.resize((width, height), Image.Resampling.BICUBIC)
    array = np.asarray(pixels)
    return array[None] if channels == 1 else array.transpose(2, 0, 1)


def decode_once(
    folder: Path, names: list[str], shape: tuple[int, int, int], decode: Callable[[str], np.ndarray]
) -> np.ndarray:
    """The pictures with these names [len(names), C, H, W], mapped from a file in ``folder``.

    The file is written if there is none for this list of names and this shape.
    """
    digest = hashlib.sha256("\n".join([str(shape), *names]).encode()).hexdigest()[:16]
    cache = folder / f"pictures-{digest}.npy"
    images = open_images(cache, shape, len(names))
    if images is None:
        rank_zero_info(f"Decoding {len(names)} pictures once, to {cache}")
        write_images(cache, _decode_all(names, decode), shape)
        images = open_images(cache, shape, len(names))
        assert images is not None
    return images


def _decode_all(names: list[str], decode: Callable[[str], np.ndarray]) -> Iterator[np.ndarray]:
    with ThreadPoolExecutor() as pool:  # Pillow decodes without holding the interpreter's lock
        for start in range(0, len(names), DECODED_AT_ONCE):
            yield np.stack(list(pool.map(decode, names[start : start + DECODED_AT_ONCE])))


def write_images(path: Path, batches: Iterable[np.ndarray], shape: tuple[int, int, int]) -> None:
    """Writes batches of uint8 [n, C, H, W] one after another into one .npy file that appears when it is complete.

    Plain writes, not a writable memory map: a full disk is an error here and would be a crash there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{path.parent} cannot be made ({error.strerror}); make the folder above it writable."
        ) from error
    try:
        with temporary.open("wb") as file:
            _write_header(file, (0, *shape))
            start, total = file.tell(), 0
            for batch in batches:
                file.write(np.ascontiguousarray(batch, dtype=np.uint8).tobytes())
                total += len(batch)
            file.seek(0)
            _write_header(file, (total, *shape))  # numpy leaves room in a header for the first axis to grow
            assert file.tell() == start
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}); make room and make its folder writable."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def open_images(path: Path, shape: tuple[int, int, int], total: int) -> np.ndarray | None:
    """The images [total, C, H, W], read from the file as they are needed, or None if the file holds something else.

    Mapped copy-on-write: torch asks for writable memory, and nothing that is written reaches the file.
    """
    try:
        images = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return images if images.dtype == np.uint8 and images.shape == (total, *shape) else None


def _write_header(file: BinaryIO, shape: tuple[int, ...]) -> None:
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
