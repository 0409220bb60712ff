"""The files of a hub of several processes, as objects in a bucket.

    blobs/ab/ab12...        a file
    parts/UPLOAD/00001      a part of a large file, until all parts are here

A file is received on the disk of one process and uploaded before the transaction that grants it,
because other writers wait for the transaction. Within the transaction only its existence is
checked, because it may have been collected in between. Clients download it directly from the
bucket, by a signed address that expires after some minutes.
"""

from __future__ import annotations

import io
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, cast

from adapterhub.errors import ConfigError
from adapterhub.hub.blobs import Blobs, StagedBlob
from adapterhub.registry.bucket import open_bucket, start_of_error
from adapterhub.registry.store import is_bucket
from adapterhub.web.errors import UnreachedBucketError

_PIECE = 4 << 20
_BUFFER = 64 << 10
_SIGNED = timedelta(minutes=10)
_NO_PAGE: Any = {
    "Content-Type": "application/octet-stream",
    "Content-Disposition": "attachment",
    "Cache-Control": "private, no-transform",
}
"""Headers that make browsers save a file: its contents may be a page written by anyone."""


class _MissingError(FileNotFoundError):
    """The object does not exist."""


class BlobBucket(Blobs):
    """Files in a bucket.

    Args:
        url: s3://bucket/prefix, gs://bucket/prefix or az://container/prefix.
        objects: an obstore store to use instead of the URL's.

    Raises:
        ConfigError: the URL is not of these forms, or the library is not installed.
    """

    def __init__(self, url: str, objects: Any = None) -> None:
        if not is_bucket(url):
            raise ConfigError(
                f"{url!r} is not a bucket", expected="--blobs s3://BUCKET/PREFIX, gs:// or az://"
            )
        super().__init__(Path(tempfile.mkdtemp(prefix="adapterhub-hub-")))
        self.url = url.rstrip("/")
        self._objects = objects if objects is not None else open_bucket(self.url)

    def state(self, sha256: str) -> tuple[int, ...]:
        """Return the size of a file and a stamp that changes on each write; empty if missing."""
        with self._reached():
            try:
                meta = self._objects.head(_place(sha256))
            except FileNotFoundError:
                return ()
        written = int(1000 * meta["last_modified"].timestamp())
        return int(meta["size"]), hash(meta["e_tag"]), written

    def read(self, sha256: str, most: int) -> bytes:
        """Read the first bytes of a file; empty if a mirror has not fetched it."""
        if not sha256 or not most:
            return b""
        try:
            return self.part(sha256, 0, most)
        except UnreachedBucketError:
            if self.size(sha256) == 0:  # buckets return no range of an empty object
                return b""
            raise

    def copy(self, sha256: str, target: Path) -> None:
        """Copy a file to a new path."""
        with open(target, "xb") as file:
            for piece in self.pieces(sha256):
                file.write(piece)

    @contextmanager
    def file(self, sha256: str) -> Iterator[Path]:
        """Return a context that downloads a file to a path and removes it at the end."""
        with tempfile.TemporaryDirectory(dir=self.incoming) as folder:
            self.copy(sha256, Path(folder) / "file")
            yield Path(folder) / "file"

    def open(self, sha256: str) -> BinaryIO:
        """Open a file for random access: only the ranges read are downloaded."""
        size = self.size(sha256)
        if size < 0:
            raise _MissingError(_place(sha256))
        return cast(BinaryIO, io.BufferedReader(_Parts(self, sha256, size), _BUFFER))

    def part(self, sha256: str, first: int, end: int) -> bytes:
        """Read a range of bytes of a file, by default to its end."""
        with self._reached():
            try:
                result = self._objects.get(_place(sha256), options={"range": (first, end)})
            except FileNotFoundError:
                raise _MissingError(_place(sha256)) from None
            return bytes(result.bytes())

    def address(self, sha256: str) -> str:
        """Return an address where clients may download a file directly for some minutes."""
        from obstore import sign

        with self._reached():
            return str(sign(self._objects, "GET", _place(sha256), _SIGNED))

    def send(self, staged: StagedBlob) -> None:
        """Upload a file; it replaces one with the same name, which may be damaged."""
        with self._reached():
            self._objects.put(_place(staged.info.sha256), staged.path, attributes=_NO_PAGE)
        self._note_intact(staged.info.sha256, self.state(staged.info.sha256))

    def put(self, staged: StagedBlob) -> None:
        """Ensure that a received file is in place; call it inside a transaction that writes."""
        if self.size(staged.info.sha256) != staged.info.size:
            self.send(staged)

    def remove(self, sha256: str) -> None:
        """Remove a file; downloads in progress still finish."""
        self._delete([_place(sha256)])

    def all(self) -> Iterator[str]:
        """Yield the digests of all files."""
        for path, _ in self._listed("blobs/"):
            yield path.rpartition("/")[2]

    def keep_part(self, upload: str, name: str, received: Path) -> None:
        """Keep a part of a large file, until the file is complete."""
        with self._reached():
            self._objects.put(f"parts/{upload}/{name}", received)
        received.unlink()

    def parts(self, upload: str) -> list[str]:
        """Return the numbers of the parts received so far."""
        return sorted(path.rpartition("/")[2] for path, _ in self._listed(f"parts/{upload}/"))

    def read_part(self, upload: str, name: str) -> Iterator[bytes]:
        """Yield the bytes of a part."""
        return self._pieces(f"parts/{upload}/{name}")

    def drop_parts(self, upload: str) -> None:
        """Remove the parts of a file."""
        self._delete([path for path, _ in self._listed(f"parts/{upload}/")])

    def collect_uploads(self, before: float, *, dry_run: bool) -> int:
        """Remove the parts of uploads last written before a time; return the number of files."""
        newest: dict[str, float] = {}
        for path, date in self._listed("parts/"):
            upload = path.split("/")[1]
            newest[upload] = max(date, newest.get(upload, 0.0))
        late = [upload for upload, date in newest.items() if date < before]
        for upload in () if dry_run else late:
            self.drop_parts(upload)
        return len(late)

    def close(self) -> None:
        """Remove the data that was being received."""
        shutil.rmtree(self.incoming, ignore_errors=True)

    def check(self) -> None:
        """Write an object and read it back, so that a wrong bucket fails at startup.

        Raises:
            ConfigError: the bucket cannot be written or read.
        """
        name = f"parts/probe-{time.time_ns()}/00001"
        try:
            with self._reached():
                self._objects.put(name, b"1")
                content = bytes(self._objects.get(name).bytes())
                self._objects.delete(name)
        except UnreachedBucketError as error:
            raise ConfigError(
                f"{self.url}: {error.problem}",
                expected="a bucket that these credentials may list, read and write",
                hint="the cloud's environment variables: AWS_ACCESS_KEY_ID, AWS_REGION, "
                "AWS_ENDPOINT_URL, ...",
            ) from None
        if content != b"1":
            raise ConfigError(f"{self.url} does not keep the data written to it")

    def pieces(self, sha256: str) -> Iterator[bytes]:
        """Yield the bytes of a file."""
        return self._pieces(_place(sha256))

    def _pieces(self, path: str) -> Iterator[bytes]:
        with self._reached():
            try:
                result = self._objects.get(path)
            except FileNotFoundError:
                raise _MissingError(path) from None
            yield from map(bytes, result.stream(_PIECE))

    def _listed(self, prefix: str) -> Iterator[tuple[str, float]]:
        """Yield the objects below a prefix, with the time when each was written."""
        with self._reached():
            for some in self._objects.list(prefix):
                for each in some:
                    yield each["path"], each["last_modified"].timestamp()

    def _delete(self, paths: list[str]) -> None:
        with self._reached():
            for path in paths:
                with suppress(FileNotFoundError):
                    self._objects.delete(path)

    @contextmanager
    def _reached(self) -> Iterator[None]:
        from obstore.exceptions import BaseError

        try:
            yield
        except _MissingError:
            raise
        except (BaseError, OSError) as error:
            raise UnreachedBucketError(start_of_error(error)) from error


class _Parts(io.RawIOBase):
    """A file in a bucket that downloads a range on each read."""

    def __init__(self, blobs: BlobBucket, sha256: str, size: int) -> None:
        self._blobs, self._sha256, self._size = blobs, sha256, size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise OSError(f"position {start + offset} is outside the file")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        data = self._blobs.part(self._sha256, self._at, end)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _place(sha256: str) -> str:
    assert len(sha256) == 64, sha256
    return f"blobs/{sha256[:2]}/{sha256}"
