"""A registry in a folder, which may be in git; the default is in the user's data folder.

The folder may come from a stranger: links are not followed, and files are read with a size limit. A
version appears and disappears by one rename; a file lock serializes the writers of a name.

A search does not read index.json, which may be outdated if git, rsync or a user changed the folder.
It uses the user's cache, which has a stamp for the folder of each name. A folder is read again when
its stamp has changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from adapterhub.config.user_folders import user_folder
from adapterhub.errors import ConfigError, FileError, OutputError, RegistryError, did_you_mean
from adapterhub.files.atomic import (
    UnreadableError,
    explained,
    is_plain_folder,
    read_file,
    replace_file,
)
from adapterhub.files.card import read_card
from adapterhub.files.native import Saved
from adapterhub.registry.registry import Registry, line_of
from adapterhub.registry.store import (
    ConflictError,
    Reference,
    Storage,
    Store,
    Stored,
    is_backbone_folder,
    is_bucket,
    is_name,
    is_version_folder,
    word_text,
)
from adapterhub.registry.version_files import (
    MAX_INDEX_BYTES,
    NAMES_FILE,
    Contents,
    check_digest,
    check_stamp,
    copy_adapter,
    entry_of_row,
    row_of,
    without_collection,
)

_CARD_CHARACTERS = 4_096  # the start of a card that text searches cover
_MOST_CACHE_BYTES = 1 << 30
_CACHE_FORMAT = 7  # to be increased when the fields of an entry change
# Two changes of a file within one tick of its file system's clock may have the same time. The
# longest tick is FAT's, 2 s. The contents of files that changed since then are compared instead.
_TICK = 2_000_000_000
# Programs such as git and tar can set the modification time; Windows has only this one.
_CHANGED = "st_mtime_ns" if os.name == "nt" else "st_ctime_ns"
_LOCK = ".lock"
_LEFT = (".adapterhub-", ".names.json.")  # left by interrupted writers
_OF_GIT = {
    ".gitignore": b".lock\n.adapterhub-*\n.*.new\n",
    ".gitattributes": b"* -text\n",  # else git for Windows writes CRLF, and digests differ
}


def default_root() -> Path:
    """Return `$ADAPTERHUB_REGISTRY` or, by default, `registry` in the user's data folder."""
    root = os.environ.get("ADAPTERHUB_REGISTRY")
    return Path(root) if root else user_folder("data") / "registry"


class LocalRegistry(Registry):
    """A registry in a folder.

    The default folder may be missing, and then counts as empty. Any other folder must exist, unless
    an adapter is published to it.
    """

    def __init__(self, root: str | Path | None = None) -> None:
        self.root = Path(root) if root is not None else default_root()
        self.folder = Folder(self.root, may_be_missing=root is None)
        self._last: tuple[dict[str, str], dict[str, Contents]] | None = None  # as last read
        super().__init__(self.folder)

    def everything(self, backbone: str | None = None) -> dict[str, Contents]:
        """Read all names; use the cache for folders that have not changed."""
        if not self.exists():
            return {}
        stamps = self._stamps()
        if self._last is None or self._last[0] != stamps:
            self._last = stamps, self._everything(stamps)
        return dict(self._last[1])

    def _everything(self, stamps: Mapping[str, str]) -> dict[str, Contents]:
        cached = self._cached()
        current = {path: row for path, row in cached.items() if row[0] == stamps.get(path)}
        others = stamps.keys() - current.keys()
        new = {path: (stamps[path], self._with_words(path)) for path in others}
        if new or len(current) < len(cached):
            self._write_cache(current | new)
        return {path: contents for path, (_, contents) in sorted((current | new).items())}

    def verify(self) -> list[str]:
        """Read all versions, and list the problems of files, links and names."""
        if not self.exists():
            return []
        return [*self.folder.links(), *super().verify(), *self._changed_since_cached()]

    def index(self) -> int:
        """Rebuild the index and the cache from the folders, and return the number of names."""
        with contextlib.suppress(OSError):  # no cache folder
            self._cache_path().unlink(missing_ok=True)
        return super().index() if self.exists() else 0

    def gc(self) -> list[Path]:
        """Remove the staging folders of interrupted writers, and return their paths."""
        if not self.exists():
            return []
        return [left for path in self._all_paths() for left in self.folder.clean(path)]

    def _changed_since_cached(self) -> list[str]:
        """List the versions whose manifest has changed since the last search."""
        changed = []
        for name, (_, contents) in self._cached().items():
            before = {entry.version: entry.digest for entry in contents.entries}
            for entry in self.contents(name).entries if before else ():
                if before.get(entry.version, entry.digest) != entry.digest:
                    path = f"{name}/{entry.version}"
                    changed.append(f"{path}: changed after it was published, sha256 {entry.digest}")
        return changed

    def _cached(self) -> dict[str, tuple[str, Contents]]:
        """Return the contents of names by path, each with its stamp; empty for a damaged cache."""
        try:
            data = read_file(self._cache_path(), 0, _MOST_CACHE_BYTES, None)
            with without_collection():
                records = json.loads(data)
                return {path: _of_record(path, **record) for path, record in records.items()}
        except (UnreadableError, OSError, ValueError, LookupError, TypeError, AttributeError):
            return {}

    def _write_cache(self, stamped: Mapping[str, tuple[str, Contents]]) -> None:
        records = {path: _record(stamp, contents) for path, (stamp, contents) in stamped.items()}
        with contextlib.suppress(OSError):  # a cache that cannot be written
            path = self._cache_path()
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps(records).encode())

    def _stamps(self) -> dict[str, str]:
        """Return the stamp of each name's folder by its path."""
        stamps = {}
        for backbone in filter(is_backbone_folder, self.folder.folders()):
            with contextlib.suppress(OSError), os.scandir(self.root / backbone) as entries:
                for entry in entries:  # no Path objects: there may be 100,000 names
                    if is_name(entry.name) and entry.is_dir(follow_symlinks=False):
                        path = f"{backbone}/{entry.name}"
                        stamps[path] = self.stamp(path)
        return dict(sorted(stamps.items()))

    def stamp(self, path: str) -> str:
        """Return a text that changes with each version, tag and yank of the name at a path.

        It has the inode, size and times of the folder and of `names.json`; these change with each
        entry of the folder and each replacement of the file. They do not distinguish changes within
        one tick of the clock: while they are that new, the text also has a digest of the files that
        a search reads.
        """
        fields: list[int] = []
        newest = 0
        folder = f"{self.root}/{path}"
        for file in (folder, f"{folder}/{NAMES_FILE}"):
            try:
                status = os.stat(file, follow_symlinks=False)
            except OSError as error:
                fields.append(error.errno or 0)
                continue
            fields += (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            newest = max(newest, getattr(status, _CHANGED))
        text = " ".join(map(str, fields))
        if newest < time.time_ns() - _TICK:
            return text
        entries = repr([dataclasses.astuple(entry) for entry in self.contents(path).entries])
        return f"{text} {hashlib.sha256(entries.encode()).hexdigest()}"

    def _with_words(self, path: str) -> Contents:
        """Read a name, with the words of its versions and of the start of their cards."""
        contents = self.contents(path)
        for entry in contents.entries:
            card = read_card(self.root / path / entry.version)[:_CARD_CHARACTERS]
            contents.words[entry.version] = word_text((*entry.words, card))
        return contents

    def _cache_path(self) -> Path:
        # Outside the root, which may be in git or read-only.
        key = hashlib.sha256(os.fsencode(self.root.resolve())).hexdigest()[:24]
        return user_folder("cache") / "registry" / f"{key}.{_CACHE_FORMAT}.json"


def _record(stamp: str, contents: Contents) -> dict[str, Any]:
    """Return the cached record of a name."""
    broken = {version: line_of(error) for version, error in contents.broken.items()}
    rows = {entry.version: row_of(entry) for entry in contents.entries}
    return {"stamp": stamp, "rows": rows, "broken": broken, "words": contents.words}


def _of_record(
    path: str, stamp: str, rows: dict[str, Any], broken: dict[str, str], words: dict[str, str]
) -> tuple[str, Contents]:
    """Return the stamp and the contents of the name at a path."""
    name = path.rpartition("/")[2]
    entries = [entry_of_row(name, version, row) for version, row in rows.items()]
    errors = {version: FileError(line) for version, line in broken.items()}
    return stamp, Contents(entries, errors, words=words)


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
            f"no registry {self.location!r}{near}",
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
        if prefix.count("/") < 2:
            backbones = [prefix[:-1]] if prefix else self.folders()
            names = (path for backbone in backbones for path in self.folders(backbone))
            return {file: tag for path in names for file, tag in self.files(f"{path}/").items()}
        folder = self.root / prefix
        self._check_folders(folder)
        paths = []
        for name in self._listed(folder):
            paths.append(f"{prefix}{name}")
            if is_version_folder(name) and is_plain_folder(folder / name):
                with contextlib.suppress(OSError):  # such a version is broken when it is read
                    paths += (f"{prefix}{name}/{file}" for file in os.listdir(folder / name))
        return dict.fromkeys(sorted(paths), "")

    def read(self, path: str, most: int, tag: str = "") -> Stored | None:
        """Read a file; None if it does not exist."""
        file = self.root / path
        self._check_folders(file.parent)
        if not os.path.lexists(file):
            return None
        try:
            return Stored(read_file(file, 0, most, None))
        except UnreadableError as error:
            raise FileError(f"{file}: {error}", expected="a regular file as published") from None

    def reread(self, path: str, most: int) -> Stored | None:
        """Read a file; None if it does not exist."""
        return self.read(path, most)

    def create(self, path: str, source: Saved, digest: str, date: bytes) -> None:
        """Create a version from the files of an adapter."""
        for name, text in _OF_GIT.items():
            if not os.path.lexists(self.root / name):
                replace_file(self.root / name, text)
        copy_adapter(source, self.root / path, digest, date=date, beside=True)

    def check_room(self, size: int) -> None:
        """Refuse files that do not fit on the disk."""
        there = next(each for each in (self.root, *self.root.absolute().parents) if each.is_dir())
        if size > (free := shutil.disk_usage(there).free):
            raise OutputError(
                f"an adapter of {size:,} bytes does not fit into {self.location}",
                expected=f"at most {free:,} bytes, which are free",
            )

    def replace(self, path: str, data: bytes, old: Stored | None) -> None:
        """Replace a file if it has not changed since it was read."""
        if self.read(path, MAX_INDEX_BYTES) != old:
            raise ConflictError(path)
        replace_file(self.root / path, data)
        if path.count("/") > 2:  # a signature: searches notice changes of the name's folder
            os.utime(self.root / path.rpartition("/")[0] / "..")

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
            check_stamp(source, digest)
            return copy_adapter(source, folder, digest)
        self.check(path, digest)
        return source

    def check(self, path: str, digest: str) -> None:
        """Read all files of a version."""
        folder = self.root / path
        self._check_folders(folder)
        check_digest(folder, Saved.at(folder).check().data, digest)
        check_stamp(folder, digest)

    @contextlib.contextmanager
    def writing(self, path: str) -> Iterator[None]:
        """Hold the lock that serializes the writers of a name, or of an index."""
        folder = self.root / path
        with explained(folder):
            self._check_folders(folder)
            for each in (folder.parent, folder):
                if self.root in each.parents:
                    _refuse_other_case(each)
            folder.mkdir(parents=True, exist_ok=True)
            lock = folder / _LOCK
            # filelock may truncate the file, and older releases follow a link.
            if os.path.lexists(lock) and not _is_own_file(os.lstat(lock)):
                raise _not_followed(lock)
            with FileLock(lock):
                yield

    def clean(self, path: str) -> list[Path]:
        """Remove leftovers of interrupted writers of a name, and return the paths."""
        if not self._leftovers(path):
            return []
        with self.writing(path):  # no writer is active while we hold the lock
            leftovers = self._leftovers(path)
            for left in leftovers:
                shutil.rmtree(left) if is_plain_folder(left) else left.unlink()
        return leftovers

    def links(self) -> list[str]:
        """List links that replace the folders of backbones or names, and unreadable folders."""
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
        """Refuse a folder of the registry if it, or a folder above it, is a link."""
        for depth in range(len(folder.relative_to(self.root).parts)):
            path = folder.parents[depth - 1] if depth else folder
            # In this order, since another writer may create the folder in between.
            if os.path.lexists(path) and not is_plain_folder(path):
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


def registry_at(location: str | Path | None) -> Registry:
    """Open a user's own registry: a folder, a bucket, or a web server's folder.

    None is `$ADAPTERHUB_REGISTRY` or, by default, the folder in the user's data.

    Raises:
        ConfigError: the library for buckets is missing, or the URL is not valid.
    """
    named = location if location is not None else os.environ.get("ADAPTERHUB_REGISTRY")
    if is_bucket(named):
        from adapterhub.registry.bucket import Bucket

        return Registry(Bucket(str(named)))
    if str(named).startswith(("https://", "http://")):
        from adapterhub.registry.http_storage import WebsiteRegistry  # httpx2 is slow to import

        return WebsiteRegistry(str(named))
    return LocalRegistry(location)


def store_of(
    reference: Reference, registry: str | Path | None = None, *, allow_pickle: bool = False
) -> Store:
    """Open the store that a reference points into.

    `allow_pickle` accepts other libraries' adapters as pickles.

    Raises:
        ConfigError: the reference is a folder.
    """
    if reference.kind == "local":
        return registry_at(registry)
    if reference.kind == "folder":
        raise ConfigError(f"{reference} is a folder, not a published adapter")
    from adapterhub.registry.hub import HubStore  # huggingface_hub is slow to import

    return HubStore(endpoint=reference.host, allow_pickle=allow_pickle)
