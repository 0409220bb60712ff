"""A read-only registry on a web server that serves files, such as nginx or GitHub Pages.

A web server does not list files, so `index.json` lists the contents. Without it, the versions of a
name are found through its `names.json`, if the backbone is known.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from adapterhub.errors import ConfigError, FileError, RegistryError
from adapterhub.files.native import MANIFEST_FILE, Saved
from adapterhub.registry.cached_storage import RemoteStorage
from adapterhub.registry.hub_client import Expected, HubClient, MissingFileError
from adapterhub.registry.registry import Registry
from adapterhub.registry.store import INDEX_FILE, Stored, is_loopback, version_number
from adapterhub.registry.tokens import token_for
from adapterhub.registry.version_files import (
    MAX_INDEX_BYTES,
    MAX_NAMES_BYTES,
    NAMES_FILE,
    Contents,
    parse_backbones,
)

_MOST_PROBED = 1_000  # versions of a name that are not in the index


class WebsiteRegistry(Registry):
    """A registry read over https; over http only from this machine.

    Args:
        url: the location of the backbones' folders.

    Raises:
        ConfigError: the URL is not valid.
    """

    def __init__(self, url: str) -> None:
        super().__init__(Website(url))

    def contents(self, path: str) -> Contents:
        """Read a name: its versions from the index, and newer ones by their numbers."""
        backbone, _, name = path.partition("/")
        try:
            names, _ = self._names(path)
        except FileError as error:
            return Contents([], {NAMES_FILE: error})
        listed = (self._index_of(backbone) or {}).get(name, Contents([], {}))
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
        every = self.everything()
        return [f"{path}/{line}" for path in every for line in self._problems(path, every[path])]

    def index(self) -> NoReturn:
        """Refuse: the registry is read-only."""
        _refuse(self.location)

    def delete(self, name: str, version: str, *, backbone: str | None = None) -> NoReturn:
        """Refuse: the registry is read-only.

        Args:
            name: the adapter's name.
            version: the version number.
            backbone: a backbone's id or fingerprint.
        """
        _refuse(self.location)

    def has(self, name: str) -> bool:
        """Return whether there is a version of this name."""
        return any(_versions(contents) for contents in self._map(self.contents, self._paths(name)))

    def _all_paths(self) -> list[str]:
        return [*self.everything()]


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

    def exists(self) -> bool:
        """Return whether the index exists; without it, names may still be read."""
        return self.reread(INDEX_FILE, MAX_INDEX_BYTES) is not None

    def folders(self, prefix: str = "") -> list[str]:
        """List the folders of the backbones in the index; others are not listed."""
        stored = self.reread(INDEX_FILE, MAX_INDEX_BYTES)
        if prefix or stored is None:
            self._unlisted()
        return parse_backbones(stored.data, self._subject(INDEX_FILE))

    def files(self, prefix: str = "") -> dict[str, str]:
        """Return `names.json` of a name; other files are not listed."""
        if prefix.count("/") < 2:
            self._unlisted()
        path = f"{prefix}{NAMES_FILE}"
        return {path: ""} if self.receive(path, MAX_NAMES_BYTES) else {}

    def receive(self, path: str, most: int, known: str = "") -> Stored | None:
        """Receive a file; skip the bytes if its tag is still `known`."""
        try:
            return self._client.reread(f"/{path}", most, self._subject(path), known)
        except MissingFileError:
            return None

    def download(self, path: str, target: Path, most: int, sha256: str | None = None) -> None:
        """Download a file to a new path and verify its digest; resume interrupted downloads."""
        try:
            expected = Expected(most, sha256=sha256)
            self._client.download(f"/{path}", target, expected, self._subject(path))
        except MissingFileError:
            target.unlink()

    def create(self, path: str, source: Saved, digest: str, date: bytes) -> NoReturn:
        """Refuse: the registry is read-only."""
        _refuse(self.location)

    def replace(self, path: str, data: bytes, old: Stored | None) -> NoReturn:
        """Refuse: the registry is read-only."""
        _refuse(self.location)

    def remove(self, path: str) -> NoReturn:
        """Refuse: the registry is read-only."""
        _refuse(self.location)

    def writing(self, path: str) -> AbstractContextManager[None]:
        """Refuse: the registry is read-only.

        Raises:
            RegistryError: always.
        """
        _refuse(self.location)

    def _unlisted(self) -> NoReturn:
        raise RegistryError(
            f"{self.location} has no {INDEX_FILE}, so what it has cannot be listed",
            expected="the URL of the folder of a registry, with its index",
            hint="adapterhub registry index on the side of its publisher; or a name with "
            "--backbone ID",
        )

    def _subject(self, path: str) -> str:
        return f"{self.location}/{path}"


def _refuse(location: str) -> NoReturn:
    raise RegistryError(
        f"{location} is read over https, where nothing is published",
        expected="the folder or the bucket that the web server sends",
        hint="--registry FOLDER or --registry s3://bucket/prefix; adapterhub push for a hub",
    )


def _versions(contents: Contents) -> list[str]:
    return [*(entry.version for entry in contents.entries), *contents.broken]
