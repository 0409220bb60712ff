"""`ah.tag`: name a version, or remove or list such names."""

from __future__ import annotations

from pathlib import Path

from adapterhub.errors import ConfigError, unknown
from adapterhub.registry.reference import Reference, parse_reference
from adapterhub.registry.registry import Registry
from adapterhub.registry.store import Entry
from adapterhub.registry.stores import store_of


def tag(
    reference: str,
    tag: str | None = None,
    *,
    remove: bool = False,
    registry: str | Path | None = None,
    backbone: str | None = None,
) -> dict[str, str]:
    """Set a tag on a version in a local registry, remove it, or only list the tags.

    A tag is on one version of a name; setting it again moves it.

    Args:
        reference: the version, such as `polite@v2`; of a name alone, the newest one.
        tag: the tag; None changes nothing.
        remove: remove the tag of this name.
        registry: the folder of the local registry, if not the default one.
        backbone: a backbone's id or fingerprint, to choose between adapters of the same name.

    Returns:
        The version by tag, of all tags of the name, afterwards.

    Raises:
        ConfigError: the tag is invalid, or none of the name, or the reference is not in a local
            registry.
        RegistryError: no such adapter or version.
        OutputError: the registry cannot be written.
    """
    parsed = parse_reference(reference)
    store = store_of(parsed, registry)
    if tag is not None:
        local = _writable(store, parsed, tag)
        entry = local.resolve(parsed.name, parsed.version, backbone=backbone)
        if remove:
            _remove(local, entry, parsed.version, tag)
        else:
            local.tag(entry, tag)
        backbone = entry.backbone
    versions = store.versions(parsed.name, backbone=backbone)
    return {name: entry.version for entry in versions for name in sorted(entry.tags)}


def _writable(store: object, reference: Reference, tag: str) -> Registry:
    """Return the local registry of a reference.

    Raises:
        ConfigError: it is on a hub.
    """
    if isinstance(store, Registry):
        return store
    name = reference.name
    raise ConfigError(
        f"{reference} is on a hub, whose tags are git tags",
        hint=f"adapterhub push FOLDER {reference} --tag {tag}, or on the Hub: hf repos tag create"
        f" {name} {tag} --revision {reference.version or 'v1'}",
    )


def _remove(store: Registry, entry: Entry, version: str | None, tag: str) -> None:
    """Remove a tag; with a version, only from that one.

    Raises:
        ConfigError: there is no such tag.
    """
    versions = store.versions(entry.name, backbone=entry.backbone)
    tags = {name: e.version for e in versions for name in e.tags}
    if tag not in tags:
        raise unknown(f"tag of {entry.name}", tag, tags, expected=", ".join(tags) or "no tag")
    if version is not None and tags[tag] != entry.version:
        raise ConfigError(f"{entry.name}@{tag} is {tags[tag]}, not {entry.version}")
    store.untag(entry, tag)
