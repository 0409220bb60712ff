"""The folders of a user: cache, configuration, data, and state, which is neither of them.

Also files that are made once and kept there, each under the digest of what it was made from.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal

import platformdirs

from adapterhub.errors import ConfigError, warn_user

STATE_VARIABLE = "ADAPTERHUB_STATE"
Kind = Literal["cache", "config", "data", "state"]
_DRAFT_SECONDS = 24 * 3600.0
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


def user_folder(kind: Kind) -> Path:
    """Return the user's folder for files of a kind, or a temporary one for a user without a home.

    Raises:
        ConfigError: there is neither.
    """
    try:
        folder: Path = getattr(platformdirs, f"user_{kind}_path")("adapterhub", appauthor=False)
    except RuntimeError:  # by newer releases of platformdirs
        return _temporary_home() / kind
    return folder if folder.is_absolute() else _temporary_home() / kind


def state_folder() -> Path:
    """Return `$ADAPTERHUB_STATE`, or else the user's state folder."""
    folder = os.environ.get(STATE_VARIABLE)
    return Path(folder) if folder else user_folder("state")


def expanded(path: str | Path) -> Path:
    """Return a path with the home folder for `~`; as it is where that user has none."""
    try:
        return Path(path).expanduser()
    except (RuntimeError, ValueError):
        return Path(path)


def sync_file(handle: IO[Any]) -> None:
    """Wait until the disk has what was written to an open file.

    A network disk without such a call is left to itself.

    Raises:
        OSError: the disk has not taken all of it.
    """
    handle.flush()
    try:
        os.fsync(handle.fileno())
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def is_file(name: str | Path) -> bool:
    """Return whether what a user gave names a file.

    It may be anything: a text of any length, with any characters, an address, or `KEY=VALUE`. What
    no file system takes as a name is the name of no file, where a `Path` raises an OSError.
    """
    return os.path.isfile(name)


def is_folder(name: str | Path) -> bool:
    """Return whether what a user gave, as in `is_file`, names a folder."""
    return os.path.isdir(name)


def is_there(name: str | Path) -> bool:
    """Return whether what a user gave, as in `is_file`, names a file or a folder."""
    return os.path.exists(name)


@functools.cache
def _temporary_home() -> Path:
    """Return a folder that no other user can write to, for a user of a container without a home."""
    hint = "set HOME to a folder"
    try:
        user = os.getuid() if hasattr(os, "getuid") else os.getlogin()
        folder = Path(tempfile.gettempdir()) / f"adapterhub-{user}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(f"this user has no home folder: {error}", hint=hint) from error
    own = hasattr(os, "getuid") and found.st_uid == os.getuid() and not found.st_mode & 0o077
    if not stat.S_ISDIR(found.st_mode) or (not own and os.name != "nt"):
        raise ConfigError(
            f"this user has no home folder, and others may write to {folder}", hint=hint
        )
    warn_user(
        f"this user has no home folder: {folder} has the cache, trusted keys and registry, and "
        "may be deleted at any time; to keep them, set HOME",
        stacklevel=2,
    )
    return folder


@dataclass(frozen=True)
class KeyedFiles:
    """A folder of files that can be made again, such as one of the user's cache.

    A file is named by the digest of its key and by its size. It appears when it is complete, and is
    never changed: of several processes that make the same one, one wins. A file of another size
    than in its name is damaged, and made again. When all files take more than `limit` bytes, those
    that were used longest ago are deleted. In place of a file there may be a folder of files, which
    has the size of all of them.

    Attributes:
        folder: the folder, which is created with the first file.
        key: what all files depend on, as JSON: such as the version of their format.
        limit: the most bytes of all files.
    """

    folder: Path
    key: Any
    limit: int

    def find(self, key: Any) -> Path | None:
        """Return the file of a key, or None if it is missing or damaged."""
        for path in self.folder.glob(f"{self._name(key)}.*"):
            with contextlib.suppress(FileNotFoundError):  # another process deletes it
                if path.suffix == f".{_size(path)}":
                    with contextlib.suppress(OSError):  # a cache that is only read
                        os.utime(path)  # the time of its last use
                    return path
        return None

    def make(self, key: Any, write: Callable[[BinaryIO], object]) -> Path:
        """Return the file of a key, which is written first if it is missing.

        `key` is what the file depends on, as JSON.

        Raises:
            OSError: the file cannot be written.
        """

        def write_file(draft: Path) -> None:
            with open(draft, "xb") as file:
                write(file)
                sync_file(file)

        return self._make(key, write_file)

    def make_folder(self, key: Any, write: Callable[[Path], object]) -> Path:
        """Return the folder of a key; if it is missing, `write` first makes it at a path.

        Raises:
            OSError: it cannot be written.
        """
        return self._make(key, write)

    def _make(self, key: Any, write: Callable[[Path], object]) -> Path:
        if (found := self.find(key)) is not None:
            return found
        self.folder.mkdir(parents=True, exist_ok=True)
        draft = self.folder / f"{secrets.token_hex(8)}.new"
        try:
            write(draft)
            path = self.folder / f"{self._name(key)}.{_size(draft)}"
            try:
                os.replace(draft, path)
            except OSError:  # a folder is there: another process was first, or it is damaged
                if (found := self.find(key)) is not None:
                    return found
                _delete(path)
                os.replace(draft, path)
        finally:
            _delete(draft)
        self._evict(path)
        return path

    def _name(self, key: Any) -> str:
        record = json.dumps([self.key, key], sort_keys=True)
        return hashlib.sha256(record.encode()).hexdigest()

    def _evict(self, newest: Path) -> None:
        """Delete the files that were used longest ago, until the others are within the limit.

        A draft that nobody has written to for a day is of a process that was killed.
        """
        files = []
        for path in self.folder.glob("*.*"):
            with contextlib.suppress(OSError):  # another process deletes it
                found = path.stat()
                if path.suffix != ".new":
                    files.append((found.st_mtime_ns, _size(path), path))
                elif found.st_mtime < time.time() - _DRAFT_SECONDS:
                    _delete(path)
        size = sum(each for _, each, _ in files)
        for _, each, path in sorted(files):
            if size <= self.limit:
                return
            if path != newest:
                with contextlib.suppress(OSError):  # Windows deletes no file that is mapped
                    _delete(path)
                    size -= each


def _size(path: Path) -> int:
    """Return the bytes of a file, or of the files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


_HUB_ID = re.compile(r"(?!\.)(?!.*(--|\.\.))[\w.-]+(/[\w.-]+)?")
NO_WEIGHTS = "--no-weights"
_LOCAL = re.compile(r"[\w.-]+--([0-9a-f]{12}|no-weights)")  # see anatomy/backbone.py, local_name


def is_hub_id(name: str) -> bool:
    """Return whether a name has the form of a Hub id: `name` or `owner/name`."""
    return _HUB_ID.fullmatch(name) is not None


def is_local_name(name: str) -> bool:
    """Return whether a manifest gives this name to a backbone that is not on the Hub."""
    return _LOCAL.fullmatch(name) is not None
