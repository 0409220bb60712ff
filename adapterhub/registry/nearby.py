"""Folders with an adapter near the working directory: what a bare name may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from adapterhub.files.native import PEFT_FILES, find_adapter
from adapterhub.files.run_folder import names_in

_MOST_FOLDERS = 2_000  # that are looked at, for a hint in an error
_MOST_FOUND = 3


def holds_adapter(folder: Path) -> bool:
    """Return whether a folder has an adapter, that of a run or another library's included."""
    return find_adapter(folder) is not None or (folder / PEFT_FILES[0]).is_file()


def nearby_adapters(name: str) -> list[str]:
    """Return the folders with an adapter of this or a similar name, here or one folder below."""
    folders = {path: Path(path).name for path in islice(_folders(), _MOST_FOLDERS)}
    similar = difflib.get_close_matches(name, {*folders.values()}, n=_MOST_FOUND, cutoff=0.75)
    found = (path for near in similar for path in folders if folders[path] == near)
    return [*islice((path for path in found if holds_adapter(Path(path))), _MOST_FOUND)]


def _folders() -> Iterator[str]:
    """Yield the folders here and in those, as one types them."""
    here = _subfolders(Path())
    yield from (f"./{name}" for name in here)
    for name in here:
        yield from (f"{name}/{inner}" for inner in _subfolders(Path(name)))


def _subfolders(folder: Path) -> list[str]:
    return [name.removesuffix("/") for name in names_in(folder) if name.endswith("/")]
