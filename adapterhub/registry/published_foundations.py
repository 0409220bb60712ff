"""Where an adapter's foundations are published: an adapter is published after those below it.

A published manifest names versions of the same registry, or of the same owner on the same hub, so
that the name of the adapter on top is enough to get all of them. A foundation that was trained in a
folder is recognized by its content: publication adds a licence, and so changes its digest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from adapterhub.errors import RegistryError
from adapterhub.files.foundation import copy_of
from adapterhub.files.manifest import FoundationRef, Manifest
from adapterhub.files.native import MANIFEST_FILE, read_manifest
from adapterhub.registry.fetch import fetch
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.reference import Reference, is_name, parse_reference
from adapterhub.registry.registry import Registry
from adapterhub.registry.store import Entry, Query, Store

_MOST = 10_000  # versions for one backbone that are compared


def published_foundations(
    source: Path, manifest: Manifest, store: Store, target: Reference
) -> tuple[FoundationRef, ...]:
    """Return what a published manifest records of the adapters below one.

    Args:
        source: the folder of the adapter on top.
        manifest: its manifest.
        store: the store that it is to be published in.
        target: the reference that it is to be published as.

    Raises:
        RegistryError: an adapter below is not published there, or is yanked.
        FileError: the files of one cannot be read.
    """
    return tuple(_published_ref(source, manifest, ref, store, target) for ref in manifest.on)


def _published_ref(
    source: Path, manifest: Manifest, ref: FoundationRef, store: Store, target: Reference
) -> FoundationRef:
    copy, content = copy_of(source, ref), None
    if (copy / MANIFEST_FILE).is_file():
        content = _content(read_manifest(copy, ref.digest))
    for entry in _candidates(manifest, ref, store, target):
        if entry.yanked is not None or not entry.fingerprint:
            continue
        if entry.digest != ref.digest:
            parsed = parse_reference(entry.reference)
            if content is None or content != _content(
                read_manifest(fetch(parsed, store, entry).folder, entry.digest)
            ):
                continue
        return FoundationRef(entry.name, entry.digest, entry.version, entry.reference)
    command = _command(ref, target)
    raise RegistryError(
        f"{manifest.name!r} was trained on {ref.name!r}, which is not published beside it",
        offenders=[f"{ref}, sha256 {ref.digest[:12]}"],
        expected="the adapters below it in the same registry, or of the same owner on the hub",
        hint=f"{command.format(copy if content else 'FOLDER')} first, then this one",
    )


def _candidates(
    manifest: Manifest, ref: FoundationRef, store: Store, target: Reference
) -> Iterator[Entry]:
    """Yield the versions that may be an adapter below, the newest first."""
    if isinstance(store, Registry):
        query = Query(all_versions=True, sort="newest", limit=_MOST)
        is_new = isinstance(store, LocalRegistry) and not store.root.is_dir()
        entries = [] if is_new else store.search(query)
        yield from (entry for entry in entries if _may_be(entry, manifest))
        return
    recorded = parse_reference(ref.reference) if ref.reference else target
    same_hub = (recorded.kind, recorded.host) == (target.kind, target.host)
    names = [recorded.name] if same_hub and ref.reference else []
    names.append(f"{target.name.partition('/')[0]}/{ref.name.rpartition('/')[2]}")
    for name in dict.fromkeys(names):
        try:
            yield from reversed(store.versions(name))
        except RegistryError:  # there is none of this name
            continue


def _may_be(entry: Entry, manifest: Manifest) -> bool:
    backbone = manifest.backbone
    return entry.fingerprint == backbone.fingerprint or entry.backbone == backbone.id


def _content(manifest: Manifest) -> Manifest:
    """Return a manifest without what publishing it may change."""
    return replace(manifest, name="", on=(), description=None, license=None, language=(), tags=())


def _command(ref: FoundationRef, target: Reference) -> str:
    name = ref.name.rpartition("/")[2]
    if target.kind == "local":
        return f"adapterhub publish {{}} --name {name if is_name(name) else 'NAME'}"
    owner = replace(target, name=f"{target.name.partition('/')[0]}/{name}", version=None)
    return f"adapterhub push {{}} {owner}"
