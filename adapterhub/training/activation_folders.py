"""The folders of recorded outputs of layers: list and delete them, without loading torch.

Where a limit requires it, those that have not been used for longest are deleted.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from adapterhub.config.user_folders import user_folder


@dataclass(frozen=True)
class ActivationEntry:
    """The recorded states of one backbone and one set of rows, on disk."""

    folder: Path
    size: int
    used: float


def activations_folder() -> Path:
    """Return the folder of all recorded states in the user's cache."""
    return user_folder("cache") / "activations"


def activation_entries() -> list[ActivationEntry]:
    """List what is recorded on disk, the least recently used first."""
    with contextlib.suppress(OSError):
        entries = [entry for path in activations_folder().iterdir() for entry in _entry(path)]
        return sorted(entries, key=lambda entry: entry.used)
    return []


def _entry(folder: Path) -> Iterator[ActivationEntry]:
    with contextlib.suppress(OSError):  # another process deletes it
        stats = [file.stat() for file in folder.iterdir()]
        used = max((stat.st_mtime for stat in stats), default=folder.stat().st_mtime)
        yield ActivationEntry(folder, sum(stat.st_size for stat in stats), used)


def clear_activations() -> int:
    """Delete all recorded states, and return how many bytes that were."""
    entries = activation_entries()
    for entry in entries:
        shutil.rmtree(entry.folder, ignore_errors=True)
    return sum(entry.size for entry in entries if not entry.folder.exists())


def has_room(size: int, limit: int) -> bool:
    """Return whether so many bytes fit; older states are deleted where the limit requires it.

    Args:
        size: the bytes to write.
        limit: the most bytes that all states may take.
    """
    if size > limit:
        return False
    entries = activation_entries()
    total = sum(entry.size for entry in entries)
    for entry in entries:
        if total + size <= limit:
            break
        shutil.rmtree(entry.folder, ignore_errors=True)
        total -= entry.size
    return size <= _free(activations_folder()) // 2


def _free(folder: Path) -> int:
    """Return the free bytes of the disk that a folder is, or will be, on."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
