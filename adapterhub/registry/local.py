"""A registry in a folder: any folder, in git too; one under the user's data folder is the default.

    <root>/<backbone>/<name>/v1/     an adapter's files; see name_folder.py

A backbone's `/` is written `--`, which no Hub id has. What is searched is an index, made from the
folders when a search finds them changed, and kept in the user's cache: the folders stay in plain
sight, and say it all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from platformdirs import user_cache_path, user_data_path

from adapterhub.errors import ConfigError, FileError, RegistryError, did_you_mean
from adapterhub.files.atomic import explained
from adapterhub.files.native import CARD_FILE, read_adapter
from adapterhub.registry.index import FORMAT, Index, opened
from adapterhub.registry.local_versions import NameFolder, copy_adapter, digest_of
from adapterhub.registry.reference import is_name
from adapterhub.registry.store import Entry, Publication, Query, chosen, is_fingerprint

# Of a card, so many bytes are searched.
_CARD = 4_096
_IGNORED = ".lock\n.adapterhub-*\n.*.new\n"
# Up to so many names, each search looks at every folder, and so sees what git or a person changed.
_FEW = 2_000


def default_root() -> Path:
    """`$ADAPTERHUB_REGISTRY`, or `registry` in the user's data folder."""
    given = os.environ.get("ADAPTERHUB_REGISTRY")
    return Path(given) if given else user_data_path("adapterhub", appauthor=False) / "registry"


class LocalRegistry:
    """A store in a folder. `Store` says what each of its methods does."""

    def __init__(self, root: str | Path | None = None) -> None:
        self.root = Path(root) if root is not None else default_root()

    def resolve(
        self, name: str, version: str | None = None, *, backbone: str | None = None
    ) -> Entry:
        """The version that is meant."""
        found = self.versions(name, backbone=backbone)
        if len(backbones := sorted({entry.backbone for entry in found})) > 1:
            raise RegistryError(
                f"{name!r} is an adapter of several backbones",
                offenders=backbones,
                hint=f"name one: --backbone {backbones[0]}",
            )
        return chosen(found, name, version)

    def get(self, entry: Entry, folder: Path | None = None) -> Path:
        """The verified files of a version: those of the registry itself, or a copy in `folder`."""
        kept = self._home(entry).path / entry.version
        if folder is not None:
            return copy_adapter(kept, folder)
        read_adapter(kept)
        if digest_of(kept) != entry.digest:
            raise FileError(
                f"{kept} is not what was published as {entry.reference}",
                expected=f"a manifest with sha256 {entry.digest}",
                hint="adapterhub registry verify",
            )
        return kept

    def put(self, folder: Path, publication: Publication) -> Entry:
        """Publish an adapter's folder."""
        manifest, _ = read_adapter(folder)
        home = NameFolder(self._backbone(manifest.backbone.id) / _checked(publication.name))
        _refuse_other_case(home)
        self._ignore_locks()
        entry = home.add(folder, publication.version, publication.tags)
        self._changed(home)
        return entry

    def search(self, query: Query) -> list[Entry]:
        """The versions that a query finds."""
        if not self.root.is_dir():
            return []
        with opened(self._index()) as index:
            self._refresh(index)
            return index.search(query)

    def versions(self, name: str, *, backbone: str | None = None) -> Sequence[Entry]:
        """All versions of a name, oldest first."""
        homes = [NameFolder(path / name) for path in folders(self.root) if (path / name).is_dir()]
        found = [entry for home in homes for entry in home.versions()]
        by = "fingerprint" if is_fingerprint(backbone or "") else "backbone"
        fitting = [e for e in found if backbone is None or getattr(e, by) == backbone]
        if not fitting:
            near = did_you_mean(name, {home.name for home in self._homes()}) if not found else ""
            raise RegistryError(
                f"{self.root} has no adapter {name!r}{f' for {backbone}' if found else near}",
                offenders=sorted({f"it has one for {e.backbone}, {e.fingerprint}" for e in found}),
                hint="adapterhub list",
            )
        return fitting

    def yank(self, entry: Entry, reason: str) -> None:
        """Take a version out of searches."""
        home = self._home(entry)
        with home.writing():
            home.change(yanked={entry.version: reason})
        self._changed(home)

    def tag(self, entry: Entry, tag: str) -> None:
        """Let a tag name this version, and no other of its name."""
        home = self._home(entry)
        with home.writing():
            home.change(tags={tag: entry.version})
        self._changed(home)

    def verify(self) -> list[str]:
        """What is wrong with which version; nothing if all are sound."""
        problems = []
        for folder in (folder for home in self._homes() for folder in home.folders()):
            try:
                read_adapter(folder)
            except FileError as error:
                lines = "; ".join((error.problem, *error.offenders))
                problems.append(f"{folder.relative_to(self.root).as_posix()}: {lines}")
        return problems

    def reindex(self) -> int:
        """Make the index anew from the folders; the number of names in it."""
        self._index().unlink(missing_ok=True)
        with opened(self._index()) as index:
            self._refresh(index)
            return index.count()

    def gc(self) -> list[Path]:
        """Remove what interrupted writers left, and say what it was."""
        return [path for home in self._homes() for path in home.clean()]

    def _homes(self) -> Iterator[NameFolder]:
        for backbone in folders(self.root):
            yield from map(NameFolder, folders(backbone))

    def _home(self, entry: Entry) -> NameFolder:
        return NameFolder(self._backbone(entry.backbone) / entry.name)

    def _backbone(self, backbone: str) -> Path:
        return self.root / backbone.replace("/", "--")

    def _index(self) -> Path:
        # Not in the root, which may be in git, or not writable. Another format is another file.
        key = hashlib.sha256(os.fsencode(self.root.resolve())).hexdigest()[:24]
        return (
            user_cache_path("adapterhub", appauthor=False) / "registry" / f"{key}.{FORMAT}.sqlite"
        )

    def _refresh(self, index: Index) -> None:
        """Enter what changed since the last search."""
        whole = self._stamp()
        if index.whole() == whole and index.holds_more_than(_FEW):
            return
        known = index.stamps()
        homes = {home.path.relative_to(self.root).as_posix(): home for home in self._homes()}
        stamps = {key: home.stamp() for key, home in homes.items()}
        index.update(
            (
                (key, stamp, _texts(homes[key]))
                for key, stamp in stamps.items()
                if known.get(key) != stamp
            ),
            gone=known.keys() - homes.keys(),
            whole=whole,
        )

    def _stamp(self) -> str:
        """A text that differs after each publication."""
        paths = (self.root, *folders(self.root))
        return " ".join(f"{path.name}:{path.stat().st_mtime_ns}" for path in paths)

    def _ignore_locks(self) -> None:
        """Where the root is in git, what writers need for themselves is not."""
        with explained(self.root), contextlib.suppress(FileExistsError):
            self.root.mkdir(parents=True, exist_ok=True)
            with open(self.root / ".gitignore", "x", encoding="utf-8") as file:
                file.write(_IGNORED)

    def _changed(self, home: NameFolder) -> None:
        os.utime(home.path.parent)


def folders(path: Path) -> list[Path]:
    """The folders in a folder, sorted, without hidden ones; none if it is not there."""
    if not path.is_dir():
        return []
    with os.scandir(path) as entries:
        names = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    return [path / name for name in names]


def _texts(home: NameFolder) -> list[tuple[Entry, str]]:
    return [(entry, _text(home, entry)) for entry in home.versions()]


def _text(home: NameFolder, entry: Entry) -> str:
    """What a search for text looks at: an entry's words, and its card."""
    card = home.path / entry.version / CARD_FILE
    start = card.read_bytes()[:_CARD] if card.is_file() else b""
    return " ".join((*entry.words, start.decode("utf-8", "replace")))


def _checked(name: str) -> str:
    if not is_name(name):
        raise ConfigError(
            f"{name!r} is not a name in a registry",
            expected="1 to 96 letters, digits and . _ - that start with a letter or digit",
            hint="--name NAME",
        )
    return name


def _refuse_other_case(home: NameFolder) -> None:
    """On some file systems `Polite` and `polite` are one folder."""
    for other in folders(home.path.parent):
        if other.name != home.name and other.name.casefold() == home.name.casefold():
            raise RegistryError(
                f"{home.name!r} differs from the published {other.name!r} only in case",
                hint=f"publish it as {other.name!r}, or under another name",
            )
