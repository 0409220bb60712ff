"""A store in a folder, which may be in git; the default is in the user's data folder.

    <root>/<backbone>/<name>/v1/     an adapter's files; see local_versions.py

`/` in a backbone's id is written `--`, which Hub ids cannot contain. Searches use an index in the
user's cache, which is updated from the folders when they changed; the folders alone are
authoritative.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from platformdirs import user_cache_path, user_data_path

from adapterhub.errors import FileError, RegistryError, did_you_mean
from adapterhub.files.atomic import explained
from adapterhub.files.native import CARD_FILE, read_adapter
from adapterhub.registry.index import FORMAT, Index, open_index, remove_index
from adapterhub.registry.local_versions import PUBLISHED, NameFolder, copy_adapter, digest_of
from adapterhub.registry.reference import check_name
from adapterhub.registry.secrets import published_texts, refuse_leaks
from adapterhub.registry.store import Entry, Publication, Query, choose_version, is_fingerprint

Result = TypeVar("Result")

_CARD_BYTES = 4_096  # the start of a card that text searches cover
_IGNORED = ".lock\n.adapterhub-*\n.*.new\n"
# In registries of up to so many names, each search checks every folder, and so also finds changes
# that git or a person made; in larger ones it checks the folders of the backbones only.
_FEW = 2_000


def default_root() -> Path:
    """Return `$ADAPTERHUB_REGISTRY`, or else `registry` in the user's data folder."""
    root = os.environ.get("ADAPTERHUB_REGISTRY")
    return Path(root) if root else user_data_path("adapterhub", appauthor=False) / "registry"


class LocalRegistry:
    """A store in a folder; see `Store` for the methods that all stores have."""

    def __init__(self, root: str | Path | None = None) -> None:
        self.root = Path(root) if root is not None else default_root()

    def resolve(
        self, name: str, version: str | None = None, *, backbone: str | None = None
    ) -> Entry:
        """Find the version that a name refers to."""
        entries = self.versions(name, backbone=backbone)
        if len(backbones := sorted({entry.backbone for entry in entries})) > 1:
            raise RegistryError(
                f"{name!r} exists for several backbones",
                offenders=backbones,
                hint=f"choose one: --backbone {backbones[0]}",
            )
        return choose_version(entries, name, version)

    def get(self, entry: Entry, folder: Path | None = None) -> Path:
        """Return the folder with the verified files of a version: `folder`, or the registry's."""
        source = self._name_folder(entry).path / entry.version
        if folder is not None:
            return copy_adapter(source, folder)
        read_adapter(source)
        if digest_of(source) != entry.digest:
            raise FileError(
                f"{source} is not what was published as {entry.reference}",
                expected=f"a manifest with sha256 {entry.digest}",
                hint="adapterhub registry verify",
            )
        return source

    def put(self, folder: Path, publication: Publication) -> Entry:
        """Publish an adapter's folder."""
        manifest, _ = read_adapter(folder)
        check_name(publication.name)
        refuse_leaks(published_texts(folder, PUBLISHED), publication.allowed)
        name_folder = NameFolder(self._backbone(manifest.backbone.id) / publication.name)
        _refuse_other_case(name_folder)
        self._write_gitignore()
        entry = name_folder.add(folder, publication.version, publication.tags)
        _touch(name_folder)
        return entry

    def search(self, query: Query) -> list[Entry]:
        """Return the versions that match a query, in its order."""
        if not self.root.is_dir():
            return []
        return self._with_index(lambda index: index.search(query))

    def versions(self, name: str, *, backbone: str | None = None) -> Sequence[Entry]:
        """List all versions of a name, oldest first."""
        paths = [path / name for path in subfolders(self.root) if (path / name).is_dir()]
        entries = [entry for path in paths for entry in NameFolder(path).versions()]
        field = "fingerprint" if is_fingerprint(backbone or "") else "backbone"
        matches = [e for e in entries if backbone is None or getattr(e, field) == backbone]
        if not matches:
            raise self._not_found(name, backbone, entries)
        return matches

    def yank(self, entry: Entry, reason: str) -> None:
        """Exclude a version from searches and from references without a version."""
        name_folder = self._name_folder(entry)
        with name_folder.writing():
            name_folder.change(yanked={entry.version: reason})
        _touch(name_folder)

    def tag(self, entry: Entry, tag: str) -> None:
        """Move a tag to a version."""
        name_folder = self._name_folder(entry)
        with name_folder.writing():
            name_folder.change(tags={tag: entry.version})
        _touch(name_folder)

    def verify(self) -> list[str]:
        """Read all versions, and list the damaged ones with their problems."""
        problems = []
        for name_folder in self._name_folders():
            for folder in name_folder.folders():
                try:
                    read_adapter(folder)
                except FileError as error:
                    lines = "; ".join((error.problem, *error.offenders))
                    problems.append(f"{folder.relative_to(self.root).as_posix()}: {lines}")
        return problems

    def reindex(self) -> int:
        """Rebuild the index from the folders, and return the number of names."""
        remove_index(self._index_path())
        return self._with_index(lambda index: index.count())

    def gc(self) -> list[Path]:
        """Remove the staging folders of interrupted writers, and return their paths."""
        return [path for name_folder in self._name_folders() for path in name_folder.clean()]

    def _not_found(self, name: str, backbone: str | None, others: Sequence[Entry]) -> RegistryError:
        if others:
            detail = f" for {backbone}"
        else:
            detail = did_you_mean(name, {folder.name for folder in self._name_folders()})
        return RegistryError(
            f"{self.root} has no adapter {name!r}{detail}",
            offenders=sorted({f"it has one for {e.backbone}, {e.fingerprint}" for e in others}),
            hint="adapterhub list",
        )

    def _name_folders(self) -> Iterator[NameFolder]:
        for backbone in subfolders(self.root):
            yield from map(NameFolder, subfolders(backbone))

    def _name_folder(self, entry: Entry) -> NameFolder:
        return NameFolder(self._backbone(entry.backbone) / entry.name)

    def _backbone(self, backbone: str) -> Path:
        return self.root / backbone.replace("/", "--")

    def _with_index(self, use: Callable[[Index], Result]) -> Result:
        """Apply a function to the updated index; a corrupted index is rebuilt."""
        try:
            with open_index(self._index_path()) as index:
                self._update(index)
                return use(index)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):  # locked, read-only or disk full
                raise
        remove_index(self._index_path())
        with open_index(self._index_path()) as index:
            self._update(index)
            return use(index)

    def _index_path(self) -> Path:
        # Outside of the root, which may be in git or read-only. Each index format has its own file.
        key = hashlib.sha256(os.fsencode(self.root.resolve())).hexdigest()[:24]
        return (
            user_cache_path("adapterhub", appauthor=False) / "registry" / f"{key}.{FORMAT}.sqlite"
        )

    def _update(self, index: Index) -> None:
        """Index the folders that changed since the last search."""
        stamp = self._stamp()
        if index.registry_stamp() == stamp and index.has_more_than(_FEW):
            return
        name_folders = {f.path.relative_to(self.root).as_posix(): f for f in self._name_folders()}
        stamps = {path: name_folder.stamp() for path, name_folder in name_folders.items()}
        indexed = index.stamps()
        changed = [path for path in stamps if indexed.get(path) != stamps[path]]
        removed = indexed.keys() - stamps.keys()
        if changed or removed or index.registry_stamp() != stamp:
            index.update(
                ((path, stamps[path], _versions_with_text(name_folders[path])) for path in changed),
                removed,
                stamp,
            )

    def _stamp(self) -> str:
        """Return a text that changes with each publication."""
        paths = (self.root, *subfolders(self.root))
        return " ".join(f"{path.name}:{path.stat().st_mtime_ns}" for path in paths)

    def _write_gitignore(self) -> None:
        """Create the registry with a .gitignore for the writers' lock and staging files."""
        with explained(self.root), contextlib.suppress(FileExistsError):
            self.root.mkdir(parents=True, exist_ok=True)
            with open(self.root / ".gitignore", "x", encoding="utf-8") as file:
                file.write(_IGNORED)


def subfolders(path: Path) -> list[Path]:
    """List the folders in a folder, sorted, without hidden ones; empty if it does not exist."""
    if not path.is_dir():
        return []
    with os.scandir(path) as entries:
        names = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    return [path / name for name in names]


def _touch(name_folder: NameFolder) -> None:
    """Change the stamp of the registry, for readers that check only the backbones' folders."""
    os.utime(name_folder.path.parent)


def _versions_with_text(name_folder: NameFolder) -> list[tuple[Entry, str]]:
    return [(entry, _search_text(name_folder, entry)) for entry in name_folder.versions()]


def _search_text(name_folder: NameFolder, entry: Entry) -> str:
    """Return the text that searches cover: the entry's words and the start of its card."""
    card = name_folder.path / entry.version / CARD_FILE
    start = card.read_bytes()[:_CARD_BYTES] if card.is_file() else b""
    return " ".join((*entry.words, start.decode("utf-8", "replace")))


def _refuse_other_case(name_folder: NameFolder) -> None:
    """Refuse a name that would be the same folder on a case-insensitive file system."""
    for other in subfolders(name_folder.path.parent):
        if other.name != name_folder.name and other.name.casefold() == name_folder.name.casefold():
            raise RegistryError(
                f"{name_folder.name!r} differs from the published {other.name!r} only in case",
                hint=f"publish it as {other.name!r}, or under another name",
            )
