"""`ah.delete`: delete a version from a local registry."""

from __future__ import annotations

from pathlib import Path

from adapterhub.errors import ConfigError, RegistryError
from adapterhub.registry.lockfile import LOCK_FILE, read_lock
from adapterhub.registry.reference import Reference, parse_reference
from adapterhub.registry.registry import Registry
from adapterhub.registry.store import version_number
from adapterhub.registry.stores import registry_at


def delete(
    reference: str,
    *,
    registry: str | Path | None = None,
    backbone: str | None = None,
    force: bool = False,
) -> str:
    """Delete one version of an adapter from a local registry, for good.

    Its number is not used again, and its tags are removed.

    Args:
        reference: the version, such as `polite@v1`.
        registry: the folder of the local registry, if not the default one.
        backbone: a backbone's id or fingerprint, to choose between adapters of the same name.
        force: delete it although the lock file of the working directory pins it.

    Returns:
        The reference of the version that was deleted.

    Raises:
        ConfigError: the reference is no version in a local registry.
        RegistryError: there is no such version, or the lock file here pins it.
        FileError: the lock file, or the tags of the name, cannot be read.
        OutputError: the registry cannot be written.
    """
    parsed = deletable(reference)
    store, version = registry_at(registry), f"v{version_number(str(parsed.version))}"
    if not force:
        _refuse_pinned(parsed.name, version, store)
    store.delete(parsed.name, version, backbone=backbone)
    return f"{parsed.name}@{version}"


def deletable(reference: str) -> Reference:
    """Parse the reference of a version in a local registry, which alone can be deleted.

    Raises:
        ConfigError: it is a folder, on a hub, or has no version number.
    """
    parsed = parse_reference(reference)
    if parsed.kind == "folder":
        raise ConfigError(f"{reference} is a folder, not a published version", hint="remove it")
    if parsed.kind != "local":
        raise ConfigError(
            f"{reference} is on a hub, where adapterhub deletes nothing",
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


def _refuse_pinned(name: str, version: str, store: Registry) -> None:
    """Refuse a version that the lock file of the working directory pins.

    Raises:
        RegistryError: it does.
    """
    here = Path(store.location).resolve()
    for own_name, pinned in read_lock(Path(LOCK_FILE)).items():
        same = Path(registry_at(pinned.registry).location).resolve() == here
        if same and parse_reference(pinned.reference) == Reference("local", name, version):
            raise RegistryError(
                f"{name}@{version} is pinned as {own_name!r} by {LOCK_FILE} here",
                expected="a version that no project uses",
                hint="lock another version first, or --force (force=True) to delete it anyway",
            )
