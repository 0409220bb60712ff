"""Files of hubs on this machine. Each hub has a folder of its own: none can answer for another.

    <cache>/hubs/<host>-<hash>/adapters/<digest>/      the verified files of a version
    <cache>/hubs/<host>-<hash>/manifests/<hash>        manifests, by repository and commit
    <cache>/hubs/<host>-<hash>/names/<hash>.json       refs and yanks as last seen, for offline use

Paths consist of the hub's URL as the user wrote it, and of hashes. Adapters are verified before
they enter; manifests and names are what the hub said last, and are read only offline and in lists.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from adapterhub.config.user_folders import user_folder
from adapterhub.files import schema
from adapterhub.files.atomic import (
    UnreadableError,
    explained,
    put_in_place,
    read_file,
    replace_file,
    staging,
)
from adapterhub.registry.hub_reader import MAX_REFS_BYTES, Refs
from adapterhub.registry.other_formats import MAX_CONFIG_BYTES

_TEXT = schema.text(r"(?s).*", "a text")
_COMMITS = schema.mapping(_TEXT, schema.text("[0-9a-f]{40}", "a commit"), 0, 100_000)
_NAME = schema.record(
    {
        "head": schema.text("[0-9a-f]{40}", "a commit", null=True),
        "branches": _COMMITS,
        "tags": _COMMITS,
        "yanked": schema.mapping(_TEXT, _TEXT, 0, 100_000),
    }
)


class HubCache:
    """The folder of one hub in the user's cache."""

    def __init__(self, base: str) -> None:
        host = re.sub(r"[^a-z0-9.]", "_", (urlsplit(base).hostname or "")[:60])
        self.folder = user_folder("cache") / "hubs" / f"{host}-{_key(base)}"

    def adapter(self, digest: str) -> Path:
        """Return the folder of a version, whether it exists or not."""
        assert re.fullmatch("[0-9a-f]{64}", digest), digest
        return self.folder / "adapters" / digest

    @contextlib.contextmanager
    def adding(self, digest: str) -> Iterator[Path]:
        """Yield an empty folder; it becomes the folder of a version if no error is raised.

        Raises:
            OutputError: the cache cannot be written.
        """
        folder = self.adapter(digest)
        with explained(folder), staging(folder) as staged:
            yield staged
            try:
                put_in_place(staged, folder, overwrite=False)
            except OSError:
                if not folder.exists():  # otherwise another process has added the same bytes
                    raise

    def manifest(self, name: str, commit: str, file: str) -> bytes | None:
        """Return a manifest or configuration as it was when it was last requested."""
        return _read(self._manifest(name, commit, file), MAX_CONFIG_BYTES)

    def keep_manifest(self, name: str, commit: str, file: str, data: bytes) -> None:
        """Remember the manifest or configuration of a commit.

        Args:
            name: the repository.
            commit: the commit.
            file: the name of the file.
            data: its contents.
        """
        _write(self._manifest(name, commit, file), data)

    def refs(self, name: str) -> tuple[Refs, dict[str, str]] | None:
        """Return the refs and yanked versions of a repository as last seen."""
        data = _read(self._name(name), 2 * MAX_REFS_BYTES)
        tree, problems = schema.parse_object(data or b"", 2 * MAX_REFS_BYTES)
        if problems or _NAME("", tree):
            return None
        return Refs(tree["head"], tree["branches"], tree["tags"]), tree["yanked"]

    def keep_refs(self, name: str, refs: Refs, yanked: Mapping[str, str]) -> None:
        """Remember the refs and yanked versions of a repository.

        Args:
            name: the repository.
            refs: its branches and tags.
            yanked: the reason by yanked version.
        """
        tree: dict[str, Any] = {**asdict(refs), "yanked": dict(yanked)}
        _write(self._name(name), schema.canonical_json(tree))

    def _manifest(self, name: str, commit: str, file: str) -> Path:
        return self.folder / "manifests" / _key(f"{name}@{commit}/{file}")

    def _name(self, name: str) -> Path:
        return self.folder / "names" / f"{_key(name)}.json"


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read(path: Path, limit: int) -> bytes | None:
    try:
        return read_file(path, 0, limit, None)
    except UnreadableError:
        return None


def _write(path: Path, data: bytes) -> None:
    """Write a file for later; a cache that cannot be written does not stop the work."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data)
