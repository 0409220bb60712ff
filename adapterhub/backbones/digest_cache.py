"""Digests of files, remembered in the user's cache until the files change.

A file is the same if its path, inode, size and times of modification and change are the same. Two
changes within one tick of a file system's clock may have the same time, so files that have just
changed are not remembered.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from adapterhub.config.user_folders import user_folder

TICK = 2_000_000_000  # nanoseconds: the longest, of FAT


def remembered(
    files: Sequence[Path], key: str, compute: Callable[[], Any], folder: str = "weights"
) -> Any:
    """Return what was computed from files before, or compute it now; it consists of plain JSON.

    Args:
        files: the files that the result depends on.
        key: what else it depends on.
        compute: computes it.
        folder: the folder in the cache.
    """
    facts = [key, *(_identity(file) for file in files)]
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    path = user_folder("cache") / folder / f"{name}.json"
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_bytes())
    result = compute()
    unchanged = facts == [key, *(_identity(file) for file in files)]
    if unchanged and all(map(_is_settled, files)):
        with contextlib.suppress(OSError):
            _write(path, json.dumps(result).encode())
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


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{secrets.token_hex(8)}")
    staged.write_bytes(data)
    staged.replace(path)
