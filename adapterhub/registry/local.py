"""A registry in a folder, which may be in git; the default is in the user's data folder.

Searches use an index in the user's cache, which is updated from the folders when they changed; the
folders alone are authoritative.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from adapterhub.config.user_folders import user_folder
from adapterhub.errors import RegistryError
from adapterhub.files.native import read_card
from adapterhub.registry.file_names import is_backbone_folder
from adapterhub.registry.folder import Folder
from adapterhub.registry.index import FORMAT, Index, IndexedFolder, open_index, remove_index
from adapterhub.registry.names_file import NAMES_FILE
from adapterhub.registry.reference import is_name
from adapterhub.registry.registry import Registry, line_of
from adapterhub.registry.store import Entry, Query

Result = TypeVar("Result")

_CARD_CHARACTERS = 4_096  # the start of a card that text searches cover
_ATTEMPTS = 3  # to open the index, which other processes may replace at the same time
# Two changes of a file within one tick of its file system's clock may have the same time. The
# longest tick is FAT's, 2 s. The contents of files that changed since then are compared instead.
_TICK = 2_000_000_000
# Programs can set the time of modification, such as git and tar; on Windows it is the only one.
_CHANGED = "st_mtime_ns" if os.name == "nt" else "st_ctime_ns"


def default_root() -> Path:
    """Return `$ADAPTERHUB_REGISTRY`, or else `registry` in the user's data folder."""
    root = os.environ.get("ADAPTERHUB_REGISTRY")
    return Path(root) if root else user_folder("data") / "registry"


class LocalRegistry(Registry):
    """A registry in a folder.

    The default folder may be missing, and is then empty. Any other one has to exist, unless an
    adapter is published to it.
    """

    def __init__(self, root: str | Path | None = None) -> None:
        self.root = Path(root) if root is not None else default_root()
        self.folder = Folder(self.root, may_be_missing=root is None)
        super().__init__(self.folder)

    def search(self, query: Query) -> list[Entry]:
        """Return the versions that match a query, in its order; warn of those that are broken."""
        if not self.exists():
            return []
        entries, broken = self._with_index(lambda index: (index.search(query), index.broken()))
        self._warn(broken)
        return entries

    def verify(self) -> list[str]:
        """Read all versions, and list the problems of files, links and names."""
        if not self.exists():
            return []
        return [*self.folder.links(), *super().verify(), *self._changed_since_indexed()]

    def reindex(self) -> int:
        """Rebuild the index from the folders, and return the number of names."""

        def rebuild(index: Index) -> int:
            with index.writing():
                index.clear()
            return self._updated(index, Index.count)

        return self._attempt(rebuild) if self.exists() else 0

    def gc(self) -> list[Path]:
        """Remove the staging folders of interrupted writers, and return their paths."""
        if not self.exists():
            return []
        return [left for path in self._all_paths() for left in self.folder.clean(path)]

    def _changed_since_indexed(self) -> list[str]:
        """List the versions whose manifest is not the one that the last search saw."""
        if not self._index_path().is_file():
            return []
        indexed = self._attempt(Index.digests)
        changed = []
        for name in self._all_paths():
            for entry in self.contents(name).entries:
                path = f"{name}/{entry.version}"
                if indexed.get(path, entry.digest) != entry.digest:
                    changed.append(f"{path}: changed after it was published, sha256 {entry.digest}")
        return changed

    def _with_index(self, use: Callable[[Index], Result]) -> Result:
        """Apply a function to the updated index."""
        return self._attempt(lambda index: self._updated(index, use))

    def _attempt(self, use: Callable[[Index], Result]) -> Result:
        """Apply a function to the index; without a usable file, to a new one in memory.

        Raises:
            RegistryError: another process has not finished its update.
        """
        path = self._index_path()
        for _ in range(_ATTEMPTS):
            try:
                with open_index(path) as index:
                    return use(index)
            except sqlite3.OperationalError as error:
                if "locked" in str(error):
                    raise RegistryError(
                        f"another process is updating the search index of {self.root}",
                        hint=f"try again when it has finished, or delete {path}",
                    ) from error
            except sqlite3.DatabaseError:  # corrupted
                with contextlib.suppress(OSError):
                    remove_index(path)
            except OSError:  # no cache folder
                break
        with open_index(None) as index:
            return use(index)

    def _updated(self, index: Index, use: Callable[[Index], Result]) -> Result:
        """Apply a function to the index in one transaction, after an update if it is needed."""
        stamp = _stamp_of(self._stamps())
        with index.reading():
            if index.registry_stamp() == stamp:
                return use(index)
        with index.writing():
            stamps = self._stamps()  # what another process published and indexed is in it
            index.update(stamps, self._read_for_index, _stamp_of(stamps))
            return use(index)

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
        one tick of the clock: while they are that new, the text has a digest of what an index
        reads, too.
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
        entries = repr(self.contents(path).entries)
        return f"{text} {hashlib.sha256(entries.encode()).hexdigest()}"

    def _read_for_index(self, path: str) -> IndexedFolder:
        contents = self.contents(path)
        return IndexedFolder(
            [(entry, self._search_text(path, entry)) for entry in contents.entries],
            {file: line_of(error) for file, error in contents.broken.items()},
        )

    def _search_text(self, path: str, entry: Entry) -> str:
        """Return the text that searches cover: the entry's words and the start of its card."""
        card = read_card(self.root / path / entry.version)
        return " ".join((*entry.words, card[:_CARD_CHARACTERS]))

    def _index_path(self) -> Path:
        # Outside of the root, which may be in git or read-only. Each index format has its own file.
        key = hashlib.sha256(os.fsencode(self.root.resolve())).hexdigest()[:24]
        return user_folder("cache") / "registry" / f"{key}.{FORMAT}.sqlite"


def _stamp_of(stamps: Mapping[str, str]) -> str:
    return hashlib.sha256("\n".join(map(" ".join, stamps.items())).encode()).hexdigest()
