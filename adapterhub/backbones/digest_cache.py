"""Digests of files, remembered in the user's cache until the files change.

A file is the same if its path, inode, size and times of modification and change are the same. Two
changes within one tick of a file system's clock may have the same time, so files that have just
changed are not remembered.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from adapterhub.config.user_folders import KeyedFiles, user_folder

TICK = 2_000_000_000  # nanoseconds: the longest, of FAT
_MOST_BYTES = 256 << 20  # of all results in a folder


def remembered(
    files: Sequence[Path], key: str, compute: Callable[[], Any], folder: str = "weights"
) -> Any:
    """Return what was computed from files before, or compute it now; it consists of plain JSON.

    It depends on the files and on `key`; `folder` is the one in the cache.
    """
    facts = [key, *(_identity(file) for file in files)]
    results = KeyedFiles(user_folder("cache") / folder, "json", _MOST_BYTES)
    with contextlib.suppress(OSError, ValueError):
        if (path := results.find(facts)) is not None:
            return json.loads(path.read_bytes())
    result = compute()
    unchanged = facts == [key, *(_identity(file) for file in files)]
    if unchanged and all(map(_is_settled, files)):
        with contextlib.suppress(OSError):
            results.make(facts, lambda file: file.write(json.dumps(result).encode()))
    return result


def _identity(file: Path) -> list[Any]:
    path = file.resolve()
    stat = path.stat()
    return [
        os.fspath(path),
        stat.st_dev,
        stat.st_ino,
        stat.st_size,
        stat.st_mtime_ns,
        stat.st_ctime_ns,
    ]


def _is_settled(file: Path) -> bool:
    stat = file.stat()
    return time.time_ns() - max(stat.st_mtime_ns, stat.st_ctime_ns) > TICK
