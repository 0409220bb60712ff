"""Pictures: any common file becomes 8-bit RGB, upright; what cannot be one is refused.

What becomes of a picture:

    EXIF orientation      the picture is turned upright
    transparency          is filled with white
    gray, CMYK, palette   is converted
    16 bits a channel     keeps its 8 upper bits
    animation             its first frame
    more than 89 million pixels, 32-bit values, a cut or broken file, any other format: refused
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

# Pillow has formats that run other programs, or that are not for pictures of strangers.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")


def open_picture(data: bytes) -> Image:
    """Decode a picture: RGB with 8 bits a channel, upright, on white.

    Raises:
        ValueError: it is no picture, is broken or too large, or has values without a known range.
    """
    from PIL import Image, UnidentifiedImageError  # slow to import

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about metadata that is not used
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            image.load()
            return _to_rgb(image)
        except UnidentifiedImageError:
            raise ValueError(f"is no picture ({', '.join(FORMATS)})") from None
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            most = f"{Image.MAX_IMAGE_PIXELS:,}"
            raise ValueError(f"has more than {most} pixels: scale it down") from None
        except _Refused:
            raise
        except Exception as error:  # the decoders of Pillow have no common error
            raise ValueError(f"is broken: {error}") from error


class _Refused(ValueError):
    """A picture is intact, and of no use."""


def _to_rgb(image: Image) -> Image:
    from PIL import Image as images
    from PIL import ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # Pillow would cut off what is above 255
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
