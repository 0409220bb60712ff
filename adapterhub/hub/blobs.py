"""The files of a hub, each named by its sha256 and never changed.

    blobs/ab/ab12...        a file
    incoming/XXXX           a file that is being received
    parts/UPLOAD/00001      a part of a large file, until all parts are here

A file is received under another name and synced to disk before it is moved to `blobs`, so every
file in `blobs` is complete. It is moved within the transaction that first grants it to a
repository, so it cannot be collected in between; see gc.py. A hub of several processes keeps its
files in a bucket: bucket_blobs.py.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, TypeVar

from adapterhub.config.user_folders import FULL_DISK, sync_file, sync_folder
from adapterhub.files.atomic import FileDigest, file_digest
from adapterhub.web.errors import FullDiskError, TooManyBytesError

MAX_REGULAR_LISTED = 1 << 20  # bytes: larger files are listed as LFS files
_PIECE = 1 << 20
_Result = TypeVar("_Result")
_INTACT_SECONDS, _MOST_INTACT = 600.0, 10_000
_FREE_BYTES = 64 << 20  # kept free for the database


@dataclass(frozen=True)
class BlobInfo:
    """A file: its sha256, its size, and git's hash of it.

    The upstream of a mirror lists only one of the hashes; the other one is "".
    """

    sha256: str
    size: int
    git_sha1: str

    @property
    def is_large(self) -> bool:
        """Whether it is listed as an LFS file, by its sha256."""
        if self.sha256 and self.git_sha1:
            return self.size > MAX_REGULAR_LISTED
        return bool(self.sha256)

    @property
    def key(self) -> str:
        """The hash that identifies it in lists."""
        return self.sha256 or self.git_sha1


@dataclass(frozen=True)
class StagedBlob:
    """A received file that is not yet in its final place."""

    path: Path
    info: BlobInfo


class Blobs(ABC):
    """The files of a hub.

    Args:
        incoming: the folder for files that this process is receiving.
    """

    def __init__(self, incoming: Path) -> None:
        self.incoming = incoming
        self._intact: dict[str, tuple[tuple[int, ...], float]] = {}  # states, and until when

    def size(self, sha256: str) -> int:
        """Return the size of a file in bytes; -1 if it does not exist."""
        return next(iter(self.state(sha256)), -1)

    @abstractmethod
    def state(self, sha256: str) -> tuple[int, ...]:
        """Return the size of a file and a stamp that changes on each write; empty if missing."""

    @abstractmethod
    def read(self, sha256: str, most: int) -> bytes:
        """Read the first bytes of a file; empty if a mirror has not fetched it."""

    @abstractmethod
    def copy(self, sha256: str, target: Path) -> None:
        """Copy a file to a new path.

        Raises:
            FileNotFoundError: the file does not exist.
        """

    @abstractmethod
    def file(self, sha256: str) -> AbstractContextManager[Path]:
        """Return a context that provides a file at a path."""

    @abstractmethod
    def open(self, sha256: str) -> BinaryIO:
        """Open a file for random access.

        Raises:
            FileNotFoundError: the file does not exist.
        """

    @abstractmethod
    def send(self, staged: StagedBlob) -> None:
        """Do the slow part of storing a file, before the transaction."""

    @abstractmethod
    def put(self, staged: StagedBlob) -> None:
        """Move a received file to its place; call it inside a transaction that writes.

        The caller discards any remainder afterwards.
        """

    @abstractmethod
    def remove(self, sha256: str) -> None:
        """Remove a file; downloads in progress still finish."""

    @abstractmethod
    def all(self) -> Iterator[str]:
        """Yield the digests of all files."""

    @abstractmethod
    def keep_part(self, upload: str, name: str, received: Path) -> None:
        """Keep a part of a large file, until the file is complete."""

    @abstractmethod
    def parts(self, upload: str) -> list[str]:
        """Return the numbers of the parts received so far."""

    @abstractmethod
    def read_part(self, upload: str, name: str) -> Iterator[bytes]:
        """Yield the bytes of a part."""

    @abstractmethod
    def drop_parts(self, upload: str) -> None:
        """Remove the parts of a file."""

    @abstractmethod
    def collect_uploads(self, before: float, *, dry_run: bool) -> int:
        """Remove incomplete uploads last written before a time; return their number."""

    def digest(self, sha256: str) -> FileDigest:
        """Read a file and return its digest and size."""
        with self.file(sha256) as path:
            return file_digest(path)

    def is_intact(self, info: BlobInfo) -> bool:
        """Return whether a file exists with the expected size and digest.

        The file is read for the check, unless it was read or received a few minutes ago and has not
        been written since.
        """
        try:
            state, now = self.state(info.sha256), time.monotonic()
            if state[:1] != (info.size,):
                return False
            checked, until = self._intact.get(info.sha256, ((), 0.0))
            if checked != state or until < now:
                if self.digest(info.sha256) != FileDigest(info.size, info.sha256):
                    return False
                self._note_intact(info.sha256, state)
        except OSError:
            return False
        return True

    def _note_intact(self, sha256: str, state: tuple[int, ...]) -> None:
        """Remember that a file was intact in this state."""
        if len(self._intact) >= _MOST_INTACT:
            self._intact.clear()
        self._intact[sha256] = state, time.monotonic() + _INTACT_SECONDS

    def receive(self, most: int, limit: str) -> BlobReceiver:
        """Start receiving a file of at most `most` bytes; `limit` names the limit in errors."""
        return BlobReceiver(self.incoming / secrets.token_hex(12), most, limit)

    def stage(self, data: bytes) -> StagedBlob:
        """Receive a small file at once."""
        with self.receive(len(data), "") as receiver:
            receiver.write(data)
            return receiver.finish()

    def receive_from(self, download: Callable[[Path], BlobInfo]) -> StagedBlob:
        """Store a file that `download` writes to a new path and verifies."""
        path = self.incoming / secrets.token_hex(12)
        try:
            info = _written(lambda: download(path))
            with open(path, "rb") as file:
                _written(lambda: sync_file(file))
            os.chmod(path, 0o400)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return StagedBlob(path, info)

    def require_room(self, size: int) -> None:
        """Refuse a file that does not fit on the disk, before it is sent.

        Raises:
            FullDiskError: the disk lacks the space.
        """
        if size + _FREE_BYTES > shutil.disk_usage(self.incoming).free:
            raise FullDiskError

    def close(self) -> None:  # noqa: B027
        """Release the resources of this process: none here."""


class BlobFolder(Blobs):
    """Files in a folder.

    Args:
        root: the folder of the hub.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root / "incoming")
        self.folder, self._parts = root / "blobs", root / "parts"

    def create(self) -> None:
        """Create the folders."""
        for folder in (self.folder, self.incoming):
            folder.mkdir(mode=0o700, exist_ok=True)
        for number in range(256):
            (self.folder / f"{number:02x}").mkdir(mode=0o700, exist_ok=True)

    def path(self, sha256: str) -> Path:
        """Return the path of a file."""
        assert len(sha256) == 64, sha256
        return self.folder / sha256[:2] / sha256

    def state(self, sha256: str) -> tuple[int, ...]:
        """Return the size of a file and a stamp that changes on each write; empty if missing."""
        try:
            status = self.path(sha256).stat()
        except OSError:
            return ()
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino

    def read(self, sha256: str, most: int) -> bytes:
        """Read the first bytes of a file; empty if a mirror has not fetched it."""
        if not sha256:
            return b""
        with open(self.path(sha256), "rb") as file:
            return file.read(most)

    def copy(self, sha256: str, target: Path) -> None:
        """Copy a file to a new path."""
        shutil.copyfile(self.path(sha256), target)

    def file(self, sha256: str) -> AbstractContextManager[Path]:
        """Return a context that provides a file at its own path."""
        return nullcontext(self.path(sha256))

    def open(self, sha256: str) -> BinaryIO:
        """Open a file for random access."""
        return open(self.path(sha256), "rb")

    def send(self, staged: StagedBlob) -> None:
        """Do nothing: storing a file is a rename."""

    def put(self, staged: StagedBlob) -> None:
        """Move a received file to its place; call it inside a transaction that writes.

        It replaces a file with the same name, which may be damaged.
        """
        target = self.path(staged.info.sha256)
        os.replace(staged.path, target)
        sync_folder(target.parent)
        self._note_intact(staged.info.sha256, self.state(staged.info.sha256))

    def remove(self, sha256: str) -> None:
        """Remove a file; downloads in progress still finish."""
        self.path(sha256).unlink(missing_ok=True)

    def all(self) -> Iterator[str]:
        """Yield the digests of all files."""
        for folder in sorted(self.folder.iterdir()):
            yield from sorted(path.name for path in folder.iterdir() if len(path.name) == 64)

    def keep_part(self, upload: str, name: str, received: Path) -> None:
        """Keep a part of a large file, until the file is complete."""
        folder = self._parts / upload
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        received.replace(folder / name)

    def parts(self, upload: str) -> list[str]:
        """Return the numbers of the parts received so far."""
        folder = self._parts / upload
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    def read_part(self, upload: str, name: str) -> Iterator[bytes]:
        """Yield the bytes of a part."""
        with open(self._parts / upload / name, "rb") as file:
            while piece := file.read(_PIECE):
                yield piece

    def drop_parts(self, upload: str) -> None:
        """Remove the parts of a file."""
        shutil.rmtree(self._parts / upload, ignore_errors=True)

    def collect_uploads(self, before: float, *, dry_run: bool) -> int:
        """Remove incomplete uploads last written before a time; return their number."""
        count = 0
        for place in (self.incoming, self._parts):
            for path in place.iterdir() if place.exists() else ():
                with suppress(FileNotFoundError):  # received and stored just now
                    inside = path.iterdir() if path.is_dir() else ()
                    if max(p.stat().st_mtime for p in (path, *inside)) < before:
                        count += 1
                        if not dry_run:
                            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return count


class BlobReceiver:
    """Receiver of one file; leaving the context without `finish` discards the data."""

    def __init__(self, path: Path, most: int, limit: str) -> None:
        self.path, self.most, self.limit = path, most, limit
        self.size = 0
        self._sha256 = hashlib.sha256()
        self._done = False
        self._file = _written(lambda: open(path, "xb", buffering=0))  # noqa: SIM115

    def __enter__(self) -> BlobReceiver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if not self._done:
            self.discard()

    def write(self, data: bytes) -> None:
        """Receive bytes.

        Raises:
            TooManyBytesError: the limit is exceeded.
            FullDiskError: the disk is full.
        """
        if self.size + len(data) > self.most:
            raise TooManyBytesError(f"the file has more than {self.most:,} bytes, {self.limit}")
        _written(lambda: self._write(data))
        self._sha256.update(data)
        self.size += len(data)

    def finish(self) -> StagedBlob:
        """Return the file with its hashes; the caller stores or discards it."""
        sha256 = self.keep()
        return StagedBlob(self.path, BlobInfo(sha256, self.size, git_sha1_of(self.path, self.size)))

    def keep(self) -> str:
        """Sync the file to disk and return its sha256; the caller moves it."""
        _written(lambda: sync_file(self._file))
        self._file.close()
        os.chmod(self.path, 0o400)
        self._done = True
        return self._sha256.hexdigest()

    def discard(self) -> None:
        """Remove the received data."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]


def discard_staged(staged: StagedBlob) -> None:
    """Remove a received file that is not needed; a stored file stays."""
    with suppress(OSError):
        staged.path.unlink(missing_ok=True)


def git_sha1_of(path: Path, size: int) -> str:
    """Return git's hash of a file, computed over its length and contents."""
    digest = hashlib.sha1(b"blob %d\0" % size)
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _written(write: Callable[[], _Result]) -> _Result:
    try:
        return write()
    except OSError as error:
        if error.errno in FULL_DISK:
            raise FullDiskError from None
        raise
