"""Decode images and audio of common formats, and reject the rest.

Images become 8-bit RGB:

    EXIF orientation      the image is turned upright
    transparency          is filled with white
    gray, CMYK, palette   is converted
    16 bits a channel     keeps its 8 upper bits
    animation             its first frame
    more than 89 million pixels, 32-bit values, a truncated or broken file, any other format:
    rejected

Audio becomes one channel of 32-bit samples:

    several channels      their mean
    any bits a sample     values from -1 to 1
    another rate          `Sound.at` resamples it with a polyphase filter
    empty audio, non-finite values, more than 268 million values, a truncated or broken file,
    any other format: rejected
"""

from __future__ import annotations

import io
import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adapterhub.errors import ConfigError

if TYPE_CHECKING:
    from numpy import float32
    from numpy.typing import NDArray
    from PIL.Image import Image

    Samples = NDArray[float32]


# Pillow has formats that run other programs, or that are unsafe for untrusted images.
PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm",
                    ".pgm")  # fmt: skip
SOUND_FORMATS = ("WAV", "FLAC", "OGG", "MP3")
SOUND_SUFFIXES = (".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3")
MEDIA_SUFFIXES = (*PICTURE_SUFFIXES, *SOUND_SUFFIXES)


def open_picture(data: bytes) -> Image:
    """Decode an image: RGB with 8 bits a channel, upright, on white.

    Raises:
        ValueError: the data is not an image, is broken or too large, or has values without a known
            range.
    """
    from PIL import Image, UnidentifiedImageError  # slow to import

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about unused metadata
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            image = Image.open(io.BytesIO(data), formats=PICTURE_FORMATS)
            image.load()
            return _to_rgb(image)
        except UnidentifiedImageError:
            raise ValueError(f"is not an image ({', '.join(PICTURE_FORMATS)})") from None
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            most = f"{Image.MAX_IMAGE_PIXELS:,}"
            raise ValueError(f"has more than {most} pixels: scale it down") from None
        except _Refused:
            raise
        except Exception as error:  # Pillow's decoders have no common error class
            raise ValueError(f"is broken: {error}") from error


class _Refused(ValueError):
    """The image is intact but not usable."""


def _to_rgb(image: Image) -> Image:
    from PIL import Image as images
    from PIL import ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # Pillow would clip values above 255
        image = _of_16_bits(image)
    if image.mode == "F":
        raise _Refused("has floating-point values: convert it to 8 or 16 bits")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = images.new("RGBA", image.size, "white")
        image = images.alpha_composite(white, image)
    return image.convert("RGB")


def _of_16_bits(image: Image) -> Image:
    import numpy as np
    from PIL import Image as images

    values = np.asarray(image)
    if values.min() < 0 or values.max() > 0xFFFF:
        raise _Refused("has 32-bit values: convert it to 8 or 16 bits")
    return images.fromarray((values >> 8).astype(np.uint8))


MOST_VALUES = 1 << 28  # 1 GiB once decoded: 4.6 hours of one channel at 16 kHz
_VARIANTS = {"WAVEX": "WAV", "RF64": "WAV", "MPEG": "MP3"}  # of the names of libsndfile
_UNKNOWN_SIZES = (0, 0xFFFFFFFF)  # written by programs that do not know the final length


@dataclass(frozen=True, eq=False)
class Sound:
    """Decoded audio of one channel.

    Attributes:
        samples: the values, from -1 to 1: (samples,).
        rate: the number of samples per second.
    """

    samples: Samples
    rate: int

    @property
    def seconds(self) -> float:
        """The duration in seconds."""
        return len(self.samples) / self.rate

    def at(self, rate: int) -> Samples:
        """Return the samples at another rate.

        A polyphase filter removes the frequencies above the range of the new rate:
        https://docs.scipy.org/doc/scipy/reference/generated/scipy.signal.resample_poly.html
        """
        if rate == self.rate:
            return self.samples
        from scipy.signal import resample_poly  # slow to import

        common = math.gcd(rate, self.rate)
        samples: Samples = resample_poly(self.samples, rate // common, self.rate // common)
        return samples


def open_sound(data: bytes) -> Sound:
    """Decode audio: the mean of its channels, at its original rate.

    Raises:
        ValueError: the data is not audio, is broken, too large or empty, or has non-finite values.
        ConfigError: the library that decodes audio is not installed.
    """
    try:
        import soundfile
    except ImportError:
        raise ConfigError(
            "audio files need the library soundfile, which is not installed",
            hint='pip install "adapterhub[audio]"',
        ) from None
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            return _decoded(file, data)
    except soundfile.LibsndfileError as error:
        known = data[:4] in (b"RIFF", b"RF64", b"fLaC", b"OggS") or data[:3] == b"ID3"
        if known:
            raise ValueError(f"is broken: {error.error_string}") from error
        raise ValueError(f"is not audio ({', '.join(SOUND_FORMATS)})") from None


def _decoded(file: Any, data: bytes) -> Sound:
    """Return the mean of the channels of an open file; `data` are its bytes."""
    import numpy as np

    if _VARIANTS.get(file.format, file.format) not in SOUND_FORMATS:
        raise ValueError(f"is not audio ({', '.join(SOUND_FORMATS)})")
    if file.frames * file.channels > MOST_VALUES:
        raise ValueError(f"has more than {MOST_VALUES:,} values: split it")
    if missing := _cut_bytes(data):
        raise ValueError(f"is broken: its last {missing:,} bytes are missing")
    values = file.read(dtype="float32", always_2d=True)
    if not len(values):
        raise ValueError("has no samples")
    if not np.isfinite(values).all():
        raise ValueError("has values that are not numbers")
    if file.format != "MP3" and len(values) < file.frames:  # the length of an MP3 is an estimate
        raise ValueError(f"is broken: it has {len(values):,} of {file.frames:,} samples")
    return Sound(values.mean(axis=1, dtype=np.float32), int(file.samplerate))


def _cut_bytes(data: bytes) -> int:
    """Return the number of missing bytes of a WAV file: libsndfile reads truncated files."""
    size = int.from_bytes(data[4:8], "little")
    if data[:4] != b"RIFF" or size in _UNKNOWN_SIZES:
        return 0
    return max(size + 8 - len(data), 0)
