"""Images: their size from the header alone, and their pixels, both as they stand upright.

The two agree by construction: one function reads the orientation, and both use it. Pillow (extra
``vlm``) is imported when the first image is read.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

_ORIENTATION = 0x0112
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_WHITE = (255, 255, 255, 255)


class ImageError(ValueError):
    """An image that cannot be used; the message names its path and what is wrong with it."""


def read_image_size(source: str) -> tuple[int, int]:
    """(height, width) in pixels of an image as ``load_image`` will give it; reads the header,
    decodes nothing.

    Args:
        source: path of a file, or a ``data:`` URL.

    Raises:
        ImageError: the file is missing, no image, or its header is broken.
    """
    image_module = _pillow()
    with _opened(source) as stream, _named(source), image_module.open(stream) as image:
        width, height = image.size
        turned = _orientation(image, stream) in (5, 6, 7, 8)
    if min(height, width) < 1:
        raise ImageError(f"{describe(source)}: the image is {width} x {height} pixels")
    return (width, height) if turned else (height, width)


def load_image(source: str) -> PILImage:
    """An RGB image of 8 bits a channel, upright: what transformers' own loader makes of a file.

    The EXIF orientation is applied; of an animation the first frame counts; transparency is laid on
    white, as transformers' processors do it; 16-bit grey is scaled to 8 bits (Pillow alone would
    clip nearly all of it to white).

    Args:
        source: path of a file, or a ``data:`` URL.

    Raises:
        ImageError: the file is missing, no image, or broken (a truncated file is broken: it is not
            padded with grey).
    """
    image_module = _pillow()
    with _opened(source) as stream, _named(source):
        with image_module.open(stream) as image:
            method = _transpositions().get(_orientation(image, stream))
            rgb = _to_rgb(image)
        return rgb if method is None else rgb.transpose(method)


def describe(source: str) -> str:
    """The source for a message: a path as it is, a ``data:`` URL shortened."""
    return (
        source if not source.startswith("data:") else f"{source[:40]}... ({len(source)} characters)"
    )


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("images need Pillow: pip install 'xlength[vlm]'") from error
    return Image


@contextmanager
def _named(source: str) -> Iterator[None]:
    """Turns whatever Pillow raises into one ImageError that names the image."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        unknown = type(error).__name__ == "UnidentifiedImageError"
        reason = "no image that Pillow knows" if unknown else str(error) or type(error).__name__
        raise ImageError(f"{describe(source)}: broken image: {reason}") from error


def _opened(source: str) -> BinaryIO:
    if source.startswith("data:"):
        try:
            return BytesIO(base64.b64decode(source.partition(",")[2], validate=True))
        except (binascii.Error, ValueError) as error:
            raise ImageError(f"{describe(source)}: broken base64: {error}") from error
    if "://" in source:
        raise ImageError(f"{source}: images are read from files; download it first")
    try:
        return open(source, "rb")
    except OSError as error:
        reason = "missing image" if not os.path.exists(source) else error.strerror or str(error)
        raise ImageError(f"{source}: {reason}") from error


def _transpositions() -> dict[int, Any]:
    transpose = _pillow().Transpose
    return {
        2: transpose.FLIP_LEFT_RIGHT,
        3: transpose.ROTATE_180,
        4: transpose.FLIP_TOP_BOTTOM,
        5: transpose.TRANSPOSE,
        6: transpose.ROTATE_270,
        7: transpose.TRANSVERSE,
        8: transpose.ROTATE_90,
    }


def _orientation(image: PILImage, stream: BinaryIO) -> int:
    """The EXIF (or XMP) orientation still to be applied, 1 to 8, from headers alone; 1 where it is
    unreadable."""
    from PIL.Image import Image

    if image.format == "TIFF":  # Pillow turns these itself, and says the turned size.
        return 1
    try:
        # The base class's method: that of PNG files decodes the pixels to find a chunk behind them.
        found = Image.getexif(image).get(_ORIENTATION)
        if found is None and image.format == "PNG":
            found = _late_png_orientation(stream)
        return int(found or 1)
    except Exception:
        return 1


def _late_png_orientation(stream: BinaryIO) -> int | None:
    """The orientation in a PNG chunk behind the pixels (the standard allows that), found without
    reading the pixels."""
    from PIL.Image import Exif

    position, place, found = stream.tell(), 8, None
    try:
        behind = False
        while found is None:
            stream.seek(place)
            head = stream.read(8)
            if len(head) < 8 or head[4:] == b"IEND":
                break
            size = int.from_bytes(head[:4], "big")
            behind = behind or head[4:] == b"IDAT"
            if behind and head[4:] == b"eXIf":
                exif = Exif()
                exif.load(b"Exif\x00\x00" + stream.read(size))
                found = exif.get(_ORIENTATION)
            elif behind and head[4:] == b"iTXt":
                match = _XMP_ORIENTATION.search(stream.read(size))
                found = int(match[1]) if match else None
            place += size + 12
    finally:
        stream.seek(position)
    return found


def _to_rgb(image: PILImage) -> PILImage:
    image_module = _pillow()
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = image_module.fromarray(_to_eight_bits(np.asarray(image)))
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        white = image_module.new("RGBA", image.size, _WHITE)
        image = image_module.alpha_composite(white, image)
    return image.convert("RGB")


def _to_eight_bits(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Grey of any range -> (h, w) uint8: 16-bit values by their upper byte, floats of at most 1
    times 255."""
    highest = float(values.max(initial=0))
    if values.dtype.kind == "f":
        scale = 255.0 if highest <= 1 else 1.0
    else:
        scale = 1 / 257 if values.dtype.itemsize == 2 or highest > 255 else 1.0
    return np.clip(np.round(values * scale), 0, 255).astype(np.uint8)
