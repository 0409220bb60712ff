"""The bytes and texts of files, gzipped or not, in whatever encoding they have."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path

from adapterhub.data.decode import DecodedText, decode_file, decode_text
from adapterhub.errors import DataError, read_problem


def file_bytes(source: str) -> bytes:
    """Read a file, gzipped if its name ends in .gz.

    Raises:
        DataError: the file is missing, cannot be read, or is not a complete gzip file.
    """
    path = Path(source)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(read_problem(path, error)) from error
    try:
        return _decompress(source, data) if source.lower().endswith(".gz") else data
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{source} is not a complete gzip file: {error}") from error


def file_text(source: str, encoding: str | None = None) -> DecodedText:
    """Read a text file in a given encoding, or in the one that it seems to have.

    Raises:
        DataError: the file cannot be read, is empty or cannot be decoded.
    """
    decoded = decode_file(file_bytes(source), source, encoding)
    if not decoded.text.strip():
        raise DataError(f"{source} is empty")
    return decoded


def read_text(source: str, encoding: str | None = None) -> str:
    """Read a UTF-8 text file, or one in a given encoding, gzipped if its name ends in .gz.

    Raises:
        DataError: the file is missing, empty or not in this encoding.
    """
    if encoding is not None:
        return file_text(source, encoding).text
    text = decode_text(file_bytes(source), source)
    if not text.strip():
        raise DataError(f"{source} is empty")
    return text


def split_lines(text: str) -> list[str]:
    """Split a text into lines, which end in a line feed with or without a carriage return."""
    return [line.removesuffix("\r") for line in text.split("\n")]


def _decompress(source: str, data: bytes) -> bytes:
    limit = max(100 * len(data), 64 << 20)  # bytes
    with gzip.open(io.BytesIO(data)) as stream:
        text = stream.read(limit + 1)
    if len(text) > limit:
        raise DataError(
            f"{source} has {len(data)} bytes and decompresses to more than {limit}",
            expected="text, which decompresses to about 3 to 20 times its size",
            hint="decompress it yourself if you trust it",
        )
    return text
