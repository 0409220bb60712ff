"""Atomic folder writes, file reads with size and checksum limits, and digests of files.

A folder is written under a hidden name next to its destination, `.adapterhub-HASH-XXXX`, and moved
there with one rename. Staging folders left by a killed process are removed by the next save to the
same destination. On systems that cannot exchange two folders atomically, a kill between two renames
leaves the old folder as `.adapterhub-HASH-XXXX-old`; the next save or read restores it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from adapterhub.config.user_folders import FULL_DISK, sync_file, sync_folder
from adapterhub.errors import OutputError, not_fetched
from adapterhub.files.schema import CRLF, shorten, with_lf

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


_LONGEST_LINE = 16 << 20  # bytes: a row of texts, labels and probabilities
_PIECE = 1 << 22  # bytes of a large file held in memory
_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{8}\.new", re.DOTALL)  # names used by `replace_file`
_START = 1025  # bytes: a longer file is not a git-lfs pointer


class UnreadableError(Exception):
    """The reason why a file cannot be used; callers turn it into a FileError with its name."""


@contextlib.contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Convert an OSError into an OutputError with a hint."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"cannot write {folder}: {error.strerror or error}",
            expected="a writable location with enough free space",
            hint=_remedy(folder, error.errno),
        ) from error


def _remedy(folder: Path, code: int | None) -> str:
    if code in FULL_DISK:
        return f"free some space or save to another disk; {folder.parent} is unchanged"
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"make {folder.parent} writable or save to another folder"
    if code in (errno.ENAMETOOLONG, errno.EINVAL):
        return "use a shorter folder name with plain characters"
    return "save to another folder"


def check_place(folder: Path, overwrite: bool, replaceable: Collection[str]) -> None:
    """Check that an output folder can be created or replaced.

    A folder is replaced only if all its files are `replaceable`, so a wrong path cannot delete
    other work.

    `replaceable` are the names of the files that an overwrite may delete.

    Raises:
        OutputError: the folder exists and cannot be replaced, or its name is not usable.
    """
    if folder.name in ("", ".."):
        raise OutputError(
            f"{str(folder)!r} does not name a new folder",
            expected="a separate folder for each adapter",
            hint="out/my-adapter",
        )
    if not os.path.lexists(folder):
        return
    if not overwrite:
        raise OutputError(
            f"{folder} already exists",
            expected="a folder that does not exist",
            hint="another folder name"
            + (
                ", or --overwrite (overwrite=True) to replace the adapter in it"
                if replaceable
                else ""
            ),
        )
    if folder.is_symlink() or not folder.is_dir():
        raise OutputError(
            f"{folder} is not a folder and is not replaced",
            expected="an adapter folder",
            hint="another folder name",
        )
    other_files = sorted(name for name in finished_names(folder) if name not in replaceable)
    if other_files:
        raise OutputError(
            f"{folder} contains other files and is not replaced",
            expected="only the files of an adapter",
            hint="move these files elsewhere, or use another folder name",
            offenders=shorten(other_files),
        )


@contextlib.contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """Yield a new hidden folder next to `folder`, and remove it on exit.

    Removes stale staging folders of earlier, killed processes first.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    restore_old(folder)
    for leftover in _leftovers(folder):
        with _try_lock(leftover) as acquired:
            if acquired:
                shutil.rmtree(leftover, ignore_errors=True)
    staged = folder.with_name(f"{_prefix(folder)}{secrets.token_hex(8)}")
    staged.mkdir()
    try:
        with _try_lock(staged):
            yield staged
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def restore_old(folder: Path) -> None:
    """Restore a folder that a killed save had moved aside before the new one was in place."""
    if os.path.lexists(folder):
        return
    for leftover in _leftovers(folder):
        if leftover.name.endswith("-old"):
            with contextlib.suppress(OSError):
                os.rename(leftover, folder)
            return


def _prefix(folder: Path) -> str:
    # A hash: names with a common prefix must not share leftovers, and a name may have full length.
    return f".adapterhub-{hashlib.sha256(os.fsencode(folder.name)).hexdigest()[:16]}-"


def _leftovers(folder: Path) -> list[Path]:
    try:
        entries = list(os.scandir(folder.parent))
    except OSError:
        return []
    prefix = _prefix(folder)
    return sorted(
        Path(entry.path)
        for entry in entries
        if entry.name.startswith(prefix) and entry.is_dir(follow_symlinks=False)
    )


@contextlib.contextmanager
def _try_lock(path: Path) -> Iterator[bool]:
    """Yield whether the lock of a folder or file was acquired.

    The process that writes it holds the lock; the system releases it when that process ends.
    Without file locks (Windows) the lock is never acquired. A link is not followed.
    """
    if fcntl is None:
        yield False
        return
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        acquired = True
    except OSError:
        acquired = False
    try:
        yield acquired
    finally:
        os.close(descriptor)


def write_files(staged: Path, payload: Mapping[str, bytes | Iterable[bytes]]) -> None:
    """Write the files of `payload`, whole or in pieces, into `staged` and fsync them."""
    for name, data in payload.items():
        with open(staged / name, "xb") as handle:
            for piece in (data,) if isinstance(data, bytes) else data:
                handle.write(piece)
            sync_file(handle)
    sync_folder(staged)


def replace_file(path: Path, data: bytes, *, private: bool = False) -> None:
    """Replace a file atomically: a crash leaves either the old or the new content.

    The new content is first in a separate file, `.NAME.XXXX.new`, so another writer's file or a
    link is never written to. A `private` file is never readable for others, not even before a
    chmod. A killed process leaves the new file (`finished_names`, `remove_unfinished`).
    """
    staged = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    mode = 0o600 if private else 0o666
    with (
        open(staged, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as handle,
        _try_lock(staged),
    ):
        try:
            handle.write(data)
            sync_file(handle)
            os.replace(staged, path)
        except BaseException:
            with contextlib.suppress(OSError):
                staged.unlink()
            raise


def finished_names(folder: Path) -> list[str]:
    """List a folder without unfinished files of a killed `replace_file`."""
    return [name for name in os.listdir(folder) if not _UNFINISHED.fullmatch(name)]


def remove_unfinished(folder: Path) -> None:
    """Remove unfinished files of a killed `replace_file`."""
    for path in (folder / name for name in os.listdir(folder) if _UNFINISHED.fullmatch(name)):
        with _try_lock(path) as acquired, contextlib.suppress(OSError):
            if acquired:  # not being written by a process
                path.unlink()


def sync_files(folder: Path) -> None:
    """Flush the files of `folder`, written by other code, and their names to the disk."""
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        with open(path, "rb+") as handle:  # Windows cannot flush a read-only descriptor
            sync_file(handle)
    sync_folder(folder)


def put_in_place(staged: Path, folder: Path, overwrite: bool) -> None:
    """Rename `staged` to `folder` in one step.

    After an exchange the old folder is at `staged`, and the caller removes it.
    """
    if not (overwrite and folder.exists()):
        os.rename(staged, folder)
    elif not _exchange(staged, folder):
        old = staged.with_name(f"{staged.name}-old")
        with _try_lock(folder):  # so that another process does not remove it as a leftover
            os.rename(folder, old)
            try:
                os.rename(staged, folder)
            except OSError:
                os.rename(old, folder)
                raise
            shutil.rmtree(old, ignore_errors=True)
    sync_folder(folder.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders atomically with Linux's renameat2(RENAME_EXCHANGE); False if unsupported."""
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


def is_plain_folder(path: Path) -> bool:
    """Return whether a path is a folder, and not a link to one."""
    try:
        status = os.lstat(path)
    except (OSError, ValueError):
        return False
    junction = getattr(stat, "IO_REPARSE_TAG_MOUNT_POINT", None)  # a link of Windows
    linked = junction is not None and getattr(status, "st_reparse_tag", 0) == junction
    return stat.S_ISDIR(status.st_mode) and not linked


@contextlib.contextmanager
def open_regular(
    path: Path, min_bytes: int, max_bytes: int, place: int | None = None
) -> Iterator[BinaryIO]:
    """Open a regular file of a size in this range; symbolic links are not followed.

    An empty file is never accepted. `place` is an open folder that the path is in.

    Raises:
        UnreadableError: the file is missing, too small, too large, or not a regular file.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        handle = os.fdopen(os.open(path, flags | getattr(os, "O_BINARY", 0), dir_fd=place), "rb")
    except FileNotFoundError:
        raise UnreadableError("missing") from None
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror or error}") from None
    with handle:
        status = os.fstat(handle.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableError("not a regular file")
        if pointer := not_fetched(handle.read(_START)):
            raise UnreadableError(pointer)
        handle.seek(0)
        if status.st_size > max_bytes:
            raise UnreadableError(f"{status.st_size} bytes, more than {max_bytes}")
        if status.st_size < max(min_bytes, 1):
            raise UnreadableError(
                f"truncated: {status.st_size} of at least {max(min_bytes, 1)} bytes"
            )
        yield handle


def pieces_of(handle: BinaryIO, size: int, most: int = _PIECE) -> Iterator[bytes]:
    """Yield the next bytes of an open file in pieces, since it may be larger than memory.

    Raises:
        UnreadableError: the file is shorter.
    """
    while size:
        try:
            piece = handle.read(min(size, most))
        except OSError as error:
            raise UnreadableError(f"cannot be read: {error.strerror or error}") from None
        if not piece:
            raise UnreadableError(f"truncated: {size} bytes fewer than it had")
        size -= len(piece)
        yield piece


def read_lines(path: Path, max_bytes: int) -> list[bytes]:
    """Read the lines of a regular file; stop at a line longer than any written one.

    Raises:
        UnreadableError: the file or a line is too large, or the file is empty, missing or not
            regular.
    """
    with open_regular(path, 1, max_bytes) as handle:
        lines: list[bytes] = []
        while line := handle.readline(_LONGEST_LINE):
            if len(line) == _LONGEST_LINE:
                raise UnreadableError(f"line {len(lines) + 1} has more than {_LONGEST_LINE} bytes")
            lines.append(line)
    return lines


def read_file(path: Path, min_bytes: int, max_bytes: int, sha256: str | None) -> bytes:
    """Read a regular file, checking its size before reading and its sha256 after.

    Raises:
        UnreadableError: the file is missing, too small, too large, altered, or not a regular file.
    """
    with open_regular(path, min_bytes, max_bytes) as handle:
        try:
            data = handle.read(os.fstat(handle.fileno()).st_size + 1)
        except OSError as error:
            raise UnreadableError(f"cannot be read: {error.strerror or error}") from None
    digest = hashlib.sha256(data).hexdigest()
    if sha256 not in (None, digest) and hashlib.sha256(with_lf(data)).hexdigest() == sha256:
        raise UnreadableError(CRLF)
    check_sha256(digest, sha256, len(data))
    return data


def check_sha256(actual: str, expected: str | None, size: int) -> None:
    """Compare the digest of a file with the expected one, unless that is None.

    Raises:
        UnreadableError: they differ.
    """
    if expected is not None and actual != expected:
        raise UnreadableError(
            f"sha256 differs from the expected one ({size} bytes): altered or truncated"
        )


@dataclass(frozen=True, slots=True)
class FileDigest:
    """The identity of the bytes of a file, or of its first `size` bytes."""

    size: int
    sha256: str


def file_digest(path: Path, most: int | None = None) -> FileDigest:
    """Compute the digest of a file, or of its first `most` bytes; use little memory."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while chunk := file.read(_PIECE if most is None else min(_PIECE, most - size)):
            digest.update(chunk)
            size += len(chunk)
    return FileDigest(size, digest.hexdigest())
