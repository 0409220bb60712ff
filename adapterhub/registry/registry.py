"""A user's own registry, in a folder or a bucket; either can be copied to the other.

    BACKBONE/NAME/v1/             an adapter's files as saved; they never change, except signatures
    BACKBONE/NAME/v1/.published   when it was published, in UTC
    BACKBONE/NAME/names.json      tags, yanked versions and the highest version
    BACKBONE/index.json           an index of the folders, for searches; both in version_files.py

A publisher takes the next number by replacing names.json, provided that the file has not changed
since it was read. Two publishers therefore never share a version. Then it writes the files. An
interruption leaves a number that is not used again. An unreadable version does not affect the
others.

Finally the publisher writes all rows of the name to the index. If it dies in between, searches omit
its version until the next writer of the name, or `adapterhub registry index`, adds it. Lookups by
name find it at once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from adapterhub.errors import (
    AdapterhubError,
    FileError,
    NotPublishedError,
    RegistryError,
    did_you_mean,
    one_line,
    warn_user,
)
from adapterhub.files.manifest import MAX_MANIFEST_BYTES
from adapterhub.files.native import (
    BESIDE,
    MANIFEST_FILE,
    PEFT_FILES,
    SIGNATURE_FILE,
    Saved,
    find_adapter,
    published_texts,
)
from adapterhub.files.signature import MAX_SIGNATURE_BYTES, Signature, parse_signatures
from adapterhub.registry.secrets import refuse_leaks
from adapterhub.registry.store import (
    INDEX_FILE,
    ConflictError,
    Entry,
    Publication,
    Query,
    Storage,
    Store,
    Stored,
    backbone_folder,
    check_name,
    check_tags,
    choose_version,
    filter_entries,
    folder_of_id,
    free_version,
    is_backbone_folder,
    is_fingerprint,
    is_name,
    is_version_folder,
    nearby_adapters,
    version_number,
    word_text,
)
from adapterhub.registry.version_files import (
    DATE_FILE,
    MAX_DATE_BYTES,
    MAX_INDEX_BYTES,
    MAX_NAMES_BYTES,
    NAMES_FILE,
    PUBLISHED,
    Contents,
    Names,
    date_bytes,
    date_now,
    entry_of,
    index_bytes,
    index_with,
    merged_signatures,
    names_bytes,
    parse_backbones,
    parse_date,
    parse_index,
    parse_names,
    root_bytes,
    row_of,
    stamp_bytes,
)

_ATTEMPTS = 60  # attempts to change a file while others do
_SHOWN = 5  # broken versions that a warning names
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Registry(Store):
    """A user's own store: names have no owner, and `name@v1` is a reference.

    Args:
        storage: its files.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._not_indexed: set[str] | None = None
        self._indexes: dict[str, tuple[Stored, dict[str, Contents]]] = {}  # as last read

    @property
    def location(self) -> str:
        """The folder or the URL."""
        return self.storage.location

    def exists(self) -> bool:
        """Return whether there is anything to read.

        Raises:
            RegistryError: it should exist and does not, or cannot be reached.
        """
        return self.storage.exists()

    def resolve(
        self, name: str, version: str | None = None, *, backbone: str | None = None
    ) -> Entry:
        """Find the version that a name refers to.

        Raises:
            RegistryError: no such name or version, or the name exists for several backbones.
            FileError: that version cannot be read.
        """
        matching = self._matching(name, backbone)
        entries = [entry for contents in matching.values() for entry in contents.entries]
        if len(backbones := sorted({entry.backbone for entry in entries})) > 1:
            raise _several(name, backbones)
        for contents in matching.values():
            if contents.entries or not entries:
                contents.raise_broken(name, version)
        return choose_version(entries, name, version)

    def versions(self, name: str, *, backbone: str | None = None) -> Sequence[Entry]:
        """List all versions of a name, oldest first; warn of broken ones.

        Raises:
            RegistryError: no adapter has this name.
            FileError: none of its versions can be read.
        """
        matching = self._matching(name, backbone)
        entries = [entry for contents in matching.values() for entry in contents.entries]
        if not entries:
            next(iter(matching.values())).raise_broken(name, None)
        self._warn(
            {f"{name}/{v}": line_of(e) for c in matching.values() for v, e in c.broken.items()}
        )
        return entries

    def search(self, query: Query) -> list[Entry]:
        """Return the versions that match a query, in its order; warn of broken ones."""
        every = self.everything(query.backbone)
        self._warn({f"{p}/{v}": line_of(e) for p, c in every.items() for v, e in c.broken.items()})
        available = [e for c in every.values() for e in c.entries if e.yanked is None]
        newest = {(entry.backbone, entry.name): entry for entry in available}
        shown = available if query.all_versions else newest.values()
        return filter_entries(shown, query, lambda entry: _words_of(entry, every))

    def everything(self, backbone: str | None = None) -> dict[str, Contents]:
        """Read all names by path, or at least the names of a backbone.

        The index is read if it is intact, otherwise the folders.
        """
        try:
            indexed = self._indexed(backbone)
        except FileError as error:
            warn_user(f"{line_of(error)}; the folders are read, which takes longer", stacklevel=3)
            indexed = None
        return self._read(_by_name(self.storage.files())) if indexed is None else indexed

    def index(self) -> int:
        """Rebuild the index from the folders and return the number of names.

        Raises:
            OutputError: the registry cannot be written.
            RegistryError: the same, for a bucket.
        """
        backbones = {path.partition("/")[0] for path in _by_name(self.storage.files())}
        listed: list[str] = []
        with suppress(FileError):
            listed = self._indexed_backbones()
        names = [self._write_index(each, None) for each in sorted(backbones | {*listed})]
        self._write_root(lambda known: backbones)
        return sum(names)

    def has(self, name: str) -> bool:
        """Return whether there is a version of this name, readable or not."""
        return any(self._numbers(path) for path in self._paths(name))

    def get(self, entry: Entry, folder: Path | None = None) -> Path:
        """Return the folder with the verified files of a version: `folder`, or the registry's."""
        return self.storage.get(f"{_path_of(entry)}/{entry.version}", entry.digest, folder)

    def put(self, folder: Path | Saved, publication: Publication) -> Entry:
        """Publish an adapter's folder."""
        saved, name = Saved.at(folder), publication.name
        self.storage.check_room(saved.manifest.nbytes)  # before all of it is read
        saved.check()
        saved.signatures()
        check_name(name)
        check_tags(publication.tags)
        refuse_leaks(published_texts(saved.folder, (*PUBLISHED, *BESIDE)), publication.allowed)
        path, digest = f"{backbone_folder(saved.manifest.backbone.id)}/{name}", saved.digest
        with self.storage.writing(path):
            entries = self.contents(path).entries
            version = next((entry.version for entry in entries if entry.digest == digest), None)
            if version is None:
                version = self._take_number(path, publication, entries)
                date = publication.published
                written = date_bytes(date) if date else date_now()
                written += stamp_bytes(version, digest)
                self.storage.create(f"{path}/{version}", saved, digest, written)
            elif PEFT_FILES[0] not in self._files(path).get(version, {}):
                for file, data in saved.beside().items():
                    self.storage.replace(f"{path}/{version}/{file}", data, None)
            tags = dict.fromkeys(publication.tags, version)
            names = self._change(path, lambda names: replace(names, tags=names.tags | tags))
            self._add_to_index(path)
            return self._entry(path, version, self._files(path).get(version, {}), names)

    def version_for(self, folder: Path | Saved, publication: Publication) -> tuple[str, bool]:
        """Return the version that `put` would return, and whether it is already published."""
        check_name(publication.name)
        saved = Saved.at(folder)
        path = f"{backbone_folder(saved.manifest.backbone.id)}/{publication.name}"
        digest = saved.digest
        entries = self.contents(path).entries
        if known := next((entry.version for entry in entries if entry.digest == digest), None):
            return known, True
        highest = max(self._names(path)[0].highest, *map(_number, self._numbers(path)), 0)
        return free_version(publication.name, publication.version, entries, highest), False

    def yank(self, entry: Entry, reason: str) -> None:
        """Exclude a version from searches and from references without a version."""
        yanked = {entry.version: reason}
        with self._writing(entry) as path:
            self._change(path, lambda names: replace(names, yanked=names.yanked | yanked))

    def tag(self, entry: Entry, tag: str) -> None:
        """Move a tag to a version.

        Raises:
            ConfigError: the tag is invalid.
            RegistryError: the version was deleted in the meantime.
        """
        check_tags((tag,))
        with self._writing(entry) as path:
            if entry.version not in self._numbers(path):
                raise RegistryError(f"{entry.reference} was deleted")
            tags = {tag: entry.version}
            self._change(path, lambda names: replace(names, tags=names.tags | tags))

    def untag(self, entry: Entry, tag: str) -> None:
        """Remove a tag of the name of a version."""

        def without(names: Names) -> Names:
            return replace(names, tags={k: v for k, v in names.tags.items() if k != tag})

        with self._writing(entry) as path:
            self._change(path, without)

    def delete(self, name: str, version: str, *, backbone: str | None = None) -> None:
        """Delete a version permanently, even an unreadable one; its number is not used again.

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
        paths = [path for path in self._named(name, backbone) if number in self._numbers(path)]
        if not paths:
            self.resolve(name, version, backbone=backbone)  # raises; lists the versions
            raise NotPublishedError(f"{self.location} has no {name}@{number}")
        if len(paths) > 1:
            raise _several(name, [path.partition("/")[0] for path in paths])
        (path,) = paths
        with self.storage.writing(path):
            if number not in self._numbers(path):
                raise NotPublishedError(f"{name!r} has no version {number}")
            self._change(path, lambda names: names)  # records the highest number so far
            self.storage.remove(f"{path}/{number}")
            self._change(path, lambda names: names.without(number))
            self._add_to_index(path)

    def signatures(self, entry: Entry) -> Sequence[Signature]:
        """List the signatures of a version; a bucket may have newer ones than a cached copy.

        Raises:
            RegistryError: the storage cannot be read.
            FileError: the signature file is broken.
        """
        return self._signatures(entry)[0]

    def add_signatures(self, entry: Entry, signatures: Sequence[Signature]) -> None:
        """Add signatures to a published version."""

        def attempt() -> None:
            known, stored = self._signatures(entry)
            data = merged_signatures(known, signatures, entry.digest)
            self.storage.replace(_signature_path(entry), data, stored)

        with self._writing(entry):
            self._retry(attempt, _signature_path(entry))

    def verify(self) -> list[str]:
        """Read all versions, and list the problems of files and names."""
        if not self.exists():
            return []
        problems: list[str] = []
        every: dict[str, Contents] = {}
        for path in self._all_paths():
            try:
                files = self.storage.files(f"{path}/")
                every |= self._read({path: _by_version(path, files)})
                lines = self._problems(path, every[path]) + _strays(path, files)
            except FileError as error:
                lines = [line_of(error)]
            problems += [f"{path}/{line}" for line in lines]
        return problems + self._index_problems(every)

    def _index_problems(self, published: Mapping[str, Contents]) -> list[str]:
        """Compare the index, if it exists, with the folders."""
        hint = "adapterhub registry index rebuilds it"
        try:
            if (indexed := self._indexed(None)) is None:
                return []
            listed = {*self._indexed_backbones()}
        except FileError as error:
            return [line_of(error)]
        here = published.keys()
        # A name whose versions were all deleted is not in the index.
        published = {p: c for p, c in published.items() if c.entries or c.broken}
        first = {path.partition("/")[0]: path for path in sorted(published, reverse=True)}
        missing = sorted(b for b in first.keys() - listed if not self._is_indexed_by_now(first[b]))
        problems = [f"{INDEX_FILE}: {backbone} is missing; {hint}" for backbone in missing]
        for path in sorted(indexed.keys() | published.keys()):
            backbone, _, name = path.partition("/")
            if backbone not in listed or _agree(indexed.get(path), published.get(path)):
                continue
            if path not in here or not self._is_indexed_by_now(path):
                problems.append(f"{backbone}/{INDEX_FILE}: {name} has changed since; {hint}")
        return problems

    def _is_indexed_by_now(self, path: str) -> bool:
        """Compare a name with its row again, while no writer can be active."""
        backbone, _, name = path.partition("/")
        with suppress(AdapterhubError), self.storage.writing(path):
            contents, row = self.contents(path), (self._index_of(backbone) or {}).get(name)
            current = contents if contents.entries or contents.broken else None
            return backbone in self._indexed_backbones() and _agree(row, current)
        return False  # a reader without write access cannot check

    def contents(self, path: str) -> Contents:
        """Read all versions of a name; list unreadable ones with their errors."""
        try:
            return self._read({path: self._files(path)})[path]
        except FileError as error:
            return Contents([], {NAMES_FILE: error})

    def _read(self, files: Mapping[str, Mapping[str, Mapping[str, str]]]) -> dict[str, Contents]:
        """Read the versions of names, given the tags of their files by name and version."""
        known = self._map(lambda path: _or_error(lambda: self._names(path)[0]), files)
        return self._read_versions(files, dict(zip(files, known, strict=True)))

    def _read_versions(
        self,
        files: Mapping[str, Mapping[str, Mapping[str, str]]],
        known: Mapping[str, Names | FileError],
    ) -> dict[str, Contents]:
        """Read the versions of names, given the contents of `names.json`."""
        by_path = {
            path: Contents([], {}, names)
            if isinstance(names, Names)
            else Contents([], {NAMES_FILE: names})
            for path, names in known.items()
        }
        places = [
            (path, version, own)
            for path, versions in files.items()
            for version, own in versions.items()
            if not by_path[path].broken and (self.storage.is_atomic or MANIFEST_FILE in own)
        ]
        entries = self._map(
            lambda at: _or_error(lambda: self._entry(*at, by_path[at[0]].names)), places
        )
        broken = []
        for (path, version, _), read in zip(places, entries, strict=True):
            if isinstance(read, Entry):
                by_path[path].entries.append(read)
            else:
                broken.append((path, version, read))
        numbers = {path: self._numbers(path) for path in {path for path, *_ in broken}}
        for path, version, error in broken:
            if version in numbers[path]:  # otherwise it was deleted meanwhile
                by_path[path].broken[version] = error
        return by_path

    def _map(self, function: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
        """Apply a function that reads the storage, concurrently where that is faster."""
        if self.storage.readers == 1:
            return list(map(function, items))
        with ThreadPoolExecutor(self.storage.readers) as pool:
            return list(pool.map(function, items))

    def _entry(self, path: str, version: str, files: Mapping[str, str], names: Names) -> Entry:
        """Read the entry of a version, given the tags of its files."""
        (backbone, _, name), folder = path.partition("/"), f"{path}/{version}"
        manifest = self.storage.read(
            f"{folder}/{MANIFEST_FILE}", MAX_MANIFEST_BYTES, files.get(MANIFEST_FILE, "")
        )
        if manifest is None:
            raise FileError(f"{self.location}/{folder}/{MANIFEST_FILE}: missing")
        entry = entry_of(
            manifest.data,
            reference=f"{name}@{version}",
            name=name,
            version=version,
            tags=tuple(sorted(tag for tag, at in names.tags.items() if at == version)),
            yanked=names.yanked.get(version),
            published=self._date(folder, files.get(DATE_FILE)),
            signers=self._signers(folder, files.get(SIGNATURE_FILE)),
        )
        if folder_of_id(entry.backbone) != backbone:
            raise FileError(
                f"{self.location}/{folder} holds an adapter of the backbone {entry.backbone!r}",
                expected=f"one of the backbone of {backbone}",
                hint="publish that adapter again, and remove this folder",
            )
        return entry

    def _date(self, folder: str, tag: str | None) -> str | None:
        """Read when a version was published; None if that is not recorded, or not a date."""
        stored = None
        if tag is not None:
            with suppress(FileError):
                stored = self.storage.read(f"{folder}/{DATE_FILE}", MAX_DATE_BYTES, tag)
        return parse_date(stored.data) if stored else None

    def _signers(self, folder: str, tag: str | None) -> tuple[str, ...]:
        """Read the ids of the keys that signed a version; empty for a damaged file."""
        if tag is not None:
            with suppress(FileError):
                stored = self.storage.read(f"{folder}/{SIGNATURE_FILE}", MAX_SIGNATURE_BYTES, tag)
                signatures = parse_signatures(stored.data, folder) if stored else ()
                return tuple(sorted({signature.signer.id for signature in signatures}))
        return ()

    def _names(self, path: str) -> tuple[Names, Stored | None]:
        file = f"{path}/{NAMES_FILE}"
        stored = self.storage.read(file, MAX_NAMES_BYTES)
        names = parse_names(stored.data, f"{self.location}/{file}") if stored else Names()
        return names, stored

    def _take_number(self, path: str, publication: Publication, entries: Sequence[Entry]) -> str:
        """Reserve the number of a new version for this publisher."""
        number = ""

        def take(names: Names) -> Names:
            nonlocal number
            number = free_version(publication.name, publication.version, entries, names.highest)
            # In one step the version itself takes the number, and an error leaves no gap.
            return names if self.storage.is_atomic else replace(names, highest=_number(number))

        self._change(path, take)
        return number

    def _change(self, path: str, update: Callable[[Names], Names]) -> Names:
        """Change the names.json of a name; start over if another writer was first."""
        changed = Names()

        def attempt() -> None:
            nonlocal changed
            names, stored = self._names(path)
            highest = max(names.highest, *map(_number, self._numbers(path)), 0)
            changed = update(replace(names, highest=highest))
            if changed != names:
                data = names_bytes(changed, path.rpartition("/")[2])
                self.storage.replace(f"{path}/{NAMES_FILE}", data, stored)

        self._retry(attempt, f"{path}/{NAMES_FILE}")
        return changed

    def _indexed(self, backbone: str | None) -> dict[str, Contents] | None:
        """Read the whole index or the index of one backbone; None if it does not exist.

        Raises:
            FileError: a part of it is missing or damaged.
        """
        if backbone is None or is_fingerprint(backbone):
            folders = self._indexed_backbones()
        else:
            folders = [folder_of_id(backbone)] if is_backbone_folder(folder_of_id(backbone)) else []
        indexed: dict[str, Contents] = {}
        for folder, index in zip(folders, self._map(self._index_of, folders), strict=True):
            if index is None and folder in self._indexed_backbones():
                raise FileError(f"{self.location}/{folder}/{INDEX_FILE}: missing")
            indexed |= {f"{folder}/{name}": contents for name, contents in (index or {}).items()}
        is_indexed = indexed or self.storage.reread(INDEX_FILE, MAX_INDEX_BYTES) is not None
        return indexed if is_indexed else None

    def _index_of(self, backbone: str) -> dict[str, Contents] | None:
        """Read the index of a backbone's folder."""
        path = f"{backbone}/{INDEX_FILE}"
        stored = self.storage.reread(path, MAX_INDEX_BYTES)
        if stored is None:
            return None
        known = self._indexes.get(backbone)
        if known is None or known[0] != stored:
            parsed = parse_index(stored.data, f"{self.location}/{path}", backbone)
            known = self._indexes[backbone] = (stored, parsed)
        return known[1]

    def _indexed_backbones(self) -> list[str]:
        """Read the index of the root."""
        stored = self.storage.reread(INDEX_FILE, MAX_INDEX_BYTES)
        return parse_backbones(stored.data, f"{self.location}/{INDEX_FILE}") if stored else []

    @contextmanager
    def indexing_at_the_end(self) -> Iterator[None]:
        """Write the index once, after many changes."""
        self._not_indexed = set()
        try:
            yield
        finally:
            paths, self._not_indexed = self._not_indexed, None
            for backbone in sorted({path.partition("/")[0] for path in paths}):
                own = {path for path in paths if path.startswith(f"{backbone}/")}
                self._add_to_index(*sorted(own))

    def _add_to_index(self, *paths: str) -> None:
        """Write all rows of names of a backbone.

        A version is published even if that fails, with a warning.
        """
        if self._not_indexed is not None:
            self._not_indexed.update(paths)
            return
        try:
            backbone = paths[0].partition("/")[0]
            self._write_index(backbone, paths)
            self._write_root(lambda known: {*known, backbone})
        except AdapterhubError as error:
            shown = paths[0] if len(paths) == 1 else f"{len(paths)} adapters"
            warn_user(
                f"{shown} in {self.location}: published, but not in the index: {line_of(error)}; "
                "adapterhub registry index rebuilds it",
                stacklevel=4,
            )

    def _write_index(self, backbone: str, paths: Sequence[str] | None) -> int:
        """Write the rows of these names, or of all of a backbone, as the folders are now.

        Returns:
            The number of names that were read.
        """
        file = f"{backbone}/{INDEX_FILE}"
        by_path: dict[str, Contents] = {}

        def attempt() -> None:
            nonlocal by_path
            stored = self.storage.read(file, MAX_INDEX_BYTES)
            data = b""
            if stored and paths is not None:
                with suppress(FileError):  # a damaged index is rebuilt
                    by_path = self._contents(paths)
                    data = index_with(stored.data, file, backbone, _by_own_name(by_path))
            if not data:
                by_path = self._read(_by_name(self.storage.files(f"{backbone}/")))
                data = index_bytes(backbone, _by_own_name(by_path))
            if stored is None or stored.data != data:
                self.storage.replace(file, data, stored)

        with self.storage.writing(backbone):
            self._retry(attempt, file)
        return len(by_path)

    def _write_root(self, update: Callable[[Iterable[str]], Iterable[str]]) -> None:
        """Change the list of the backbones."""

        def attempt() -> None:
            stored = self.storage.read(INDEX_FILE, MAX_INDEX_BYTES)
            known: list[str] = []
            if stored:
                with suppress(FileError):
                    known = parse_backbones(stored.data, INDEX_FILE)
            data = root_bytes(update(known))
            if stored is None or stored.data != data:
                self.storage.replace(INDEX_FILE, data, stored)

        with self.storage.writing(""):
            self._retry(attempt, INDEX_FILE)

    def _retry(self, attempt: Callable[[], None], file: str) -> None:
        """Retry a write after a conflict with another writer."""
        for number in range(_ATTEMPTS):
            try:
                return attempt()
            except ConflictError:
                time.sleep(random.uniform(0, min(0.02 * 2**number, 1.0)))
        raise RegistryError(
            f"{self.location}/{file} keeps changing",
            hint="try again when the other writers are done",
        )

    @contextmanager
    def _writing(self, entry: Entry) -> Iterator[str]:
        path = _path_of(entry)
        with self.storage.writing(path):
            yield path
            self._add_to_index(path)

    def _signatures(self, entry: Entry) -> tuple[tuple[Signature, ...], Stored | None]:
        path = _signature_path(entry)
        stored = self.storage.read(path, MAX_SIGNATURE_BYTES)
        source = f"{self.location}/{path}"
        return (parse_signatures(stored.data, source) if stored else ()), stored

    def _files(self, path: str) -> dict[str, dict[str, str]]:
        """Return the tags of the files of each version of a name, the lowest number first."""
        return _by_version(path, self.storage.files(f"{path}/"))

    def _numbers(self, path: str) -> list[str]:
        """List the versions of a name, readable or not."""
        return list(self._files(path))

    def _paths(self, name: str, backbone: str | None = None) -> list[str]:
        """Return where a name may have versions: a path for each backbone, or for this one."""
        if not is_name(name):
            return []
        known = backbone is not None and not is_fingerprint(backbone)
        folders = [folder_of_id(str(backbone))] if known else self.storage.folders()
        return [f"{folder}/{name}" for folder in folders if is_backbone_folder(folder)]

    def _all_paths(self) -> list[str]:
        folders = [path for path in self.storage.folders() if is_backbone_folder(path)]
        paths = (path for folder in folders for path in self.storage.folders(f"{folder}/"))
        return [path for path in paths if is_name(path.rpartition("/")[2])]

    def _named(self, name: str, backbone: str | None) -> list[str]:
        """Return the paths of a name for a backbone, readable or not."""
        paths = self._paths(name, backbone)
        if backbone is None or not is_fingerprint(backbone):
            return paths
        entries = {path: self.contents(path).entries for path in paths}
        return [path for path in paths if any(e.fingerprint == backbone for e in entries[path])]

    def _matching(self, name: str, backbone: str | None) -> dict[str, Contents]:
        """Read the paths of a name that have versions for a backbone, readable or not."""
        by_path = self._contents(self._paths(name, backbone))
        field = "fingerprint" if is_fingerprint(backbone or "") else "backbone"
        matching = {}
        for path, contents in by_path.items():
            entries = [e for e in contents.entries if backbone in (None, getattr(e, field))]
            here = backbone is None or folder_of_id(backbone) == path.partition("/")[0]
            if entries or (here and contents.broken):
                matching[path] = replace(contents, entries=entries)
        if not matching:
            for contents in by_path.values():
                if not contents.entries:  # it may be for this backbone
                    contents.raise_broken(name, None)
            with suppress(RegistryError):  # a web server without an index
                by_path |= self._contents(set(self._paths(name)) - by_path.keys())
            others = [entry for contents in by_path.values() for entry in contents.entries]
            raise self._not_found(name, backbone, others)
        return matching

    def _contents(self, paths: Iterable[str]) -> dict[str, Contents]:
        """Read names, concurrently where that is faster."""
        ordered = sorted(paths)
        return dict(zip(ordered, self._map(self.contents, ordered), strict=True))

    def _not_found(self, name: str, backbone: str | None, others: Sequence[Entry]) -> RegistryError:
        if others:
            detail = f" for {backbone}"
        elif any(self.storage.files(f"{path}/") for path in self._paths(name, backbone)):
            detail = ": all its versions were deleted"
        else:
            detail = f" for {backbone}" if backbone else ""
            with suppress(RegistryError):  # a web server without an index
                known = {path.rpartition("/")[2] for path in self._all_paths()}
                detail += did_you_mean(name, known)
        folders = [] if others else nearby_adapters(name)
        here = [f"the folder {folder} has an adapter" for folder in folders]
        hint = "adapterhub list"
        if folders and find_adapter(Path(folders[0])):
            hint = f"{folders[0]} for that folder; adapterhub publish {folders[0]} publishes it"
        elif folders:
            here[0] += " of peft"
            hint = f"adapterhub import {folders[0]} --output {name}"
        offenders = sorted({f"it has one for {e.backbone}, {e.fingerprint}" for e in others})
        return NotPublishedError(
            f"{self.location} has no adapter {name!r}{detail}",
            offenders=[*offenders, *here],
            hint=hint,
        )

    def _problems(self, path: str, contents: Contents) -> list[str]:
        """Verify all files of a name; return one line for each problem."""
        broken: dict[str, AdapterhubError] = {**contents.broken}
        for entry in contents.entries:
            try:
                self.storage.check(f"{path}/{entry.version}", entry.digest)
            except AdapterhubError as error:
                broken[entry.version] = error
        return [f"{file}: {line_of(error)}" for file, error in broken.items()]

    def _warn(self, broken: Mapping[str, str]) -> None:
        """Warn of versions that are left out."""
        if broken:
            lines = [one_line(f"{path}: {text}")[:300] for path, text in broken.items()][:_SHOWN]
            lines += [f"and {len(broken) - _SHOWN} more"] * (len(broken) > _SHOWN)
            text = f"these versions in {self.location} cannot be read and are left out: "
            hint = "; adapterhub registry verify lists all problems"
            warn_user(text + "; ".join(lines) + hint, stacklevel=3)


def line_of(error: AdapterhubError) -> str:
    """Return a problem and its details as one line."""
    return "; ".join((error.problem, *error.offenders))


def _words_of(entry: Entry, every: Mapping[str, Contents]) -> str:
    words = every[f"{folder_of_id(entry.backbone)}/{entry.name}"].words
    return words.get(entry.version) or word_text(entry.words)


def _by_own_name(by_path: Mapping[str, Contents]) -> dict[str, Contents]:
    """Return the contents of the names of one backbone, keyed by name only."""
    return {path.partition("/")[2]: contents for path, contents in by_path.items()}


def _agree(indexed: Contents | None, published: Contents | None) -> bool:
    """Return whether the index matches the folders; names without versions are ignored."""
    first, second = indexed or Contents([], {}), published or Contents([], {})
    same = [*map(row_of, first.entries)] == [*map(row_of, second.entries)]
    return same and first.broken.keys() == {
        version for version in second.broken if is_version_folder(version)
    }


def _or_error(read: Callable[[], _Result]) -> _Result | FileError:
    try:
        return read()
    except FileError as error:
        return error


def _by_name(files: Mapping[str, str]) -> dict[str, dict[str, dict[str, str]]]:
    """Group the files of a registry by name and version."""
    paths: dict[str, dict[str, str]] = {}
    for file, tag in files.items():
        parts = file.split("/")
        if len(parts) == 4 and is_backbone_folder(parts[0]) and is_name(parts[1]):
            paths.setdefault(f"{parts[0]}/{parts[1]}", {})[file] = tag
    return {path: _by_version(path, own) for path, own in paths.items()}


def _by_version(path: str, files: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Group the files of a name by version, the lowest number first."""
    versions: dict[str, dict[str, str]] = {}
    for file, tag in files.items():
        version, _, name = file[len(path) + 1 :].partition("/")
        if is_version_folder(version):
            versions.setdefault(version, {}).update({name: tag} if name else {})
    return dict(sorted(versions.items(), key=lambda item: _number(item[0])))


def _strays(path: str, files: Iterable[str]) -> list[str]:
    """List files that do not belong to a version; hidden files are ignored."""
    known = {*PUBLISHED, NAMES_FILE}
    names = [file[len(path) + 1 :] for file in files]
    strays = [
        name
        for name in names
        if not is_version_folder(name) and name.rpartition("/")[2] not in known
    ]
    shown = (name for name in strays if not name.rpartition("/")[2].startswith("."))
    return [f"{name}: not a file of the registry" for name in sorted(shown)]


def _path_of(entry: Entry) -> str:
    """Return the path of the name of a version."""
    check_name(entry.name)
    return f"{folder_of_id(entry.backbone)}/{entry.name}"


def _signature_path(entry: Entry) -> str:
    return f"{_path_of(entry)}/{entry.version}/{SIGNATURE_FILE}"


def _number(version: str) -> int:
    return version_number(version) or 0


def _several(name: str, backbones: Sequence[str]) -> RegistryError:
    return RegistryError(
        f"{name!r} exists for several backbones",
        offenders=backbones,
        hint=f"choose one: --backbone {backbones[0]}",
    )
