"""A registry in a folder, shown as a read-only hub, so that clients of the Hub can load from it.

A version is a commit and a tag. The commit's id follows from its bytes, its date and the versions
before it, so it is the same on every machine that serves the same registry. No file is copied: the
hub links to the files of the registry, and checks for changes every few seconds.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from sqlalchemy import Connection

from adapterhub.errors import AdapterhubError
from adapterhub.files import schema
from adapterhub.files.atomic import file_digest
from adapterhub.files.native import MANIFEST_FILE, Saved
from adapterhub.hub.accounts import Owner, create_namespace, require_owner
from adapterhub.hub.blobs import MAX_REGULAR_LISTED, BlobFolder, BlobInfo, git_sha1_of
from adapterhub.hub.commits import CommitChange, grant, write_commit
from adapterhub.hub.database import DATABASE, received_reader
from adapterhub.hub.gate import changing
from adapterhub.hub.repositories import (
    create_repository,
    create_tag,
    delete_repository,
    find_repository,
)
from adapterhub.hub.search_rows import refresh_listing, remove_listing
from adapterhub.hub.state import Hub, HubOptions, create_hub, open_hub
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.store import INDEX_FILE, Entry
from adapterhub.registry.version_files import PUBLISHED, YANKED_FILE, Contents

VIEW_OWNER = "registry"
_LOOK_SECONDS = 5.0
_FIRST_DATE = "1970-01-01T00:00:00Z"  # for versions without a date


def is_registry(folder: Path) -> bool:
    """Return whether a folder is a registry and not a hub."""
    if (folder / DATABASE).exists() or not folder.is_dir():
        return False
    return (folder / INDEX_FILE).exists() or any(folder.glob(f"*/*/v*/{MANIFEST_FILE}"))


@contextmanager
def viewing(folder: Path, options: HubOptions) -> Iterator[Hub]:
    """Open a hub that shows a registry, and follow its changes until the end of the context."""
    registry = LocalRegistry(folder)
    with tempfile.TemporaryDirectory() as place:
        create_hub(Path(place) / "hub")
        chosen = replace(options, is_read_only=True, open_reading=True)
        with open_hub(Path(place) / "hub", chosen) as hub:
            with hub.database.writing() as connection:
                create_namespace(connection, VIEW_OWNER, "org")
            view = RegistryView(hub, BlobFolder(Path(place) / "hub"), registry)
            view.follow()
            stop = threading.Event()
            thread = threading.Thread(target=view.keep_following, args=(stop,), daemon=True)
            thread.start()
            try:
                yield hub
            finally:
                stop.set()
                thread.join()


class RegistryView:
    """The contents of a registry as shown by a hub."""

    def __init__(self, hub: Hub, blobs: BlobFolder, registry: LocalRegistry) -> None:
        self._hub, self._blobs, self._registry = hub, blobs, registry
        self._shown: dict[str, tuple[tuple[object, ...], ...]] = {}

    def keep_following(self, stop: threading.Event) -> None:
        """Check for changes every few seconds."""
        while not stop.wait(_LOOK_SECONDS):
            with suppress(AdapterhubError, OSError):  # it may be complete at the next check
                self.follow()

    def follow(self) -> None:
        """Update the names that have changed since the last check."""
        every = self._registry.everything()
        by_name: dict[str, str] = {}
        for path in sorted(every):  # a name with several backbones is shown for the first one
            by_name.setdefault(path.partition("/")[2], path)
        for name in sorted({*by_name, *self._shown}):
            contents = every[by_name[name]] if name in by_name else Contents([], {})
            facts = tuple((e.version, e.digest, e.tags, e.yanked) for e in contents.entries)
            if facts != self._shown.get(name):
                with changing(self._hub) as connection:
                    self._show(connection, name, by_name.get(name, ""), contents.entries)
                self._shown[name] = facts

    def _show(self, connection: Connection, name: str, path: str, entries: list[Entry]) -> None:
        """Write the repository of a name again; remove it if it has no versions."""
        owner: Owner = require_owner(connection, VIEW_OWNER)
        existing = find_repository(connection, "models", f"{VIEW_OWNER}/{name}")
        if existing is not None:
            remove_listing(connection, existing.id)
            delete_repository(connection, existing, is_final=False)
        if not entries:
            return
        full = f"{VIEW_OWNER}/{name}"
        repository = create_repository(connection, "models", full, owner, is_private=False)
        folder = self._blobs
        for entry in entries:
            change = CommitChange(
                f"Publish {entry.version}", created=entry.published or _FIRST_DATE
            )
            infos = self._link(path, entry)
            grant(connection, repository.id, infos.values())
            change.large = {file: (info.sha256, info.size) for file, info in infos.items()}
            done = write_commit(connection, repository.id, "main", change, VIEW_OWNER)
            for tag in (entry.version, *entry.tags):
                create_tag(connection, repository, tag, done.commit.oid)
        yanked = {entry.version: entry.yanked for entry in entries if entry.yanked is not None}
        if yanked:
            staged = folder.stage(schema.canonical_json(yanked))
            change = CommitChange("Yank", created=_FIRST_DATE, files={YANKED_FILE: staged})
            write_commit(connection, repository.id, "main", change, VIEW_OWNER)
        refresh_listing(connection, repository, received_reader(connection, folder))

    def _link(self, path: str, entry: Entry) -> dict[str, BlobInfo]:
        """Link the files of a version in the registry into the hub."""
        place = self._registry.root / path / entry.version
        manifest = Saved.at(place, entry.digest).manifest
        infos = {}
        for file in PUBLISHED:
            source = place / file
            if not source.is_file() or source.is_symlink():
                continue
            size = source.stat().st_size
            sha256 = manifest.files.get(file) or file_digest(source).sha256
            sha1 = git_sha1_of(source, size) if size <= MAX_REGULAR_LISTED else ""
            infos[file] = BlobInfo(sha256, size, sha1)
            with suppress(FileExistsError):
                os.symlink(source.resolve(), self._blobs.path(sha256))
        return infos
