"""The folders of a user: cache, configuration, data and state.

Also files that are created once and cached, each under the digest of its inputs.
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
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errors of a full disk."""
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


def user_folder(kind: Kind) -> Path:
    """Return the user's folder for a kind of files, or a temporary one without a home folder.

    Raises:
        ConfigError: neither is available.
    """
    try:
        folder: Path = getattr(platformdirs, f"user_{kind}_path")("adapterhub", appauthor=False)
    except RuntimeError:  # raised by newer releases of platformdirs
        return _temporary_home() / kind
    return folder if folder.is_absolute() else _temporary_home() / kind


def state_folder() -> Path:
    """Return `$ADAPTERHUB_STATE`, or else the user's state folder."""
    folder = os.environ.get(STATE_VARIABLE)
    return Path(folder) if folder else user_folder("state")


def expanded(path: str | Path) -> Path:
    """Return a path with `~` expanded, or unchanged if the user lacks a home folder."""
    try:
        return Path(path).expanduser()
    except (RuntimeError, ValueError):
        return Path(path)


def sync_file(handle: IO[Any]) -> None:
    """Flush the contents of an open file to the disk.

    Network disks without such a call are skipped.

    Raises:
        OSError: the disk did not store all of the data.
    """
    handle.flush()
    try:
        os.fsync(handle.fileno())
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def sync_folder(folder: Path) -> None:
    """Make renames durable if the disk supports it; Windows, CIFS, sshfs and others do not.

    The files were synced before, so without it a power failure can only restore older names.

    Raises:
        OSError: the disk is full.
    """
    if os.name == "nt":
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in FULL_DISK:
            raise


def is_file(name: str | Path) -> bool:
    """Return whether a user's text names a file.

    The text may be of any length, with any characters, such as a URL or `KEY=VALUE`. A text that no
    file system accepts does not name a file; `Path` would raise an OSError.
    """
    return os.path.isfile(name)


def is_folder(name: str | Path) -> bool:
    """Return whether a user's text, as in `is_file`, names a folder."""
    return os.path.isdir(name)


def is_there(name: str | Path) -> bool:
    """Return whether a user's text, as in `is_file`, names a file or a folder."""
    return os.path.exists(name)


@functools.cache
def _temporary_home() -> Path:
    """Return a folder that no other user can write to, for container users without a home."""
    hint = "set HOME to a folder"
    try:
        user = os.getuid() if hasattr(os, "getuid") else os.getlogin()
        folder = Path(tempfile.gettempdir()) / f"adapterhub-{user}"
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ConfigError(f"this user has no home folder: {error}", hint=hint) from error
    own = hasattr(os, "getuid") and status.st_uid == os.getuid() and not status.st_mode & 0o077
    if not stat.S_ISDIR(status.st_mode) or (not own and os.name != "nt"):
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
    """A folder of files that can be created again, such as a cache of the user.

    A file is named by the digest of its key and by its size. A file appears when it is complete,
    and never changes: if several processes create the same file, one wins. A file whose size
    differs from its name is damaged, and is created again. If the files exceed `limit` bytes in
    total, the least recently used ones are deleted. An entry may also be a folder of files, whose
    size is their total.

    Attributes:
        folder: the folder, which is created with the first file.
        key: everything that all files depend on, as JSON, such as the version of their format.
        limit: the maximum bytes of all files.
    """

    folder: Path
    key: Any
    limit: int

    def find(self, key: Any) -> Path | None:
        """Return the file of a key, or None if it is missing or damaged."""
        for path in self.folder.glob(f"{self._name(key)}.*"):
            with contextlib.suppress(FileNotFoundError):  # another process deletes it
                if path.suffix == f".{_size(path)}":
                    with contextlib.suppress(OSError):  # a read-only cache
                        os.utime(path)  # records the last use
                    return path
        return None

    def make(self, key: Any, write: Callable[[BinaryIO], object]) -> Path:
        """Return the file of a key, writing it first if it is missing.

        `key` holds everything that the file depends on, as JSON.

        Raises:
            OSError: the file cannot be written.
        """

        def write_file(draft: Path) -> None:
            with open(draft, "xb") as file:
                write(file)
                sync_file(file)

        return self._make(key, write_file)

    def make_folder(self, key: Any, write: Callable[[Path], object]) -> Path:
        """Return the folder of a key; if it is missing, `write` first creates it at a path.

        Raises:
            OSError: the folder cannot be written.
        """
        return self._make(key, write)

    def _make(self, key: Any, write: Callable[[Path], object]) -> Path:
        if (existing := self.find(key)) is not None:
            return existing
        self.folder.mkdir(parents=True, exist_ok=True)
        draft = self.folder / f"{secrets.token_hex(8)}.new"
        try:
            write(draft)
            path = self.folder / f"{self._name(key)}.{_size(draft)}"
            try:
                os.replace(draft, path)
            except OSError:  # the folder exists: another process was first, or it is damaged
                if (existing := self.find(key)) is not None:
                    return existing
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
        """Delete the least recently used files until the rest is within the limit.

        A draft that was not written to for a day belongs to a killed process.
        """
        files = []
        for path in self.folder.glob("*.*"):
            with contextlib.suppress(OSError):  # another process deletes it
                status = path.stat()
                if path.suffix != ".new":
                    files.append((status.st_mtime_ns, _size(path), path))
                elif status.st_mtime < time.time() - _DRAFT_SECONDS:
                    _delete(path)
        size = sum(each for _, each, _ in files)
        for _, each, path in sorted(files):
            if size <= self.limit:
                return
            if path != newest:
                with contextlib.suppress(OSError):  # Windows does not delete mapped files
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
    """Return whether this name is a manifest's name for a backbone outside the Hub."""
    return _LOCAL.fullmatch(name) is not None
