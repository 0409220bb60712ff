"""A registry on a web server that sends files, such as nginx or GitHub Pages: it is only read.

A web server lists no files: what there is, `index.json` says. Without one, the versions of a name
are found by its `names.json`, if the backbone is known.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from adapterhub.errors import AdapterhubError, ConfigError, FileError, RegistryError
from adapterhub.files.native import MANIFEST_FILE
from adapterhub.registry.hub_client import AbsentError, Expected, HubClient
from adapterhub.registry.index_file import (
    INDEX_FILE,
    MAX_INDEX_BYTES,
    parse_backbones,
    parse_index,
)
from adapterhub.registry.names_file import NAMES_FILE, Contents
from adapterhub.registry.reference import is_backbone_folder, is_loopback
from adapterhub.registry.registry import Registry, line_of
from adapterhub.registry.remote import RemoteStorage
from adapterhub.registry.store import Stored, version_number
from adapterhub.registry.tokens import token_for

_MOST_PROBED = 1_000  # versions of a name that no index has


class WebsiteRegistry(Registry):
    """A registry that is read over https; over http only from this machine.

    Args:
        url: where the folders of the backbones are.

    Raises:
        ConfigError: the URL is not valid.
    """

    def __init__(self, url: str) -> None:
        self.files = Website(url)
        super().__init__(self.files)

    def contents(self, path: str) -> Contents:
        """Read a name: its versions from the index, and those that are newer by their numbers."""
        backbone, _, name = path.partition("/")
        try:
            names, _ = self._names(path)
        except FileError as error:
            return Contents([], {NAMES_FILE: error})
        listed = (self.files.index(backbone) or {}).get(name, Contents([], {}))
        last = max((version_number(v) or 0 for v in _versions(listed)), default=0)
        first = max(last + 1, names.highest - _MOST_PROBED + 1)
        newer = [f"v{number}" for number in range(first, names.highest + 1)]
        probed = self._read_versions({path: dict.fromkeys(newer, _MANIFEST)}, {path: names})[path]
        entries = [
            replace(
                entry,
                tags=tuple(sorted(tag for tag, at in names.tags.items() if at == entry.version)),
                yanked=names.yanked.get(entry.version),
            )
            for entry in listed.entries
        ]
        return Contents([*entries, *probed.entries], {**listed.broken, **probed.broken}, names)

    def verify(self) -> list[str]:
        """Read all versions that the index has, and list the problems."""
        problems = []
        for path, contents in self.everything().items():
            problems += [f"{path}/{v}: {line_of(e)}" for v, e in contents.broken.items()]
            for entry in contents.entries:
                try:
                    self.storage.check(f"{path}/{entry.version}", entry.digest)
                except AdapterhubError as error:
                    problems.append(f"{path}/{entry.version}: {line_of(error)}")
        return problems

    def index(self) -> NoReturn:
        """Refuse: it is only read."""
        self.files.refuse()

    def delete(self, name: str, version: str, *, backbone: str | None = None) -> NoReturn:
        """Refuse: it is only read.

        Args:
            name: the adapter's name.
            version: the version number.
            backbone: a backbone's id or fingerprint.
        """
        self.files.refuse()

    def has(self, name: str) -> bool:
        """Return whether there is a version of this name."""
        return any(_versions(contents) for contents in self._map(self.contents, self._paths(name)))


_MANIFEST = {MANIFEST_FILE: ""}


class Website(RemoteStorage):
    """The files below a URL. See `Storage` for the methods."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        secure = parts.scheme == "https" or is_loopback(parts.hostname or "")
        if not secure or not parts.hostname or parts.query or parts.fragment or "@" in parts.netloc:
            shown = url.replace(f"{parts.netloc.rpartition('@')[0]}@", "")  # it may be a password
            raise ConfigError(
                f"{shown!r} is not the URL of a registry", expected="https://host/path"
            )
        self.location = url.rstrip("/")
        self._client = HubClient(self.location, token_for(self.location), plain=True)
        self._indexes: dict[str, tuple[Stored, dict[str, Contents]]] = {}

    def exists(self) -> bool:
        """Return whether there is an index; without one, names may still be read."""
        return self._backbones() is not None

    def folders(self, prefix: str = "") -> list[str]:
        """List the folders that the index has directly below a prefix."""
        if not prefix:
            backbones = self._backbones()
            return self._unlisted() if backbones is None else backbones
        backbone = prefix.rstrip("/")
        return [f"{backbone}/{name}" for name in self.index(backbone) or ()]

    def files(self, prefix: str = "") -> dict[str, str]:
        """Return `names.json` of a name; other files are not listed."""
        if prefix.count("/") < 2:
            self._unlisted()
        path = f"{prefix}{NAMES_FILE}"
        return {path: ""} if self.receive(path, MAX_INDEX_BYTES) else {}

    def index(self, backbone: str) -> dict[str, Contents] | None:
        """Return what the index of a backbone has of each name; None if there is no index.

        Raises:
            FileError: it cannot be read.
            RegistryError: the server cannot be reached.
        """
        path = f"{backbone}/{INDEX_FILE}"
        stored = self.reread(path, MAX_INDEX_BYTES) if is_backbone_folder(backbone) else None
        if stored is None:
            return None
        known = self._indexes.get(backbone)
        if known is None or known[0] != stored:
            found = parse_index(stored.data, f"{self.location}/{path}", backbone)
            known = self._indexes[backbone] = (stored, found)
        return known[1]

    def receive(self, path: str, most: int, known: str = "") -> Stored | None:
        """Receive a file; without its bytes if it still has the tag `known`."""
        try:
            body = self._client.reread(f"/{path}", most, self._subject(path), known)
        except AbsentError:
            return None
        return Stored(body.data, known if body.is_known else body.tag)

    def download(self, path: str, target: Path, most: int, sha256: str | None = None) -> None:
        """Write a file to a new one, and verify its digest; an interrupted download is resumed."""
        try:
            expected = Expected(most, sha256=sha256)
            self._client.download(f"/{path}", target, expected, self._subject(path))
        except AbsentError:
            target.unlink()

    def create(self, path: str, source: Path, digest: str, date: bytes) -> NoReturn:
        """Refuse: it is only read."""
        self.refuse()

    def replace(self, path: str, data: bytes, old: Stored | None) -> NoReturn:
        """Refuse: it is only read."""
        self.refuse()

    def remove(self, path: str) -> NoReturn:
        """Refuse: it is only read."""
        self.refuse()

    def writing(self, path: str) -> AbstractContextManager[None]:
        """Refuse: it is only read.

        Raises:
            RegistryError: always.
        """
        self.refuse()

    def refuse(self) -> NoReturn:
        """Refuse to write.

        Raises:
            RegistryError: always.
        """
        raise RegistryError(
            f"{self.location} is read over https, where nothing is published",
            expected="the folder or the bucket that the web server sends",
            hint="--registry FOLDER or --registry s3://bucket/prefix; adapterhub push for a hub",
        )

    def _backbones(self) -> list[str] | None:
        stored = self.reread(INDEX_FILE, MAX_INDEX_BYTES)
        return parse_backbones(stored.data, self._subject(INDEX_FILE)) if stored else None

    def _unlisted(self) -> NoReturn:
        raise RegistryError(
            f"{self.location} has no {INDEX_FILE}, so what it has cannot be listed",
            expected="the URL of the folder of a registry, with its index",
            hint="adapterhub registry index on the side of its publisher; or a name with "
            "--backbone ID",
        )

    def _subject(self, path: str) -> str:
        return f"{self.location}/{path}"


def _versions(contents: Contents) -> list[str]:
    return [*(entry.version for entry in contents.entries), *contents.broken]
