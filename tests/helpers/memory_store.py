"""An in-memory adapter store: the smallest implementation of the store protocol."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from adapterhub.errors import RegistryError
from adapterhub.files.native import SIGNATURE_FILE, read_adapter
from adapterhub.files.signature import Signature, read_signatures
from adapterhub.registry.published_files import (
    copy_adapter,
    entry_of,
    manifest_bytes,
    merged_signatures,
)
from adapterhub.registry.store import Entry, Publication, Query, choose_version, filter_entries


class MemoryStore:
    """Keeps entries in a list, and each adapter's files in a folder named by its digest."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.entries: list[Entry] = []
        self.read_only = False
        self.lock = threading.Lock()

    def resolve(
        self, name: str, version: str | None = None, *, backbone: str | None = None
    ) -> Entry:
        versions = self.versions(name, backbone=backbone)
        if len({entry.backbone for entry in versions}) > 1:
            raise RegistryError(f"{name!r} is of several backbones")
        return choose_version(versions, name, version)

    def get(self, entry: Entry, folder: Path | None = None) -> Path:
        stored = self.root / entry.digest
        read_adapter(stored)
        return stored if folder is None else copy_adapter(stored, folder, entry.digest)

    def put(self, folder: Path, publication: Publication) -> Entry:
        with self.lock:
            return self._put(folder, publication)

    def _put(self, folder: Path, publication: Publication) -> Entry:
        if self.read_only:
            raise RegistryError("this store is read-only")
        read_adapter(folder)
        entry = entry_of(manifest_bytes(folder), reference="", name=publication.name, version="")
        earlier = [e for e in self.entries if (e.name, e.backbone) == (entry.name, entry.backbone)]
        same = next((e for e in earlier if e.digest == entry.digest), None)
        version = same.version if same else publication.version or f"v{len(earlier) + 1}"
        if same is None and any(e.version == version for e in earlier):
            raise RegistryError(f"{version} is published already")
        if same is None:
            copy_adapter(folder, self.root / entry.digest, entry.digest)
            same = replace(entry, version=version, reference=f"{entry.name}@{version}")
            self.entries.append(same)
        tagged = replace(same, tags=tuple(sorted({*same.tags, *publication.tags})))
        self._replace(same, tagged)
        return tagged

    def search(self, query: Query) -> list[Entry]:
        available = [e for e in self.entries if e.yanked is None]
        newest = list({(e.backbone, e.name): e for e in available}.values())
        return filter_entries(available if query.all_versions else newest, query)

    def versions(self, name: str, *, backbone: str | None = None) -> Sequence[Entry]:
        versions = [
            e
            for e in self.entries
            if e.name == name and backbone in (None, e.backbone, e.fingerprint)
        ]
        if not versions:
            raise RegistryError(f"no adapter is called {name!r}")
        return versions

    def yank(self, entry: Entry, reason: str) -> None:
        (stored,) = (e for e in self.entries if e.reference == entry.reference)
        self._replace(stored, replace(stored, yanked=reason))

    def signatures(self, entry: Entry) -> Sequence[Signature]:
        return ()

    def add_signatures(self, entry: Entry, signatures: Sequence[Signature]) -> None:
        stored = self.root / entry.digest
        data = merged_signatures(read_signatures(stored), signatures, entry.digest)
        (stored / SIGNATURE_FILE).write_bytes(data)

    def _replace(self, old: Entry, new: Entry) -> None:
        self.entries[self.entries.index(old)] = new
