"""Files that are examples, and their formats: pictures become 8-bit RGB, sounds are decoded."""

import io
import os
import re
import struct
import sys
import zlib

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.signal import chirp

from adapterhub.data import media_formats
from adapterhub.data.columns import WANTS
from adapterhub.data.examples import data_hash
from adapterhub.data.media import read_media
from adapterhub.data.media_formats import PICTURE_FORMATS, Sound, open_picture, open_sound
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, DataError
from tests.kit import media
from tests.kit.data import write_json_lines, write_tsv


@pytest.fixture
def folder(tmp_path):
    return media.write_digits(tmp_path / "digits", classes=2, each=3)


def read(source, labelled=True, **options):
    data = DataOptions(**options)
    return read_media(str(source), data, "train", WANTS["images"], open_picture, labelled=labelled)


def told(source, **options):
    with pytest.raises(DataError) as error:
        read(source, **options)
    return str(error.value)


def test_a_folder_a_table_and_data_sets_are_the_same_data(folder, tmp_path, monkeypatch):
    files = read(folder)
    assert [f.label for f in files] == ["0"] * 3 + ["1"] * 3
    assert [f.name for f in files][:2] == ["0/0.png", "0/1.png"]
    rows = [(f.name, f.label) for f in files]
    table = read(write_tsv(folder / "all.tsv", rows, "image\tlabel"))
    assert table == files
    assert data_hash(table) == data_hash(files)
    cells = [{"bytes": (folder / f.name).read_bytes(), "path": f.name} for f in files]
    columns = {"image": cells, "label": [f.label for f in files]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "all.parquet")
    packed = read(tmp_path / "all.parquet")
    assert packed == files
    assert packed[0].decoded(open_picture).size == files[0].decoded(open_picture).size == (8, 8)
    columns = {"image": cells, "label": [int(f.label) for f in files]}
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["0", "1"])}
    data = datasets.Dataset.from_dict(columns, datasets.Features(features))
    monkeypatch.setattr(datasets, "load_dataset", lambda *arguments, **options: data)
    assert read("ylecun/mnist") == files


def test_every_invalid_file_is_told(folder):
    (folder / "1/0.png").write_bytes(b"not a picture")
    (folder / "1/1.png").write_bytes((folder / "1/1.png").read_bytes()[:60])
    names = ["0/0.png", "0/O.png", "1/0.png", "1/1.png", "https://host/a.png", ""]
    rows = [{"image": name, "label": "a"} for name in names]
    error = told(write_json_lines(folder / "all.jsonl", rows))
    lines = [line for line in error.splitlines() if "line " in line]
    assert [line.partition(":")[0].strip(" -") for line in lines] == [
        f"line {n}" for n in range(2, 7)
    ]
    for reason in ("no such file", "is not an image", "is broken", "download it", "missing"):
        assert reason in error


def test_a_picture_outside_of_the_folders_has_no_label(folder):
    (folder / "0/0.png").rename(folder / "loose.png")
    assert "file 6: the label is empty" in told(folder)
    assert [f.name for f in read(folder, labelled=False)][-1] == "loose.png"
    assert len(read(folder, skip_empty=True)) == 5
    os.symlink(folder / "gone.png", folder / "0/9.png")
    assert "no such file" in told(folder)


def test_names_that_are_no_unicode(folder):
    try:
        (folder / "0/0.png").rename(os.fsdecode(os.fsencode(folder) + b"/0/\xff.png"))
    except OSError:
        pytest.skip("this file system refuses such names")
    assert "is not Unicode: rename the file" in told(folder)


def test_a_file_that_changes_after_it_was_read(folder):
    first, second = read(folder)[:2]
    (folder / first.name).unlink()
    with pytest.raises(DataError, match="no such file"):
        first.decoded(open_picture)
    (folder / second.name).write_bytes(b"")
    with pytest.raises(DataError, match=r"0/1.png is not an image"):
        second.decoded(open_picture)


# Formats: what cannot be decoded is refused with a reason.


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


def test_every_mode_is_converted_and_what_is_transparent_is_white():
    for mode in ("1", "L", "P", "RGB", "CMYK", "YCbCr"):
        image = Image.new("RGB", (4, 4), WHITE).convert(mode)
        form = {"CMYK": "TIFF", "YCbCr": "TIFF"}.get(mode, "PNG")
        assert min(pixel(encoded(image, form))) >= 250, mode
    for mode in ("RGBA", "LA", "P"):
        image = Image.new("RGBA", (4, 4), (0, 0, 0, 0)).convert(mode)
        options = {"transparency": image.getpixel((0, 0))} if mode == "P" else {}
        assert pixel(encoded(image, **options)) == WHITE, mode


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


def huge_png(side):
    """Return a small file that claims to be a huge picture."""
    data = media.red_png(0)
    header = b"IHDR" + struct.pack(">II", side, side) + data[24:29]
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


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


# Sounds: what is decoded, resampled, and refused.


TONE = media.tone(440, 0.25)


def test_channels_become_their_mean():
    stereo = np.stack([TONE, np.zeros_like(TONE)], axis=1)
    sound = open_sound(media.encoded_sound(stereo, subtype="FLOAT"))
    np.testing.assert_allclose(sound.samples, TONE / 2, atol=1e-7)


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_another_rate_is_resampled(rate):
    """A chirp up to 3 kHz, which all rates have, is that of the new rate; 15 kHz are removed."""
    times = np.arange(rate) / rate
    expected = chirp(np.arange(16_000) / 16_000, 100, 1, 3000)
    found = Sound(chirp(times, 100, 1, 3000).astype(np.float32), rate).at(16_000)
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    assert np.abs(found[400:-400] - expected[400:-400]).max() < 0.01
    assert Sound(TONE, media.RATE).at(media.RATE) is TONE
    high = np.sin(2 * np.pi * 15_000 * np.arange(48_000) / 48_000).astype(np.float32)
    assert np.abs(Sound(high, 48_000).at(16_000)[200:-200]).max() < 0.01


SOUNDS = [
    ({"format": "WAV", "subtype": "FLOAT"}, 0),
    ({"format": "WAV", "subtype": "PCM_16"}, 1e-4),
    ({"format": "WAV", "subtype": "PCM_U8"}, 1e-2),
    ({"format": "WAVEX", "subtype": "PCM_24"}, 1e-6),
    ({"format": "FLAC"}, 1e-4),
    ({"format": "OGG"}, 0.2),
    ({"format": "MP3"}, 0.2),
]


@pytest.mark.parametrize(("options", "tolerance"), SOUNDS)
def test_formats_of_sounds(options, tolerance):
    data = media.encoded_sound(TONE, **options)
    sound = open_sound(data)
    assert sound.samples.dtype == np.float32
    assert sound.rate == media.RATE
    assert sound.seconds == pytest.approx(0.25, abs=0.1)
    if options["format"] != "MP3":  # it may begin with silence
        np.testing.assert_allclose(sound.samples, TONE, atol=tolerance + 1e-9)
    if options["format"] == "WAV":  # a stream that does not know its length
        unknown = data[:4] + struct.pack("<I", 0xFFFFFFFF) + data[8:]
        assert len(open_sound(unknown).samples) == len(TONE)


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(ConfigError, match="soundfile, which is not installed") as error:
        open_sound(b"")
    assert 'pip install "adapterhub[audio]"' in str(error.value)


FLOATS, LARGE = np.ones((2, 2), np.float32), np.full((2, 2), 1 << 20, np.int32)


NO_PICTURES = [
    *((data, "is not an image (PNG, JPEG") for data in
      (b"", b"a text", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"<svg></svg>")),
    (encoded(Image.fromarray(FLOATS), "TIFF"), "has floating-point values"),
    (encoded(Image.fromarray(LARGE), "TIFF"), "has 32-bit values"),
    *((huge_png(side), "has more than 89,478,485 pixels: scale it down") for side in
      (10_000, 60_000)),
]  # fmt: skip


@pytest.mark.parametrize(("data", "reason"), NO_PICTURES)
def test_other_files_and_decompression_bombs_are_refused(data, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        open_picture(data)
    known = {s for s, form in Image.registered_extensions().items() if form in PICTURE_FORMATS}
    assert set(media_formats.PICTURE_SUFFIXES) <= known


NO_NUMBER = np.where(np.arange(len(TONE)) == 7, np.nan, TONE)


NO_SOUNDS = [
    *((data, "is not audio (WAV, FLAC, OGG, MP3)") for data in
      (b"", b"no sound", b"\x89PNG\r\n\x1a\n" + bytes(99))),
    *((media.encoded_sound(TONE, format=name), "is not audio") for name in ("AIFF", "AU", "CAF")),
    *((media.encoded_sound(TONE, format=name), "is broken: ") for name in ("WAV", "FLAC", "OGG")),
    (media.encoded_sound(TONE[:0]), "has no samples"),
    (media.encoded_sound(NO_NUMBER, subtype="FLOAT"), "has values that are not numbers"),
    (media.encoded_sound(np.concatenate([TONE] * 2)), "has more than 5,000 values: split it"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "reason"), NO_SOUNDS)
def test_other_and_cut_sounds_are_refused(data, reason, monkeypatch):
    monkeypatch.setattr("adapterhub.data.media_formats.MOST_VALUES", 5000)
    cut = data[: len(data) * 3 // 5] if reason == "is broken: " else data
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}"):
        open_sound(cut)
