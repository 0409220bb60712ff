"""Pictures of every kind become 8-bit RGB; those that cannot are refused with a reason."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from adapterhub.data.media_formats import PICTURE_FORMATS, PICTURE_SUFFIXES, open_picture

RED, WHITE = (255, 0, 0), (255, 255, 255)


def encoded(image, form="PNG", **options):
    """Return the bytes of an image file."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def pixel(data, place=(0, 0)):
    image = open_picture(data)
    assert image.mode == "RGB"
    return image.getpixel(place)


@pytest.mark.parametrize("form", PICTURE_FORMATS)
def test_every_format_is_read(form):
    options = {"lossless": True} if form == "WEBP" else {}
    found = pixel(encoded(Image.new("RGB", (4, 3), RED), form, **options))
    assert np.abs(np.subtract(found, RED)).max() <= 2  # JPEG


def test_every_suffix_is_of_a_format():
    known = {s for s, form in Image.registered_extensions().items() if form in PICTURE_FORMATS}
    assert set(PICTURE_SUFFIXES) <= known


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr"])
def test_every_mode_is_converted(mode):
    image = Image.new("RGB", (4, 4), WHITE)
    image = image.convert(mode)
    form = {"CMYK": "TIFF", "YCbCr": "TIFF"}.get(mode, "PNG")
    assert min(pixel(encoded(image, form))) >= 250


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(mode):
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 0)).convert(mode)
    options = {"transparency": image.getpixel((0, 0))} if mode == "P" else {}
    assert pixel(encoded(image, **options)) == WHITE


def test_a_picture_is_turned_upright():
    image = Image.new("RGB", (6, 2))
    image.paste(RED, (0, 0, 1, 2))  # its left edge
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise
    upright = open_picture(encoded(image, exif=exif))
    assert upright.size == (2, 6)
    assert upright.getpixel((0, 0)) == RED
    assert upright.getpixel((0, 5)) == (0, 0, 0)


@given(st.integers(0, 0xFFFF))
def test_16_bits_keep_their_upper_8(value):
    image = Image.fromarray(np.full((3, 3), value, np.uint16))
    for form in ("PNG", "TIFF"):
        assert pixel(encoded(image, form)) == (value >> 8,) * 3


def test_an_animation_is_its_first_frame():
    frames = [Image.new("RGB", (4, 4), color) for color in (RED, (0, 0, 255))]
    for form in ("GIF", "PNG", "TIFF"):
        data = encoded(frames[0], form, save_all=True, append_images=frames[1:])
        assert pixel(data) == RED


def huge_png(width, height):
    """Return a small file that claims to be a huge picture."""

    def chunk(kind, content):
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    lines = zlib.compress(bytes(100))
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return start + chunk(b"IDAT", lines) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [10_000, 60_000])
def test_a_decompression_bomb_is_refused(side):
    with pytest.raises(ValueError, match="has more than 89,478,485 pixels: scale it down"):
        open_picture(huge_png(side, side))


@pytest.mark.parametrize("form", PICTURE_FORMATS)
def test_a_cut_file_is_refused(form):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), form)
    for share in (0.1, 0.5, 0.9):
        with pytest.raises(ValueError, match=r"is broken|is not an image"):
            open_picture(data[: int(share * len(data))])


@given(st.binary(max_size=200), st.sampled_from(PICTURE_FORMATS), st.integers(0, 80))
def test_damaged_bytes_give_a_picture_or_a_reason(noise, form, start):
    data = encoded(Image.new("RGB", (8, 8), RED), form)
    reason = ""
    try:
        image = open_picture(data[:start] + noise + data[start + len(noise) :])
    except ValueError as error:
        reason = str(error)
    else:
        assert image.mode == "RGB"
    assert reason.startswith(("is broken", "is not an image", "has ")) or not reason


@pytest.mark.parametrize("data", [b"", b"a text", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"<svg></svg>"])
def test_other_files_are_refused(data):
    with pytest.raises(ValueError, match=r"is not an image \(PNG, JPEG"):
        open_picture(data)


def test_values_without_a_range_are_refused():
    with pytest.raises(ValueError, match="has floating-point values"):
        open_picture(encoded(Image.fromarray(np.ones((2, 2), np.float32)), "TIFF"))
    with pytest.raises(ValueError, match="has 32-bit values"):
        open_picture(encoded(Image.fromarray(np.full((2, 2), 1 << 20, np.int32)), "TIFF"))
