"""The folder of one name in a local registry: its versions, tags and yanked versions.

    v1/  v2/  ...      the files of an adapter as saved; they never change, but for signatures
    names.json         tags, yanked versions and the highest version; see names_file.py
    v1/.published      when it was published, in UTC

A version's folder is created by one atomic rename, and `names.json` is replaced atomically. A file
lock serializes the writers of a name.

The folder may come from a stranger. Links are not followed, and files are read with a size limit. A
version that cannot be read is no obstacle to the others.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock

from adapterhub.errors import ConfigError, FileError, RegistryError
from adapterhub.files.atomic import (
    explained,
    is_plain_folder,
    replace_file,
)
from adapterhub.files.native import (
    SIGNATURE_FILE,
    check_adapter,
)
from adapterhub.files.signature import Signature, read_signatures
from adapterhub.registry.file_names import folder_of_id, unportable
from adapterhub.registry.names_file import NAMES_FILE, TAG, TAG_RULE, Names, read_names, write_names
from adapterhub.registry.published_files import (
    PUBLISHED,
    copy_adapter,
    date_now,
    digest_of,
    entry_of,
    manifest_bytes,
    merged_signatures,
    publication_date,
)
from adapterhub.registry.store import Entry, free_version, version_number

_LOCK = ".lock"
_STAGED = ".adapterhub-"
_STAGED_NAMES = f".{NAMES_FILE}."  # by `replace_file`
# Two changes of a file within one tick of its file system's clock may have the same time. The
# longest tick is FAT's, 2 s. The contents of files that changed since then are compared instead.
_TICK = 2_000_000_000
# Programs can set the time of modification, such as git and tar; on Windows it is the only one.
_CHANGED = "st_mtime_ns" if os.name == "nt" else "st_ctime_ns"


@dataclass(frozen=True)
class Contents:
    """What can be read of the folder of one name.

    `entries` are the versions, oldest first. `broken` has the error of each other one by its
    number. If `names.json` cannot be read, `broken` has only its error, and there are no entries.
    """

    entries: list[Entry]
    broken: dict[str, FileError]
    names: Names

    def raise_broken(self, name: str, version: str | None) -> None:
        """Raise the error of the version that a reference means, if it cannot be read.

        Args:
            name: the adapter's name, for the error message.
            version: a version number or a tag; the newest version that is not yanked if None.

        Raises:
            FileError: that version, or what decides which one it is, cannot be read.
        """
        if NAMES_FILE in self.broken:
            raise self.broken[NAMES_FILE]
        number = version_number(version or "")
        available = {*self.broken, *(entry.version for entry in self.entries)}
        if version is None:
            newest = max(available - self.names.yanked.keys(), key=_number, default="")
            if newest in self.broken:
                problem = self.broken[newest]
                raise FileError(
                    f"the newest version, {name}@{newest}, cannot be read: {problem.problem}",
                    hint=f"restore it, remove its folder, or name another version: {name}@v1",
                    offenders=problem.offenders,
                )
        elif error := self.broken.get(f"v{number}" if number else self.names.tags.get(version, "")):
            raise error


class NameFolder:
    """The folder of one name, `<root>/<backbone>/<name>`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name

    def read(self) -> Contents:
        """Read all versions; those that cannot be read are listed with their errors."""
        entries: list[Entry] = []
        broken: dict[str, FileError] = {}
        try:
            self._check_folders()
            numbers, names = self.numbers(), read_names(self.path)
        except FileError as error:
            return Contents(entries, {NAMES_FILE: error}, Names())
        for version in numbers:
            try:
                entries.append(self._entry(version, names))
            except FileError as error:
                if os.path.lexists(self.path / version):  # otherwise it was deleted meanwhile
                    broken[version] = error
        return Contents(entries, broken, names)

    def numbers(self) -> list[str]:
        """List the version numbers that are taken, oldest first, readable or not.

        Raises:
            FileError: the folder cannot be listed.
        """
        return sorted(filter(_is_version, self._listed()), key=_number)

    def version(self, number: str) -> Path:
        """Return the folder of a version, which may be missing.

        Raises:
            FileError: it or a folder above it in the registry is a link.
        """
        self._check_folders()
        return self._version(number)

    def add(self, folder: Path, version: str | None, tags: tuple[str, ...]) -> Entry:
        """Add an adapter as a new version, or find the existing version with the same bytes.

        Args:
            folder: the adapter's folder.
            version: the version number for new bytes; the next one if None.
            tags: the tags to set on the version.

        Raises:
            RegistryError: `version` is taken by other bytes, or was deleted.
            ConfigError: the version or a tag is invalid.
            FileError: `names.json` cannot be read.
        """
        check_tags(tags)
        with self.writing():
            read_names(self.path)
            digest, entries = digest_of(folder), self.read().entries
            existing = next((entry.version for entry in entries if entry.digest == digest), None)
            published = existing or free_version(self.name, version, entries, self._highest())
            if existing is None:
                copy_adapter(folder, self.path / published, digest, date=date_now())
            self.change(tags=dict.fromkeys(tags, published))
            return self._entry(published, read_names(self.path))

    def sign(self, entry: Entry, signatures: Sequence[Signature]) -> None:
        """Add signatures to a version."""
        folder = self.path / entry.version
        with self.writing():
            data = merged_signatures(read_signatures(folder), signatures, entry.digest)
            replace_file(folder / SIGNATURE_FILE, data)

    def change(
        self, *, tags: Mapping[str, str] | None = None, yanked: Mapping[str, str] | None = None
    ) -> None:
        """Set tags, or mark versions as yanked; call it inside `writing()`."""
        check_tags(tuple(tags or ()))
        names = read_names(self.path)
        changed = Names(
            {**names.tags, **(tags or {})}, {**names.yanked, **(yanked or {})}, self._highest()
        )
        if changed != names:
            write_names(self.path, changed)

    def remove(self, number: str) -> None:
        """Delete a version for good; its number is not used again.

        A kill at any moment leaves the version complete, or gone: it disappears by one rename.

        Raises:
            RegistryError: there is no such version.
            FileError: `names.json` cannot be read, or the version is a link.
            OutputError: the registry cannot be written.
        """
        with self.writing():
            folder = self._version(number)
            if not folder.is_dir():
                raise RegistryError(f"{self.name!r} has no version {number}")
            self.change()  # records the highest number so far
            removed = self.path / f"{_STAGED}deleted-{secrets.token_hex(8)}"
            os.rename(folder, removed)
            names = read_names(self.path)
            tags = {tag: version for tag, version in names.tags.items() if version != number}
            yanked = {v: reason for v, reason in names.yanked.items() if v != number}
            write_names(self.path, replace(names, tags=tags, yanked=yanked))
            shutil.rmtree(removed, ignore_errors=True)

    def untag(self, tag: str) -> None:
        """Remove a tag; call it inside `writing()`."""
        names = read_names(self.path)
        tags = {name: version for name, version in names.tags.items() if name != tag}
        write_names(self.path, replace(names, tags=tags, highest=self._highest()))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock that serializes the writers of this name."""
        with explained(self.path):
            self._check_folders()
            self.path.mkdir(parents=True, exist_ok=True)
            lock = self.path / _LOCK
            # filelock may truncate the file, and older releases follow a link.
            if os.path.lexists(lock) and not _is_own_file(os.lstat(lock)):
                raise _not_followed(lock)
            with FileLock(lock):
                yield

    def clean(self) -> list[Path]:
        """Remove what interrupted writers left, and return the paths."""
        if not self._leftovers():
            return []
        with self.writing():  # no writer is active while we hold the lock
            leftovers = self._leftovers()
            for path in leftovers:
                shutil.rmtree(path) if is_plain_folder(path) else path.unlink()
        return leftovers

    def problems(self) -> list[str]:
        """Verify all files of the folder; return one line for each problem."""
        broken = self.read().broken
        for number in self.numbers():
            try:
                check_adapter(self.version(number))
            except FileError as error:
                broken.setdefault(number, error)
        lines = [f"{file}: {line_of(error)}" for file, error in broken.items()]
        return lines + [f"{path}: not a file of the registry" for path in self._strays()]

    def _listed(self) -> list[str]:
        try:
            return os.listdir(self.path) if is_plain_folder(self.path) else []
        except OSError as error:
            raise FileError(f"{self.path} cannot be listed: {error.strerror or error}") from None

    def _leftovers(self) -> list[Path]:
        names = (n for n in self._listed() if n.startswith((_STAGED, _STAGED_NAMES)))
        return [self.path / name for name in sorted(names)]

    def _strays(self) -> list[str]:
        """List what is neither a version nor a file of one; hidden files are ignored."""
        strays = []
        for number in self.numbers():
            folder = self.path / number
            with suppress(OSError):  # a folder that cannot be listed is reported as broken
                names = os.listdir(folder) if is_plain_folder(folder) else ()
                strays += [f"{number}/{name}" for name in names if name not in PUBLISHED]
        others = (n for n in self._listed() if n != NAMES_FILE and not _is_version(n))
        return sorted(f for f in (*strays, *others) if not f.rpartition("/")[2].startswith("."))

    def _check_folders(self) -> None:
        """Refuse links in place of the folders of the name and its backbone."""
        for path in (self.path.parent, self.path):
            if not is_plain_folder(path) and os.path.lexists(path):
                raise _not_followed(path)

    def _version(self, number: str) -> Path:
        path = self.path / number
        if not is_plain_folder(path) and os.path.lexists(path):
            raise _not_followed(path)
        return path

    def _highest(self) -> int:
        """Return the highest version number ever used."""
        return max(read_names(self.path).highest, *map(_number, self.numbers()), 0)

    def _entry(self, version: str, names: Names) -> Entry:
        folder = self._version(version)
        entry = entry_of(
            manifest_bytes(folder),
            reference=f"{self.name}@{version}",
            name=self.name,
            version=version,
            tags=tuple(sorted(tag for tag, v in names.tags.items() if v == version)),
            yanked=names.yanked.get(version),
            published=publication_date(folder),
        )
        if folder_of_id(entry.backbone) != self.path.parent.name:
            raise FileError(
                f"{folder} holds an adapter of the backbone {entry.backbone!r}",
                expected=f"one of the backbone of {self.path.parent.name}",
                hint="publish that adapter again, and remove this folder",
            )
        return entry


def _is_version(name: str) -> bool:
    return name.startswith("v") and version_number(name) is not None


def _is_own_file(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_nlink <= 1


def _number(version: str) -> int:
    return version_number(version) or 0


def line_of(error: FileError) -> str:
    """Return a problem and its details as one line."""
    return "; ".join((error.problem, *error.offenders))


def _not_followed(path: Path) -> FileError:
    return FileError(
        f"{path} is a link or not a folder",
        expected="a registry without links, as their targets may be outside of it",
        hint="replace it by a copy, if you trust what it points to",
    )


def folder_stamp(path: str) -> str:
    """Return a text that changes with each version, tag and yank in the folder of a name.

    It has the inode, size and times of the folder and of `names.json`; these change with each entry
    of the folder and each replacement of the file. They do not distinguish changes within one tick
    of the clock: while they are that new, the text has a digest of what an index reads, too.
    """
    fields: list[int] = []
    newest = 0
    for file in (path, f"{path}/{NAMES_FILE}"):
        try:
            status = os.stat(file, follow_symlinks=False)
        except OSError as error:
            fields.append(error.errno or 0)
            continue
        fields += (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        newest = max(newest, getattr(status, _CHANGED))
    text = " ".join(map(str, fields))
    return text if newest < time.time_ns() - _TICK else f"{text} {_digest_of_contents(Path(path))}"


def _digest_of_contents(path: Path) -> str:
    digest = hashlib.sha256()
    for entry in NameFolder(path).read().entries:
        digest.update(repr(entry).encode())
    return digest.hexdigest()


def check_tags(tags: Sequence[str]) -> None:
    """Refuse invalid tags.

    Raises:
        ConfigError: a tag has other characters, or is a version number or a reserved file name.
    """
    if invalid := [repr(tag) for tag in tags if not re.fullmatch(TAG, tag) or unportable(tag)]:
        raise ConfigError(
            "invalid tags",
            offenders=invalid,
            expected=f"{TAG_RULE}; not ending with a dot, and not a name that Windows reserves",
        )
