"""A registry's files in a folder, which may come from a stranger.

Links are not followed, and files are read with a size limit. A version appears and disappears by
one rename; a file lock serializes the writers of a name.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from adapterhub.errors import FileError, RegistryError, did_you_mean
from adapterhub.files.atomic import (
    UnreadableError,
    explained,
    is_plain_folder,
    read_file,
    replace_file,
)
from adapterhub.files.native import check_adapter
from adapterhub.registry.published_files import check_digest, copy_adapter, manifest_bytes
from adapterhub.registry.store import ConflictError, Storage, Stored, is_version_folder

_LOCK = ".lock"
_LEFT = (".adapterhub-", ".names.json.")  # by interrupted writers
_IGNORED = b".lock\n.adapterhub-*\n.*.new\n"
_MOST_REPLACED = 1 << 20  # bytes of a file that is replaced


class Folder(Storage):
    """The files of a registry in a folder.

    Args:
        root: the folder; it may be a link.
        may_be_missing: whether a missing folder is an empty registry.
    """

    is_atomic = True
    readers = 1

    def __init__(self, root: Path, *, may_be_missing: bool = False) -> None:
        self.root = root
        self.location = str(root)
        self._may_be_missing = may_be_missing

    def exists(self) -> bool:
        """Return whether there is a registry; only the default one may be missing."""
        if self.root.is_dir():
            return True
        if self._may_be_missing and not os.path.lexists(self.root):
            return False
        near = did_you_mean(self.root.name, [path.name for path in subfolders(self.root.parent)])
        raise RegistryError(
            f"there is no registry {self.location!r}{near}",
            expected="a folder with published adapters",
            hint="check --registry and $ADAPTERHUB_REGISTRY",
        )

    def folders(self, prefix: str = "") -> list[str]:
        """List the folders directly below a prefix."""
        if not self.exists():
            return []
        return [path.relative_to(self.root).as_posix() for path in subfolders(self.root / prefix)]

    def files(self, prefix: str = "") -> dict[str, str]:
        """Return the files below a prefix."""
        if not prefix:
            names = (path for backbone in self.folders() for path in self.folders(backbone))
            return {file: tag for path in names for file, tag in self.files(f"{path}/").items()}
        folder = self.root / prefix
        self._check_folders(folder)
        found = []
        for name in self._listed(folder):
            found.append(f"{prefix}{name}")
            if is_version_folder(name) and is_plain_folder(folder / name):
                with contextlib.suppress(OSError):  # such a version is broken when it is read
                    found += (f"{prefix}{name}/{file}" for file in os.listdir(folder / name))
        return dict.fromkeys(sorted(found), "")

    def read(self, path: str, most: int, tag: str = "") -> Stored | None:
        """Read a file; None if there is none."""
        file = self.root / path
        self._check_folders(file.parent)
        if not os.path.lexists(file):
            return None
        try:
            return Stored(read_file(file, 0, most, None))
        except UnreadableError as error:
            raise FileError(f"{file}: {error}", expected="a regular file as published") from None

    def create(self, path: str, source: Path, digest: str, date: bytes) -> None:
        """Create a version from the files of an adapter."""
        ignored = self.root / ".gitignore"
        if not os.path.lexists(ignored):
            replace_file(ignored, _IGNORED)
        copy_adapter(source, self.root / path, digest, date=date)

    def replace(self, path: str, data: bytes, old: Stored | None) -> None:
        """Replace a file if it is still the one that was read."""
        if self.read(path, _MOST_REPLACED) != old:
            raise ConflictError(path)
        replace_file(self.root / path, data)

    def remove(self, path: str) -> None:
        """Remove a version by one rename."""
        folder = self.root / path
        self._check_folders(folder)
        removed = folder.with_name(f"{_LEFT[0]}deleted-{secrets.token_hex(8)}")
        os.rename(folder, removed)
        shutil.rmtree(removed, ignore_errors=True)

    def get(self, path: str, digest: str, folder: Path | None) -> Path:
        """Return a folder with the verified files of a version."""
        source = self.root / path
        self._check_folders(source)
        if folder is not None:
            return copy_adapter(source, folder, digest)
        self.check(path, digest)
        return source

    def check(self, path: str, digest: str) -> None:
        """Read all files of a version."""
        folder = self.root / path
        self._check_folders(folder)
        check_adapter(folder)
        check_digest(folder, manifest_bytes(folder), digest)

    @contextlib.contextmanager
    def writing(self, path: str) -> Iterator[None]:
        """Hold the lock that serializes the writers of a name."""
        folder = self.root / path
        with explained(folder):
            self._check_folders(folder)
            for each in (folder.parent, folder):
                _refuse_other_case(each)
            folder.mkdir(parents=True, exist_ok=True)
            lock = folder / _LOCK
            # filelock may truncate the file, and older releases follow a link.
            if os.path.lexists(lock) and not _is_own_file(os.lstat(lock)):
                raise _not_followed(lock)
            with FileLock(lock):
                yield

    def clean(self, path: str) -> list[Path]:
        """Remove what interrupted writers of a name left, and return the paths."""
        if not self._leftovers(path):
            return []
        with self.writing(path):  # no writer is active while we hold the lock
            leftovers = self._leftovers(path)
            for left in leftovers:
                shutil.rmtree(left) if is_plain_folder(left) else left.unlink()
        return leftovers

    def links(self) -> list[str]:
        """List links in place of the folders of backbones and names, and unreadable folders."""
        problems = []
        for folder in (self.root, *subfolders(self.root)):
            try:
                paths = sorted(folder.iterdir())
            except OSError as error:
                paths = []
                problems.append(f"{folder.name}: cannot be listed: {error.strerror or error}")
            for path in paths:
                if path.is_symlink() or (path.is_dir() and not is_plain_folder(path)):
                    name = path.relative_to(self.root).as_posix()
                    problems.append(f"{name}: a link, which is not followed")
        return problems

    def _leftovers(self, path: str) -> list[Path]:
        folder = self.root / path
        names = (name for name in self._listed(folder) if name.startswith(_LEFT))
        return [folder / name for name in sorted(names)]

    def _listed(self, folder: Path) -> list[str]:
        try:
            return os.listdir(folder) if is_plain_folder(folder) else []
        except OSError as error:
            raise FileError(f"{folder} cannot be listed: {error.strerror or error}") from None

    def _check_folders(self, folder: Path) -> None:
        """Refuse links in place of a folder in the registry and those above it."""
        for depth in range(len(folder.relative_to(self.root).parts)):
            path = folder.parents[depth - 1] if depth else folder
            if not is_plain_folder(path) and os.path.lexists(path):
                raise _not_followed(path)


def subfolders(path: Path) -> list[Path]:
    """List the folders in a folder, sorted, without links and hidden ones."""
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        names = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
        return [path / name for name in names if not name.startswith(".")]
    return []


def _is_own_file(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_nlink <= 1


def _not_followed(path: Path) -> FileError:
    return FileError(
        f"{path} is a link or not a folder",
        expected="a registry without links, as their targets may be outside of it",
        hint="replace it by a copy, if you trust what it points to",
    )


def _refuse_other_case(path: Path) -> None:
    """Refuse a name that would be the same folder on a case-insensitive file system."""
    alike = [p.name for p in subfolders(path.parent) if p.name.casefold() == path.name.casefold()]
    if alike and path.name not in alike:
        raise RegistryError(
            f"{path.name!r} differs from the published {alike[0]!r} only in case",
            hint=f"publish it as {alike[0]!r}, or under another name",
        )
