"""A store in a folder, which may be in git; the default is in the user's data folder.

    <root>/<backbone>/<name>/v1/     an adapter's files; see local_versions.py and file_names.py

Searches use an index in the user's cache, which is updated from the folders when they changed; the
folders alone are authoritative. The folder may come from a stranger: nothing outside of it is read,
and what cannot be read in it is left out with a warning.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from adapterhub.config.user_folders import user_folder
from adapterhub.errors import FileError, RegistryError, did_you_mean, warn_user
from adapterhub.files.atomic import explained, is_plain_folder
from adapterhub.files.native import check_adapter, find_adapter, read_card
from adapterhub.files.signature import Signature
from adapterhub.registry.file_names import backbone_folder, folder_of_id, is_backbone_folder
from adapterhub.registry.index import FORMAT, Index, IndexedFolder, open_index, remove_index
from adapterhub.registry.local_versions import Contents, NameFolder, folder_stamp, line_of
from adapterhub.registry.nearby import nearby_adapters
from adapterhub.registry.published_files import (
    PUBLISHED,
    check_digest,
    copy_adapter,
    manifest_bytes,
)
from adapterhub.registry.reference import check_name, is_name
from adapterhub.registry.secrets import published_texts, refuse_leaks
from adapterhub.registry.store import (
    Entry,
    Publication,
    Query,
    Registry,
    choose_version,
    is_fingerprint,
    version_number,
)

Result = TypeVar("Result")

_CARD_CHARACTERS = 4_096  # the start of a card that text searches cover
_IGNORED = ".lock\n.adapterhub-*\n.*.new\n"
_SHOWN = 5  # broken versions that a warning names
_ATTEMPTS = 3  # to open the index, which other processes may replace at the same time


def default_root() -> Path:
    """Return `$ADAPTERHUB_REGISTRY`, or else `registry` in the user's data folder."""
    root = os.environ.get("ADAPTERHUB_REGISTRY")
    return Path(root) if root else user_folder("data") / "registry"


class LocalRegistry(Registry):
    """A store in a folder; see `Store` for the methods that all stores have.

    The default folder may be missing, and is then empty. Any other one has to exist, unless an
    adapter is published to it.
    """

    def __init__(self, root: str | Path | None = None) -> None:
        self.root = Path(root) if root is not None else default_root()
        self._may_be_missing = root is None

    @property
    def location(self) -> str:
        """The folder."""
        return str(self.root)

    def resolve(
        self, name: str, version: str | None = None, *, backbone: str | None = None
    ) -> Entry:
        """Find the version that a name refers to.

        Raises:
            RegistryError: no such name or version, or the name exists for several backbones.
            FileError: that version cannot be read.
        """
        folders = self._matching(name, backbone)
        entries = [entry for contents in folders for entry in contents.entries]
        if len(backbones := sorted({entry.backbone for entry in entries})) > 1:
            raise _several(name, backbones)
        for contents in folders:
            if contents.entries or not entries:
                contents.raise_broken(name, version)
        return choose_version(entries, name, version)

    def get(self, entry: Entry, folder: Path | None = None) -> Path:
        """Return the folder with the verified files of a version: `folder`, or the registry's."""
        source = self._name_folder(entry).version(entry.version)
        if folder is not None:
            return copy_adapter(source, folder, entry.digest)
        check_adapter(source)
        check_digest(source, manifest_bytes(source), entry.digest)
        return source

    def put(self, folder: Path, publication: Publication) -> Entry:
        """Publish an adapter's folder."""
        manifest = check_adapter(folder)
        check_name(publication.name)
        refuse_leaks(published_texts(folder, PUBLISHED), publication.allowed)
        path = self.root / backbone_folder(manifest.backbone.id) / publication.name
        _refuse_other_case(path.parent)
        _refuse_other_case(path)
        name_folder = NameFolder(path)
        self._write_gitignore()
        entry = name_folder.add(folder, publication.version, publication.tags)
        return entry

    def search(self, query: Query) -> list[Entry]:
        """Return the versions that match a query, in its order; warn of those that are broken."""
        if not self.exists():
            return []
        entries, broken = self._with_index(lambda index: (index.search(query), index.broken()))
        self._warn(broken)
        return entries

    def versions(self, name: str, *, backbone: str | None = None) -> Sequence[Entry]:
        """List all versions of a name, oldest first; warn of those that are broken.

        Raises:
            RegistryError: no adapter has this name.
            FileError: none of its versions can be read.
        """
        folders = self._matching(name, backbone)
        entries = [entry for contents in folders for entry in contents.entries]
        if not entries:
            folders[0].raise_broken(name, None)
        self._warn({f"{name}/{v}": line_of(e) for c in folders for v, e in c.broken.items()})
        return entries

    def yank(self, entry: Entry, reason: str) -> None:
        """Exclude a version from searches and from references without a version."""
        name_folder = self._name_folder(entry)
        with name_folder.writing():
            name_folder.change(yanked={entry.version: reason})

    def tag(self, entry: Entry, tag: str) -> None:
        """Move a tag to a version.

        Raises:
            ConfigError: the tag is invalid.
            RegistryError: the version was deleted meanwhile.
        """
        name_folder = self._name_folder(entry)
        with name_folder.writing():
            if entry.version not in name_folder.numbers():
                raise RegistryError(f"{entry.reference} was deleted")
            name_folder.change(tags={tag: entry.version})

    def untag(self, entry: Entry, tag: str) -> None:
        """Remove a tag of the name of a version."""
        name_folder = self._name_folder(entry)
        with name_folder.writing():
            name_folder.untag(tag)

    def delete(self, name: str, version: str, *, backbone: str | None = None) -> None:
        """Delete a version for good, also one that cannot be read.

        Args:
            name: the adapter's name.
            version: the version number.
            backbone: a backbone's id or fingerprint, to choose between adapters of the same name.

        Raises:
            RegistryError: no such version, or the name has it for several backbones.
            FileError: the tags of the name cannot be read.
            OutputError: the registry cannot be written.
        """
        number = f"v{version_number(version)}"
        folders = [folder for folder in self._named(name, backbone) if number in folder.numbers()]
        if not folders:
            self.resolve(name, version, backbone=backbone)  # an error that says what there is
            raise RegistryError(f"{self.root} has no {name}@{number}")
        if len(folders) > 1:
            raise _several(name, [folder.path.parent.name for folder in folders])
        folders[0].remove(number)

    def _named(self, name: str, backbone: str | None) -> list[NameFolder]:
        """Return the folders of a name, for a backbone, readable or not."""
        folders = [NameFolder(self.root / folder / name) for folder in self._backbone_folders()]
        here = [folder for folder in folders if is_name(name) and is_plain_folder(folder.path)]
        if backbone is None:
            return here
        if not is_fingerprint(backbone):
            return [f for f in here if f.path.parent.name == folder_of_id(backbone)]
        return [f for f in here if any(e.fingerprint == backbone for e in f.read().entries)]

    def has(self, name: str) -> bool:
        """Return whether there is a version of this name, readable or not."""
        return any(folder.numbers() for folder in self._named(name, None))

    def signatures(self, entry: Entry) -> Sequence[Signature]:
        """List signatures outside of the version's folder: none."""
        return ()

    def add_signatures(self, entry: Entry, signatures: Sequence[Signature]) -> None:
        """Add signatures to a published version."""
        self._name_folder(entry).sign(entry, signatures)

    def verify(self) -> list[str]:
        """Read all versions, and list the problems of files, links and names."""
        if not self.exists():
            return []
        problems = self._problems_of_folders()
        for name_folder in self._name_folders():
            try:
                lines = name_folder.problems()
            except FileError as error:
                lines = [line_of(error)]
            problems += [f"{self._path_of(name_folder)}/{line}" for line in lines]
        return problems + self._changed_since_indexed()

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
        return [path for name_folder in self._name_folders() for path in name_folder.clean()]

    def exists(self) -> bool:
        """Return whether there is a registry; only the default one may be missing.

        Raises:
            RegistryError: another one is missing, or is not a folder.
        """
        if self.root.is_dir():
            return True
        if self._may_be_missing and not os.path.lexists(self.root):
            return False
        near = did_you_mean(self.root.name, [path.name for path in subfolders(self.root.parent)])
        raise RegistryError(
            f"there is no registry {str(self.root)!r}{near}",
            expected="a folder with published adapters",
            hint="check --registry and $ADAPTERHUB_REGISTRY",
        )

    def _matching(self, name: str, backbone: str | None) -> list[Contents]:
        """Read the folders of a name that have versions for a backbone, readable or not."""
        folders = [self.root / folder / name for folder in self._backbone_folders()]
        folders = [path for path in folders if is_name(name) and os.path.lexists(path)]
        found = {path: NameFolder(path).read() for path in folders}
        field = "fingerprint" if is_fingerprint(backbone or "") else "backbone"
        matching = []
        for path, contents in found.items():
            entries = [e for e in contents.entries if backbone in (None, getattr(e, field))]
            here = backbone is None or folder_of_id(backbone) == path.parent.name
            if entries or (here and contents.broken):
                matching.append(Contents(entries, contents.broken, contents.names))
        if not matching:
            for contents in found.values():
                if not contents.entries:  # it may be for this backbone
                    contents.raise_broken(name, None)
            others = [entry for contents in found.values() for entry in contents.entries]
            raise self._not_found(name, backbone, others, deleted=bool(found))
        return matching

    def _not_found(
        self, name: str, backbone: str | None, others: Sequence[Entry], *, deleted: bool
    ) -> RegistryError:
        if others:
            detail = f" for {backbone}"
        elif deleted:
            detail = ": all its versions were deleted"
        else:
            detail = did_you_mean(name, {folder.name for folder in self._name_folders()})
        folders = [] if others else nearby_adapters(name)
        here = [f"the folder {folder} has an adapter" for folder in folders]
        hint = "adapterhub list"
        if folders and find_adapter(Path(folders[0])):
            hint = f"{folders[0]} for that folder; adapterhub publish {folders[0]} publishes it"
        elif folders:
            here[0] += " of peft"
            hint = f"adapterhub import {folders[0]} --output {name}"
        return RegistryError(
            f"{self.root} has no adapter {name!r}{detail}",
            offenders=sorted({f"it has one for {e.backbone}, {e.fingerprint}" for e in others})
            + here,
            hint=hint,
        )

    def _backbone_folders(self) -> list[str]:
        folders = subfolders(self.root) if self.exists() else []
        return [path.name for path in folders if is_backbone_folder(path.name)]

    def _name_folders(self) -> Iterator[NameFolder]:
        for backbone in self._backbone_folders():
            for path in subfolders(self.root / backbone):
                if is_name(path.name):
                    yield NameFolder(path)

    def _name_folder(self, entry: Entry) -> NameFolder:
        check_name(entry.name)
        return NameFolder(self.root / folder_of_id(entry.backbone) / entry.name)

    def _path_of(self, name_folder: NameFolder) -> str:
        return f"{name_folder.path.parent.name}/{name_folder.name}"

    def _problems_of_folders(self) -> list[str]:
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

    def _warn(self, broken: Mapping[str, str]) -> None:
        """Warn of versions that are left out."""
        if broken:
            lines = [f"{path}: {problem}"[:300] for path, problem in broken.items()][:_SHOWN]
            lines += [f"and {len(broken) - _SHOWN} more"] * (len(broken) > _SHOWN)
            text = f"these versions in {self.root} cannot be read and are left out: "
            hint = "; adapterhub registry verify lists all problems"
            warn_user(text + "; ".join(lines) + hint, stacklevel=3)

    def _changed_since_indexed(self) -> list[str]:
        """List the versions whose manifest is not the one that the last search saw."""
        if not self._index_path().is_file():
            return []
        indexed = self._attempt(Index.digests)
        changed = []
        for name_folder in self._name_folders():
            for entry in name_folder.read().entries:
                path = f"{self._path_of(name_folder)}/{entry.version}"
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
        for backbone in self._backbone_folders():
            with contextlib.suppress(OSError), os.scandir(self.root / backbone) as entries:
                for entry in entries:  # no Path objects: there may be 100,000 names
                    if is_name(entry.name) and entry.is_dir(follow_symlinks=False):
                        stamps[f"{backbone}/{entry.name}"] = folder_stamp(entry.path)
        return dict(sorted(stamps.items()))

    def _read_for_index(self, path: str) -> IndexedFolder:
        name_folder = NameFolder(self.root / path)
        contents = name_folder.read()
        return IndexedFolder(
            [(entry, _search_text(name_folder, entry)) for entry in contents.entries],
            {file: line_of(error) for file, error in contents.broken.items()},
        )

    def _index_path(self) -> Path:
        # Outside of the root, which may be in git or read-only. Each index format has its own file.
        key = hashlib.sha256(os.fsencode(self.root.resolve())).hexdigest()[:24]
        return user_folder("cache") / "registry" / f"{key}.{FORMAT}.sqlite"

    def _write_gitignore(self) -> None:
        """Create the registry with a .gitignore for the writers' lock and staging files."""
        with explained(self.root), contextlib.suppress(FileExistsError):
            self.root.mkdir(parents=True, exist_ok=True)
            with open(self.root / ".gitignore", "x", encoding="utf-8") as file:
                file.write(_IGNORED)


def subfolders(path: Path) -> list[Path]:
    """List the folders in a folder, sorted, without links and hidden ones."""
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        names = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
        return [path / name for name in names if not name.startswith(".")]
    return []


def _several(name: str, backbones: Sequence[str]) -> RegistryError:
    return RegistryError(
        f"{name!r} exists for several backbones",
        offenders=backbones,
        hint=f"choose one: --backbone {backbones[0]}",
    )


def _stamp_of(stamps: Mapping[str, str]) -> str:
    return hashlib.sha256("\n".join(map(" ".join, stamps.items())).encode()).hexdigest()


def _search_text(name_folder: NameFolder, entry: Entry) -> str:
    """Return the text that searches cover: the entry's words and the start of its card."""
    card = read_card(name_folder.path / entry.version)
    return " ".join((*entry.words, card[:_CARD_CHARACTERS]))


def _refuse_other_case(path: Path) -> None:
    """Refuse a name that would be the same folder on a case-insensitive file system."""
    for other in subfolders(path.parent):
        if other.name != path.name and other.name.casefold() == path.name.casefold():
            raise RegistryError(
                f"{path.name!r} differs from the published {other.name!r} only in case",
                hint=f"publish it as {other.name!r}, or under another name",
            )
