"""Remote storage: the common base of buckets and web servers, with cached copies of files.

Copies of files and of verified adapters are in the user's cache. Downloads may change or be
damaged: the size of each file is limited, and the digests of an adapter are checked.
"""

from __future__ import annotations

import hashlib
import shutil
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from adapterhub.config.user_folders import user_folder
from adapterhub.errors import OutputError
from adapterhub.files.atomic import UnreadableError, read_file, replace_file
from adapterhub.files.card import CARD_FILE, MAX_CARD_BYTES
from adapterhub.files.manifest import MAX_HEADER_BYTES, MAX_MANIFEST_BYTES, from_json
from adapterhub.files.native import MANIFEST_FILE, SIGNATURE_FILE, TENSORS_FILE, Saved
from adapterhub.files.signature import MAX_SIGNATURE_BYTES
from adapterhub.registry.store import Storage, Stored
from adapterhub.registry.version_files import check_digest, copy_adapter, is_intact

_MAX_TAG_BYTES = 1_024


class RemoteStorage(Storage):
    """A storage whose files are not on this machine; subclasses fetch them."""

    is_atomic = False
    readers = 16

    @abstractmethod
    def receive(self, path: str, most: int, known: str = "") -> Stored | None:
        """Receive a file, None if missing; skip the bytes if its tag is still `known`.

        Raises:
            FileError: it is larger than `most` bytes.
            RegistryError: the storage cannot be read.
        """

    @abstractmethod
    def download(self, path: str, target: Path, most: int, sha256: str | None = None) -> None:
        """Download a file to a new local path; do nothing if it does not exist.

        Raises:
            FileError: it is larger than `most` bytes, or has another digest.
            RegistryError: the storage cannot be read.
        """

    def read(self, path: str, most: int, tag: str = "") -> Stored | None:
        """Read a file; None if it does not exist."""
        if tag:
            kept = self._kept(path, most)
            if kept is not None and kept.tag == tag:
                return kept
        stored = self.receive(path, most)
        if tag and stored and tag == stored.tag:
            self._keep(path, stored)
        return stored

    def reread(self, path: str, most: int) -> Stored | None:
        """Read a file, from the cached copy while it is current."""
        kept = self._kept(path, most)
        stored = self.receive(path, most, kept.tag if kept else "")
        if kept and stored and stored.tag == kept.tag:
            return kept
        if stored and stored.tag:
            self._keep(path, stored)
        return stored

    def get(self, path: str, digest: str, folder: Path | None) -> Path:
        """Return a folder with the verified files of a version."""
        cached = _cache() / "adapters" / digest
        if folder is None and is_intact(cached, digest):
            return cached
        if folder is None:
            shutil.rmtree(cached, ignore_errors=True)  # a damaged copy
        with self._downloaded(path, digest) as staged:
            try:
                return copy_adapter(staged, folder or cached, digest)
            except OutputError:
                if folder is None and is_intact(cached, digest):  # another process added it
                    return cached
                raise

    def check(self, path: str, digest: str) -> None:
        """Read all files of a version."""
        with self._downloaded(path, digest) as staged:
            Saved.at(staged).check()

    @contextmanager
    def _downloaded(self, path: str, digest: str) -> Iterator[Path]:
        """Yield a folder with the files of a version, none of them larger than a valid one."""
        with TemporaryDirectory(prefix="adapterhub-") as staged:
            folder = Path(staged)
            manifest = self.receive(f"{path}/{MANIFEST_FILE}", MAX_MANIFEST_BYTES)
            data = manifest.data if manifest else b""
            check_digest(f"{self.location}/{path}", data, digest)
            (folder / MANIFEST_FILE).write_bytes(data)
            parsed = from_json(data, path)
            most = 8 + MAX_HEADER_BYTES + parsed.nbytes
            sha256 = parsed.files.get(TENSORS_FILE)
            self.download(f"{path}/{TENSORS_FILE}", folder / TENSORS_FILE, most, sha256)
            for name, limit in ((CARD_FILE, MAX_CARD_BYTES), (SIGNATURE_FILE, MAX_SIGNATURE_BYTES)):
                if (stored := self.receive(f"{path}/{name}", limit)) is not None:
                    (folder / name).write_bytes(stored.data)
            yield folder

    def _kept(self, path: str, most: int) -> Stored | None:
        """Return the cached copy of a file and its tag."""
        with suppress(UnreadableError, ValueError):
            data = read_file(self._copy_of(path), 1, most + _MAX_TAG_BYTES, None)
            tag, newline, content = data.partition(b"\n")
            return Stored(content, tag.decode("ascii")) if newline and tag else None
        return None

    def _keep(self, path: str, stored: Stored) -> None:
        copy = self._copy_of(path)
        with suppress(OSError, ValueError):  # a cache that cannot be written
            copy.parent.mkdir(parents=True, exist_ok=True)
            replace_file(copy, stored.tag.encode("ascii") + b"\n" + stored.data)

    def _copy_of(self, path: str) -> Path:
        key = hashlib.sha256(f"{self.location}\n{path}".encode()).hexdigest()
        return _cache() / "files" / key


def _cache() -> Path:
    """Return the user's cache folder for files of remote registries."""
    return user_folder("cache") / "remote"
