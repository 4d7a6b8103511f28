"""Sizes from headers, and pixels, of every kind of image file."""

from __future__ import annotations

import base64
import struct
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps

from xlength.datasets.image_sizes import ImageError, load_image, read_image_size

ORIENTATION = 0x0112


def gradient(width: int = 40, height: int = 24) -> Image.Image:
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, 255 - x], axis=-1).astype(np.uint8))


def with_orientation(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "MPO"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_size_and_pixels_are_upright_in_every_orientation(
    tmp_path: Path, kind: str, orientation: int
) -> None:
    path = str(tmp_path / "image")
    gradient().save(path, kind, exif=with_orientation(orientation))
    with Image.open(path) as image:
        expected = ImageOps.exif_transpose(image).convert("RGB")
    loaded = load_image(path)
    assert read_image_size(path) == (loaded.height, loaded.width)
    assert loaded.size == ((24, 40) if orientation > 4 else (40, 24))
    assert np.array_equal(np.asarray(loaded), np.asarray(expected))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP", "JPEG2000", "PPM"])
def test_the_header_says_the_size_and_no_pixel_is_decoded(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "image")
    gradient().save(path, kind)

    decoded = []
    load = ImageFile.ImageFile.load
    monkeypatch.setattr(
        ImageFile.ImageFile, "load", lambda image: decoded.append(kind) or load(image)
    )
    assert read_image_size(path) == (24, 40)
    assert decoded == []
    load_image(path)
    assert decoded


@pytest.mark.parametrize("kind", ["exif", "xmp"])
def test_an_orientation_behind_the_pixels_of_a_png_counts(tmp_path: Path, kind: str) -> None:
    """The standard allows the chunk there, and Pillow, which transformers uses, honours it."""
    buffer = BytesIO()
    gradient().save(buffer, "PNG")
    if kind == "exif":
        name, data = b"eXIf", with_orientation(6).tobytes().removeprefix(b"Exif\x00\x00")
    else:
        name = b"iTXt"
        data = b'XML:com.adobe.xmp\x00\x00\x00\x00\x00<x tiff:Orientation="6"/>'
    chunk = struct.pack(">I", len(data)) + name + data
    chunk += struct.pack(">I", zlib.crc32(name + data))
    content = buffer.getvalue()
    path = tmp_path / "late.png"
    path.write_bytes(content[:-12] + chunk + content[-12:])
    with Image.open(path) as image:
        assert ImageOps.exif_transpose(image).size == (24, 40)
    assert read_image_size(str(path)) == (40, 24)
    assert load_image(str(path)).size == (24, 40)


def test_an_unreadable_orientation_is_no_orientation(tmp_path: Path) -> None:
    path = str(tmp_path / "image.jpg")
    gradient().save(path, "JPEG", exif=b"Exif\x00\x00broken beyond repair")
    assert read_image_size(path) == (24, 40)
    assert load_image(path).size == (40, 24)


def test_sixteen_bit_grey_is_scaled_not_clipped(tmp_path: Path) -> None:
    values = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    expected = np.round(values / 257).astype(np.uint8)
    for name in ("grey.png", "grey.tif"):
        path = str(tmp_path / name)
        Image.fromarray(values).save(path)
        assert read_image_size(path) == (16, 16)
        loaded = np.asarray(load_image(path))
        assert loaded.shape == (16, 16, 3)
        assert np.array_equal(loaded[..., 0], expected)


def test_cmyk_palette_grey_alpha_and_float_all_become_rgb(tmp_path: Path) -> None:
    image = gradient()
    kinds = {
        "cmyk.jpg": image.convert("CMYK"),
        "palette.png": image.convert("P"),
        "grey.png": image.convert("L"),
        "bits.png": image.convert("1"),
        "float.tif": Image.fromarray(np.asarray(image.convert("L"), dtype=np.float32) / 255),
    }
    for name, one in kinds.items():
        path = str(tmp_path / name)
        one.save(path)
        loaded = load_image(path)
        assert (loaded.mode, loaded.size) == ("RGB", (40, 24)), name
        assert read_image_size(path) == (24, 40), name
        assert np.asarray(loaded).std() > 30, name


def test_transparency_is_laid_on_white(tmp_path: Path) -> None:
    path = str(tmp_path / "clear.png")
    Image.new("RGBA", (5, 5), (0, 0, 0, 0)).save(path)
    assert np.asarray(load_image(path)).min() == 255


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_the_first_frame_of_an_animation_counts(tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "moving")
    frames = [Image.new("RGB", (30, 20), colour) for colour in ("red", "lime", "blue")]
    frames[0].save(path, kind, save_all=True, append_images=frames[1:], duration=40, lossless=True)
    assert read_image_size(path) == (20, 30)
    assert load_image(path).getpixel((3, 3)) == (255, 0, 0)


@pytest.mark.parametrize("size", [(1, 1), (20000, 20), (20, 20000)])
def test_the_smallest_and_the_longest_images_are_images(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    path = str(tmp_path / "odd.png")
    Image.new("RGB", size).save(path)
    assert read_image_size(path) == size[::-1]
    assert load_image(path).size == size


def test_a_data_url_is_an_image_too() -> None:
    buffer = BytesIO()
    gradient().save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    assert read_image_size(url) == (24, 40)
    assert load_image(url).size == (40, 24)
    with pytest.raises(ImageError, match=r"data:image.*characters\): broken base64"):
        read_image_size("data:image/png;base64,%%%" + "A" * 500)


def test_each_unusable_image_ends_in_one_error_that_names_its_path(tmp_path: Path) -> None:
    whole = BytesIO()
    gradient(400, 300).save(whole, "JPEG")
    files = {
        "text.png": b"this is no image",
        "empty.jpg": b"",
        "header.png": b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        for read in (read_image_size, load_image):
            with pytest.raises(ImageError, match=f"{name}: broken image: "):
                read(str(tmp_path / name))
    for read in (read_image_size, load_image):
        with pytest.raises(ImageError, match=r"none\.png: missing image"):
            read(str(tmp_path / "none.png"))
        with pytest.raises(ImageError, match="https://.*download it first"):
            read("https://example.org/a.png")
        with pytest.raises(ImageError, match=f"{tmp_path.name}: "):
            read(str(tmp_path))
    (tmp_path / "cut.jpg").write_bytes(whole.getvalue()[:2000])
    assert read_image_size(str(tmp_path / "cut.jpg")) == (300, 400)
    with pytest.raises(ImageError, match=r"cut\.jpg: broken image: .*truncated"):
        load_image(str(tmp_path / "cut.jpg"))


def test_an_image_too_large_to_be_honest_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "bomb.png")
    Image.new("1", (400, 400)).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(ImageError, match=r"bomb\.png: broken image: .*decompression bomb"):
        read_image_size(path)
