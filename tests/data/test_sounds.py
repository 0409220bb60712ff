"""Sounds: what is decoded, resampled, and refused."""

from __future__ import annotations

import struct
import sys

import numpy as np
import pytest
from scipy.signal import chirp

from adapterhub.data.media_formats import Sound, open_sound
from adapterhub.errors import ConfigError
from tests.kit import media

TONE = media.tone(440, 0.25)


def told(data):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - each test compares the message
        open_sound(data)
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"format": "WAV", "subtype": "FLOAT"}, 0),
        ({"format": "WAV", "subtype": "PCM_16"}, 1e-4),
        ({"format": "WAV", "subtype": "PCM_U8"}, 1e-2),
        ({"format": "WAVEX", "subtype": "PCM_24"}, 1e-6),
        ({"format": "FLAC"}, 1e-4),
        ({"format": "OGG"}, 0.2),
        ({"format": "MP3"}, 0.2),
    ],
)
def test_formats(options, tolerance):
    sound = open_sound(media.encoded_sound(TONE, **options))
    assert sound.samples.dtype == np.float32
    assert sound.rate == media.RATE
    assert sound.seconds == pytest.approx(0.25, abs=0.1)
    if options["format"] != "MP3":  # it may begin with silence
        np.testing.assert_allclose(sound.samples, TONE, atol=tolerance + 1e-9)


def test_channels_become_their_mean():
    stereo = np.stack([TONE, np.zeros_like(TONE)], axis=1)
    sound = open_sound(media.encoded_sound(stereo, subtype="FLOAT"))
    np.testing.assert_allclose(sound.samples, TONE / 2, atol=1e-7)


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_another_rate_is_resampled(rate):
    """A chirp up to 3 kHz, which all rates have, is that of the new rate."""
    times = np.arange(rate) / rate
    expected = chirp(np.arange(16_000) / 16_000, 100, 1, 3000)
    found = Sound(chirp(times, 100, 1, 3000).astype(np.float32), rate).at(16_000)
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    inside = slice(400, -400)
    assert np.abs(found[inside] - expected[inside]).max() < 0.01
    assert Sound(TONE, media.RATE).at(media.RATE) is TONE


def test_frequencies_that_a_rate_cannot_have_are_removed():
    high = np.sin(2 * np.pi * 15_000 * np.arange(48_000) / 48_000).astype(np.float32)
    assert np.abs(Sound(high, 48_000).at(16_000)[200:-200]).max() < 0.01


@pytest.mark.parametrize("data", [b"", b"no sound", b"\x89PNG\r\n\x1a\n" + bytes(99)])
def test_other_files_are_refused(data):
    assert told(data) == "is not audio (WAV, FLAC, OGG, MP3)"


def test_formats_that_are_not_for_strangers_are_refused():
    for name in ("AIFF", "AU", "CAF"):
        assert "is not audio" in told(media.encoded_sound(TONE, format=name))


@pytest.mark.parametrize("name", ["WAV", "FLAC", "OGG"])
def test_a_cut_file_is_broken(name):
    data = media.encoded_sound(TONE, format=name)
    assert told(data[: len(data) * 3 // 5]).startswith("is broken: ")


def test_a_stream_that_does_not_know_its_length_is_read():
    data = media.encoded_sound(TONE)
    unknown = data[:4] + struct.pack("<I", 0xFFFFFFFF) + data[8:]
    assert len(open_sound(unknown).samples) == len(TONE)


def test_nothing_to_hear_and_no_numbers():
    assert told(media.encoded_sound(TONE[:0])) == "has no samples"
    wrong = TONE.copy()
    wrong[7] = np.nan
    assert told(media.encoded_sound(wrong, subtype="FLOAT")) == "has values that are not numbers"


def test_a_file_that_becomes_too_large(monkeypatch):
    monkeypatch.setattr("adapterhub.data.media_formats.MOST_VALUES", 3000)
    assert told(media.encoded_sound(TONE)) == "has more than 3,000 values: split it"


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(ConfigError, match="soundfile, which is not installed") as error:
        open_sound(b"")
    assert 'pip install "adapterhub[audio]"' in str(error.value)
