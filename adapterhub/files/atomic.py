"""Folders that are written whole or not at all, and files that are read with care.

A folder is written under a hidden name beside its place, `.adapterhub-PLACE-XXXX`, and one rename
puts it there. What a killed process left under such a name is removed by the next save to that
place. Where the system cannot exchange two folders, a kill between two renames leaves the old one
under `.adapterhub-PLACE-XXXX-old`, and the next save or read brings it back.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from adapterhub.errors import OutputError
from adapterhub.files.schema import shorten

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class UnreadableError(Exception):
    """Why one file cannot be used; the caller knows its name and turns it into a FileError."""


@contextlib.contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn the operating system's errors into an OutputError that says what to do."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"cannot write {folder}: {error.strerror or error}",
            expected="a writable place with enough free space",
            hint=_remedy(folder, error.errno),
        ) from error


def _remedy(folder: Path, code: int | None) -> str:
    if code in (errno.ENOSPC, errno.EDQUOT):
        return f"free some space, or save to another disk; nothing was left in {folder.parent}"
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"make {folder.parent} writable, or save to another folder"
    if code in (errno.ENAMETOOLONG, errno.EINVAL):
        return "use a shorter, plainer folder name"
    return "save to another folder"


def check_place(folder: Path, overwrite: bool, replaceable: Collection[str]) -> None:
    """Raise OutputError unless `folder` is free, or may be replaced.

    Only a folder that holds nothing but `replaceable` files may be: a wrong path deletes no work.
    """
    if folder.name in ("", ".."):
        raise OutputError(
            f"{str(folder)!r} does not name a new folder",
            expected="a folder of its own for each adapter",
            hint="out/my-adapter",
        )
    if not os.path.lexists(folder):
        return
    if not overwrite:
        raise OutputError(
            f"{folder} exists already",
            expected="a folder that does not exist",
            hint="another folder name"
            + (", or overwrite=True to replace the adapter in it" if replaceable else ""),
        )
    if folder.is_symlink() or not folder.is_dir():
        raise OutputError(
            f"{folder} is not a folder, so it is not replaced",
            expected="an adapter folder",
            hint="another folder name",
        )
    others = sorted(entry.name for entry in folder.iterdir() if entry.name not in replaceable)
    if others:
        raise OutputError(
            f"{folder} holds more than an adapter, so it is not replaced",
            expected="nothing but the files of an adapter",
            hint="move these away, or use another folder name",
            offenders=shorten(others),
        )


@contextlib.contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """A new hidden folder beside `folder`, gone at the end; what others left there goes first."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    restore_old(folder)
    for rest in _leftovers(folder):
        with _locked(rest) as free:
            if free:
                shutil.rmtree(rest, ignore_errors=True)
    staged = folder.with_name(f"{_prefix(folder)}{secrets.token_hex(8)}")
    staged.mkdir()
    try:
        with _locked(staged):
            yield staged
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def restore_old(folder: Path) -> None:
    """Bring back the folder that a save took away and was killed before it put the new one in."""
    if os.path.lexists(folder):
        return
    for rest in _leftovers(folder):
        if rest.name.endswith("-old"):
            with contextlib.suppress(OSError):
                os.rename(rest, folder)
            return


def _prefix(folder: Path) -> str:
    # Two names of one start must not share leftovers, and a name may be as long as a name can be.
    return f".adapterhub-{hashlib.sha256(os.fsencode(folder.name)).hexdigest()[:16]}-"


def _leftovers(folder: Path) -> list[Path]:
    try:
        entries = list(os.scandir(folder.parent))
    except OSError:
        return []
    start = _prefix(folder)
    found = [e for e in entries if e.name.startswith(start) and e.is_dir(follow_symlinks=False)]
    return sorted(Path(entry.path) for entry in found)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Whether the lock of a folder could be taken: a process that still writes there holds it, and
    the system frees it with the process. Without such locks (Windows) nothing is free."""
    if fcntl is None:
        yield False
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = True
    except OSError:
        free = False
    try:
        yield free
    finally:
        os.close(descriptor)


def write_files(staged: Path, payload: Mapping[str, bytes]) -> None:
    """Write the files of `payload` into `staged`, and wait until the disk has them."""
    for name, data in payload.items():
        with open(staged / name, "xb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
    _sync_folder(staged)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file such that a kill leaves the old one or the new one."""
    staged = path.with_name(f".{path.name}.new")
    with open(staged, "wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(staged, path)


def sync_files(folder: Path) -> None:
    """Wait until the disk has the files of `folder`, which other code wrote, and their names."""
    for path in sorted(folder.iterdir()):
        _sync(path, os.O_RDWR)  # Windows flushes no descriptor that is read-only
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    """Make renames durable; Windows cannot open a folder and needs no such call."""
    if os.name != "nt":
        _sync(folder, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(staged: Path, folder: Path, overwrite: bool) -> None:
    """Rename `staged` to `folder` in one step.

    After an exchange the old folder is at `staged`, and the caller removes it.
    """
    if not (overwrite and folder.exists()):
        os.rename(staged, folder)
    elif not _exchange(staged, folder):
        old = staged.with_name(f"{staged.name}-old")
        with _locked(folder):  # nobody shall take it for a leftover
            os.rename(folder, old)
            try:
                os.rename(staged, folder)
            except OSError:
                os.rename(old, folder)
                raise
            shutil.rmtree(old, ignore_errors=True)
    # The new folder is sound and in place: without this a power cut may bring the old one back.
    with contextlib.suppress(OSError):
        _sync_folder(folder.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step by Linux's renameat2(RENAME_EXCHANGE); False if unsupported."""
    if not sys.platform.startswith("linux"):
        return False
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None:
        return False
    at_cwd, rename_exchange = -100, 2
    if swap(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), rename_exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(second))


def read_file(path: Path, least: int, most: int, sha256: str | None) -> bytes:
    """The bytes of a regular file; its size is checked before it is read, its sha256 after."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        with os.fdopen(os.open(path, flags | getattr(os, "O_BINARY", 0)), "rb") as handle:
            status = os.fstat(handle.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UnreadableError("not a regular file")
            if status.st_size > most:
                raise UnreadableError(f"{status.st_size} bytes, more than {most}")
            if status.st_size == 0 or status.st_size < least:
                raise UnreadableError(
                    f"truncated: {status.st_size} of at least {max(least, 1)} bytes"
                )
            data = handle.read(status.st_size + 1)
    except FileNotFoundError:
        raise UnreadableError("missing") from None
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror or error}") from None
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise UnreadableError(
            f"its sha256 is not the expected one ({len(data)} bytes): altered or truncated"
        )
    return data
