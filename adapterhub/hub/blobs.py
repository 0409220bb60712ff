"""The files of a hub, each named by its sha256 and never changed.

    blobs/ab/ab12...        a file
    incoming/XXXX           what is being received

A file is received under another name, and the disk has all of it before it is put in place: what is
in `blobs` is complete. It is put there within the transaction that first grants it to a repository,
so it cannot be collected in between; see housekeeping.py.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from adapterhub.files.atomic import sync_folder
from adapterhub.hub.refusals import FullDiskError, TooManyBytesError

MAX_REGULAR_LISTED = 1 << 20  # bytes: larger files are listed as those of LFS
_PIECE = 1 << 20
_Result = TypeVar("_Result")
_FREE_BYTES = 64 << 20  # that stay free, for the database


@dataclass(frozen=True)
class BlobInfo:
    """A file: its sha256, its size, and git's hash of it.

    The upstream of a mirror says only one of the hashes; the other one is "".
    """

    sha256: str
    size: int
    git_sha1: str

    @property
    def is_large(self) -> bool:
        """Whether it is listed as a file of LFS, by its sha256."""
        if self.sha256 and self.git_sha1:
            return self.size > MAX_REGULAR_LISTED
        return bool(self.sha256)

    @property
    def key(self) -> str:
        """The hash that names it in lists."""
        return self.sha256 or self.git_sha1


@dataclass(frozen=True)
class StagedBlob:
    """A file that was received and is not yet in its place."""

    path: Path
    info: BlobInfo


class BlobFolder:
    """The files of a hub.

    Args:
        root: the folder of the hub.
    """

    def __init__(self, root: Path) -> None:
        self.folder = root / "blobs"
        self.incoming = root / "incoming"

    def create(self) -> None:
        """Create the folders."""
        for folder in (self.folder, self.incoming):
            folder.mkdir(mode=0o700, exist_ok=True)
        for number in range(256):
            (self.folder / f"{number:02x}").mkdir(mode=0o700, exist_ok=True)

    def path(self, sha256: str) -> Path:
        """Return where a file is."""
        assert len(sha256) == 64, sha256
        return self.folder / sha256[:2] / sha256

    def has(self, sha256: str) -> bool:
        """Return whether a file is in its place."""
        return self.path(sha256).exists()

    def read(self, sha256: str, most: int) -> bytes:
        """Read the first bytes of a file; none of one that a mirror has not fetched."""
        if not sha256:
            return b""
        with open(self.path(sha256), "rb") as file:
            return file.read(most)

    def receive(self, most: int, limit: str) -> BlobReceiver:
        """Begin to receive a file of at most `most` bytes; `limit` says whose limit that is."""
        return BlobReceiver(self.incoming / secrets.token_hex(12), most, limit)

    def stage(self, data: bytes) -> StagedBlob:
        """Receive a small file at once."""
        with self.receive(len(data), "") as receiver:
            receiver.write(data)
            return receiver.finish()

    def receive_from(self, download: Callable[[Path], BlobInfo]) -> StagedBlob:
        """Receive a file that `download` writes to a new path and verifies."""
        path = self.incoming / secrets.token_hex(12)
        try:
            info = _written(lambda: download(path))
            with open(path, "rb") as file:
                _written(lambda: os.fsync(file.fileno()))
            os.chmod(path, 0o400)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return StagedBlob(path, info)

    def put(self, staged: StagedBlob) -> None:
        """Put a file that was received in its place; call it inside a transaction that writes."""
        target = self.path(staged.info.sha256)
        if target.exists():
            staged.path.unlink(missing_ok=True)
            return
        os.replace(staged.path, target)
        sync_folder(target.parent)

    def remove(self, sha256: str) -> None:
        """Remove a file; one that is being sent is sent to its end."""
        self.path(sha256).unlink(missing_ok=True)

    def all(self) -> Iterator[str]:
        """Yield the digests of all files."""
        for folder in sorted(self.folder.iterdir()):
            yield from sorted(path.name for path in folder.iterdir() if len(path.name) == 64)


class BlobReceiver:
    """Receives one file; without `finish`, leaving the context removes what was received."""

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
            TooManyBytesError: they are too many.
            FullDiskError: there is no room for them.
        """
        if self.size + len(data) > self.most:
            raise TooManyBytesError(f"the file has more than {self.most:,} bytes, {self.limit}")
        _written(lambda: self._write(data))
        self._sha256.update(data)
        self.size += len(data)

    def finish(self) -> StagedBlob:
        """Keep it, with its hashes; the caller puts it in place, or removes it."""
        sha256 = self.keep()
        return StagedBlob(self.path, BlobInfo(sha256, self.size, git_sha1_of(self.path, self.size)))

    def keep(self) -> str:
        """Wait until the disk has all of it, and return its sha256; the caller moves it."""
        _written(lambda: os.fsync(self._file.fileno()))
        self._file.close()
        os.chmod(self.path, 0o400)
        self._done = True
        return self._sha256.hexdigest()

    def discard(self) -> None:
        """Remove what was received."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]


def discard_staged(staged: StagedBlob) -> None:
    """Remove a file that was received and is not wanted; one in its place stays."""
    with suppress(OSError):
        staged.path.unlink(missing_ok=True)


def require_room(folder: Path, size: int) -> None:
    """Refuse what the disk has no room for, before it is sent.

    Raises:
        FullDiskError: it has not.
    """
    if size + _FREE_BYTES > shutil.disk_usage(folder).free:
        raise FullDiskError


def git_sha1_of(path: Path, size: int) -> str:
    """Return git's hash of a file: that of its contents behind their length."""
    digest = hashlib.sha1(b"blob %d\0" % size)
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _written(write: Callable[[], _Result]) -> _Result:
    try:
        return write()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise FullDiskError from None
        raise
