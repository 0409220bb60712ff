"""A registry's files in a dict: the smallest storage."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from adapterhub.errors import RegistryError
from adapterhub.files.native import Saved
from adapterhub.registry.store import ConflictError, Storage, Stored
from adapterhub.registry.version_files import DATE_FILE, check_digest, copy_adapter


class MemoryStorage(Storage):
    """Keeps the bytes of each file by its path; `root` has the copies that are handed out."""

    is_atomic = True
    readers = 1

    def __init__(self, root: Path) -> None:
        self.location = "memory"
        self.root = root
        self.stored: dict[str, bytes] = {}
        self.read_only = False
        self.lock = threading.RLock()  # of names and indexes

    def exists(self) -> bool:
        return True

    def folders(self, prefix: str = "") -> list[str]:
        depth = len(prefix.rstrip("/").split("/")) + 1 if prefix else 1
        found = (path.split("/") for path in self.files(prefix))
        return sorted({"/".join(parts[:depth]) for parts in found if len(parts) > depth})

    def files(self, prefix: str = "") -> dict[str, str]:
        return {path: "" for path in sorted(self.stored) if path.startswith(prefix)}

    def read(self, path: str, most: int, tag: str = "") -> Stored | None:
        return Stored(self.stored[path]) if path in self.stored else None

    def reread(self, path: str, most: int) -> Stored | None:
        return self.read(path, most)

    def create(self, path: str, source: Saved, digest: str, date: bytes) -> None:
        self._refuse_writers()
        with TemporaryDirectory() as folder:
            copy = copy_adapter(source, Path(folder) / "copy", digest, beside=True)
            files = {f"{path}/{file.name}": file.read_bytes() for file in copy.iterdir()}
        self.stored |= files | {f"{path}/{DATE_FILE}": date}

    def replace(self, path: str, data: bytes, old: Stored | None) -> None:
        self._refuse_writers()
        if self.read(path, 0) != old:
            raise ConflictError(path)
        self.stored[path] = data

    def remove(self, path: str) -> None:
        self.stored = {k: v for k, v in self.stored.items() if not k.startswith(f"{path}/")}

    def get(self, path: str, digest: str, folder: Path | None) -> Path:
        with TemporaryDirectory() as staged:
            self._write(path, Path(staged))
            check_digest(Path(path), (Path(staged) / "adapter.json").read_bytes(), digest)
            if folder is not None:
                return copy_adapter(Path(staged), folder, digest)
        own = self.root / path
        own.mkdir(parents=True, exist_ok=True)
        self._write(path, own)
        self.check(path, digest)
        return own

    def check(self, path: str, digest: str) -> None:
        with TemporaryDirectory() as staged:
            self._write(path, Path(staged))
            Saved.at(Path(staged)).check()

    def writing(self, path: str) -> AbstractContextManager[object]:
        return self.lock if self.is_atomic else nullcontext()

    def _write(self, path: str, folder: Path) -> None:
        for file in self.files(f"{path}/"):
            (folder / file.rpartition("/")[2]).write_bytes(self.stored[file])

    def _refuse_writers(self) -> None:
        if self.read_only:
            raise RegistryError("this storage is read-only")
