"""`ah.tag`, `ah.yank` and `ah.delete`: name a published version, withdraw it, or remove it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from adapterhub.errors import ConfigError, RegistryError, printable, unknown
from adapterhub.registry.local import registry_at, store_of
from adapterhub.registry.lockfile import LOCK_FILE, read_lock
from adapterhub.registry.registry import Registry
from adapterhub.registry.store import Entry, Reference, Store, parse_reference, version_number


def tag(
    reference: str,
    tag: str | None = None,
    *,
    remove: bool = False,
    registry: str | Path | None = None,
    backbone: str | None = None,
) -> dict[str, str]:
    """Set a tag on a version in a registry or on a hub, remove it, or only list the tags.

    A tag is on one version of a name; setting it again moves it.

    Args:
        reference: the version, such as `polite@v2`; the newest version of a name alone.
        tag: the tag; None changes nothing.
        remove: remove the tag of this name.
        registry: the folder of the local registry, if not the default one.
        backbone: a backbone's id or fingerprint, to choose between adapters of the same name.

    Returns:
        The versions of all tags of the name after the change.

    Raises:
        ConfigError: the tag is invalid, or the name lacks it.
        RegistryError: no such adapter or version.
        OutputError: the registry cannot be written.
    """
    parsed = parse_reference(reference)
    store = store_of(parsed, registry)
    if tag is not None:
        entry = store.resolve(parsed.name, parsed.version, backbone=backbone)
        if remove:
            _remove(store, entry, parsed.version, tag)
        else:
            store.tag(entry, tag)
        backbone = entry.backbone
    versions = store.versions(parsed.name, backbone=backbone)
    return {name: entry.version for entry in versions for name in sorted(entry.tags)}


def _remove(store: Store, entry: Entry, version: str | None, tag: str) -> None:
    """Remove a tag; given a version, only from that version.

    Raises:
        ConfigError: the tag does not exist.
    """
    versions = store.versions(entry.name, backbone=entry.backbone)
    tags = {name: e.version for e in versions for name in e.tags}
    if tag not in tags:
        raise unknown(f"tag of {entry.name}", tag, tags, expected=", ".join(tags) or "no tag")
    if version is not None and tags[tag] != entry.version:
        raise ConfigError(f"{entry.name}@{tag} is {tags[tag]}, not {entry.version}")
    store.untag(entry, tag)


_MOST_REASON = 1000  # characters: it is shown on one line


def yank(reference: str, reason: str, *, registry: str | Path | None = None) -> Entry:
    """Exclude a version from searches and from references without a version.

    Args:
        reference: the version, such as `polite@v1`.
        reason: shown on each later request for this version.
        registry: the folder of the local registry, if not the default one.

    Returns:
        The previous entry.

    Raises:
        ConfigError: the reference has no version, or the reason is not one line of text.
        RegistryError: the version does not exist.
    """
    parsed = parse_reference(reference)
    if parsed.version is None:
        raise ConfigError(f"{reference!r} has no version", hint=f"{reference}@v1")
    if not 0 < len(reason) <= _MOST_REASON or printable(reason) != reason or "\n" in reason:
        raise ConfigError(
            "invalid reason", expected=f"one line of at most {_MOST_REASON} printable characters"
        )
    store = store_of(parsed, registry)
    entry = store.resolve(parsed.name, parsed.version)
    store.yank(entry, reason)
    return entry


def delete(
    reference: str,
    *,
    registry: str | Path | None = None,
    backbone: str | None = None,
    force: bool = False,
) -> str:
    """Delete one version of an adapter permanently from a registry or a hub of adapterhub.

    Its number is not used again, and its tags are removed.

    Args:
        reference: the version, such as `polite@v1`.
        registry: the folder of the local registry, if not the default one.
        backbone: a backbone's id or fingerprint, to choose between adapters of the same name.
        force: delete it although the lock file of the working directory pins it.

    Returns:
        The reference of the version that was deleted.

    Raises:
        ConfigError: the reference has no version, or its hub does not support deletion.
        RegistryError: the version does not exist, or the lock file here pins it.
        FileError: the lock file, or the tags of the name, cannot be read.
        OutputError: the registry cannot be written.
    """
    parsed = deletable(reference)
    store, version = store_of(parsed, registry), f"v{version_number(str(parsed.version))}"
    deleted = replace(parsed, version=version)
    if not force:
        _refuse_pinned(deleted, store)
    store.delete(parsed.name, version, backbone=backbone)
    return str(deleted)


def deletable(reference: str) -> Reference:
    """Parse the reference of a version that can be deleted.

    Raises:
        ConfigError: it is a folder, is on the Hugging Face Hub, or lacks a version number.
    """
    parsed = parse_reference(reference)
    if parsed.kind == "folder":
        raise ConfigError(f"{reference} is a folder, not a published version", hint="remove it")
    if parsed.kind == "hub":
        raise ConfigError(
            f"{reference} is on the Hub, where adapterhub deletes nothing",
            hint=f"adapterhub yank {reference} --reason REASON withdraws a version; the settings"
            " of the repository on the hub delete it",
        )
    if parsed.version is None or version_number(parsed.version) is None:
        raise ConfigError(
            f"{reference!r} does not name one version by its number",
            expected=f"{parsed.name}@v1, as a tag may move",
            hint=f"adapterhub show {reference} lists the versions",
        )
    return parsed


def _refuse_pinned(reference: Reference, store: Store) -> None:
    """Refuse a version that the lock file of the working directory pins.

    Raises:
        RegistryError: the version is pinned.
    """
    for own_name, pinned in read_lock(Path(LOCK_FILE)).items():
        same = parse_reference(pinned.reference) == reference
        if same and isinstance(store, Registry):
            here = Path(store.location).resolve()
            same = Path(registry_at(pinned.registry).location).resolve() == here
        if same:
            raise RegistryError(
                f"{reference} is pinned as {own_name!r} by {LOCK_FILE} here",
                expected="a version that no project uses",
                hint="lock another version first, or --force (force=True) to delete it anyway",
            )
