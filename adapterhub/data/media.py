"""Image and audio files as examples, with a class, from a folder or a table.

A folder has one folder for each class: `photos/CLASS/*.png`. A table has a column with file names,
relative to the folder of the table, or with the bytes of files, as in Parquet files and datasets of
the Hub.

Every file is decoded once when the data is read, so that all broken files are reported before
training, and again for each batch: only names and digests stay in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from adapterhub.config.user_folders import is_folder
from adapterhub.data.columns import Wants, choose_columns
from adapterhub.data.examples import EmptyCell, Grouped, parse_label, read_rows, refuse
from adapterhub.data.media_formats import Sound
from adapterhub.data.options import DataOptions
from adapterhub.errors import DataError, not_fetched, read_problem

T = TypeVar("T")
Decode = Callable[[bytes], T]
ParseLabel = Callable[[object], "tuple[str | float | None, str]"]
"""Returns the label of a cell, or None and the problem with it."""


@dataclass(frozen=True)
class MediaFile(Grouped):
    """An image or audio file, with or without a label.

    Attributes:
        sha256: the digest of its bytes; files are compared only by digest and label.
        label: the class, or the transcript.
        name: the name shown to the user.
        path: the path of the file; "" if its bytes are in `data`.
        data: the bytes, if they are in a table.
        seconds: the duration of audio.
    """

    sha256: str
    label: str | None = None
    name: str = field(default="", compare=False)
    path: str = field(default="", compare=False)
    data: bytes = field(default=b"", compare=False, repr=False)
    seconds: float = field(default=0.0, compare=False)

    def with_label(self, label: str) -> MediaFile:
        """Return the same file with another label."""
        return replace(self, label=label)

    def decoded(self, decode: Decode[T]) -> T:
        """Decode the file, which may have changed since it was read.

        Raises:
            DataError: the file is missing or broken.
        """
        try:
            return decode(self.data or Path(self.path).read_bytes())
        except OSError as error:
            raise DataError(read_problem(Path(self.path), error)) from error
        except ValueError as error:
            raise DataError(f"{self.name} {error}") from error


def open_media(name: str, decode: Decode[T]) -> MediaFile:
    """Return the file at a path typed on the command line.

    Raises:
        DataError: the file cannot be read or decoded.
    """
    try:
        return opened_cell(name, None, Path(), decode)
    except ValueError as error:
        raise DataError(str(error)) from error


def read_media(
    source: str,
    options: DataOptions,
    split: str,
    wants: Wants,
    decode: Decode[T],
    *,
    labelled: bool,
    parse: ParseLabel = parse_label,
) -> list[MediaFile]:
    """Read the files of a folder, a table or a Hub dataset, in order; each is decoded once.

    `decode` raises a ValueError that describes the error in the bytes of a file.

    Raises:
        DataError: the source is missing, empty or malformed, or files are missing or broken.
    """
    options = choose_columns(source, options, split, wants, labelled=labelled).options
    folder = Path(source) if is_folder(source) else Path(source).parent

    def build(cell: object, *labels: object) -> MediaFile:
        label, problem = parse(labels[0]) if labels else (None, "")
        refuse(problem)
        return opened_cell(cell, str(label) if labels else None, folder, decode)

    columns = [options.text_column, *([options.label_column] if labelled else [])]
    return read_rows(source, options, split, columns, build)


def opened_cell(cell: object, label: str | None, folder: Path, decode: Decode[T]) -> MediaFile:
    """Return the file of a cell: its name, relative to `folder`, or {bytes, path}.

    Raises:
        ValueError: the file is missing or broken.
    """
    name, data = cell, b""
    if isinstance(cell, dict):
        name, data = cell.get("path") or "a file without a name", cell.get("bytes") or b""
    if not isinstance(name, str) or not name.strip():
        raise ValueError(EmptyCell("the name of a file is missing"))
    if "://" in name and not data:
        raise ValueError(f"{name!r} is an address: download it, and name the file")
    if any("\ud800" <= letter <= "\udfff" for letter in name):
        raise ValueError(f"{name!r} is not Unicode: rename the file")
    path = "" if data else str(folder / name)
    try:
        content = data or Path(path).read_bytes()
        if pointer := not_fetched(content):
            raise ValueError(f"is {pointer}")
        decoded = decode(content)
    except OSError as error:
        raise ValueError(read_problem(Path(path), error)) from None
    except ValueError as error:
        raise ValueError(f"{name!r} {error}") from error
    seconds = decoded.seconds if isinstance(decoded, Sound) else 0.0
    return MediaFile(hashlib.sha256(content).hexdigest(), label, name, path, data, seconds)
