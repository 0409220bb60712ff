"""Folders of pictures or sound as tables: a row for each file, its class is the folder it is in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from adapterhub.data.pictures import SUFFIXES
from adapterhub.data.sounds import SOUND_SUFFIXES
from adapterhub.data.table import Table
from adapterhub.errors import DataError

METADATA = ("metadata.csv", "metadata.tsv", "metadata.jsonl", "metadata.parquet")


def metadata_file(source: str) -> str | None:
    """Return the table in a folder that describes its files, or None if it has none.

    Its name is that of the library datasets.
    """
    paths = (Path(source) / name for name in METADATA)
    return next((str(path) for path in paths if path.is_file()), None)


def read_folder(source: str) -> Table:
    """Read the names of the pictures and sounds in a folder, each with the folder that it is in.

    The class of a file is the name of its first folder below `source`. Links are followed. Hidden
    files are left out, and files of other kinds are counted.

    Raises:
        DataError: there is no picture and no sound.
    """
    root = Path(source)
    names, others = [], 0
    for path in _files(root, {root.resolve()}):
        if path.suffix.lower() in (*SUFFIXES, *SOUND_SUFFIXES):
            names.append(path.relative_to(root))
        else:
            others += 1
    if not names:
        raise DataError(
            f"the folder {source} has no pictures and no sound",
            expected=f"files that end in {', '.join((*SUFFIXES, *SOUND_SUFFIXES))}, in one folder "
            "for each class",
        )
    columns: dict[str, list[object]] = {
        "file": [name.as_posix() for name in names],
        "label": [name.parts[0] if len(name.parts) > 1 else None for name in names],
    }
    classes = len({label for label in columns["label"] if label is not None})
    skipped = (f"{others:,} other files are left out",) * bool(others)
    return Table(
        source,
        "file",
        tuple(columns),
        range(1, len(names) + 1),
        columns.__getitem__,
        form=f"{classes:,} folders",
        header=False,
        notes=skipped,
    )


def _files(folder: Path, seen: set[Path]) -> Iterator[Path]:
    """Yield the files below a folder, sorted by name; a folder that links lead back to, once."""
    for path in sorted(folder.iterdir(), key=lambda each: each.name):
        if path.name.startswith("."):
            continue
        if not path.is_dir():
            yield path
        elif (real := path.resolve()) not in seen:
            yield from _files(path, seen | {real})
