"""A project's lock file: the adapters that it uses, pinned by digest.

    adapterhub.lock      {"adapters": {NAME: {"reference": ..., "registry": ..., "digest": ...,
                         "backbone": ..., "fingerprint": ...}}, "version": 1}

`reference` names one version, never a tag or branch. `registry` is where it is found: a folder,
relative to the lock file if it is in the project, or the URL of a hub that `hf:` stood for; null is
each user's own registry, or the Hub. With the lock file and access to the stores, everyone gets the
same bytes or an error. Lock files may come from strangers: no token is sent to a hub in `registry`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from adapterhub.errors import ConfigError, FileError, MismatchError, RegistryError
from adapterhub.files import schema
from adapterhub.files.atomic import UnreadableError, explained, read_file, replace_file
from adapterhub.files.native import read_adapter
from adapterhub.registry.local import LocalRegistry, default_root
from adapterhub.registry.local_versions import copy_adapter, digest_of
from adapterhub.registry.pull import warn_if_yanked
from adapterhub.registry.reference import NAME_RULE, Reference, check_name, is_name, parse_reference
from adapterhub.registry.store import Entry, Store
from adapterhub.registry.stores import store_of

_MAX_BYTES = 4 << 20
_PIN = schema.record(
    {
        "reference": schema.text(r"\S{1,500}", "a reference"),
        "registry": schema.text(r"[^\x00-\x1f\x7f]{1,500}", "a folder or a URL", null=True),
        "digest": schema.text(r"[0-9a-f]{64}", "a sha256 in lower-case hexadecimal"),
        "backbone": schema.text(r".{1,200}", "a backbone's id"),
        "fingerprint": schema.text(r"[\w.:+-]{1,200}", "a fingerprint"),
    }
)


def _pin_problems(path: str, value: object) -> list[str]:
    """Check a pin; those of older versions have no registry."""
    fields = {"registry": None, **value} if isinstance(value, dict) else value
    if problems := _PIN(path, fields):
        return problems
    assert isinstance(fields, dict)
    try:
        reference = parse_reference(fields["reference"])
    except ConfigError as error:
        return [f"{path}.reference: {error.problem}"]
    if reference.kind == "folder" or reference.version is None:
        return [f"{path}.reference: {fields['reference']!r} does not name a published version"]
    if fields["registry"] is None or _fits(reference, fields["registry"]):
        return []
    return [f"{path}.registry: {fields['registry']!r} is no registry of {reference}"]


def _fits(reference: Reference, registry: str) -> bool:
    if reference.kind == "hub":
        return _is_hub(registry)
    # A UNC path would make Windows log in to a host that the lock file names.
    network = re.match(r"[/\\]{2}", registry) or "://" in registry
    return reference.kind == "local" and not network


def _name_problems(path: str, value: object) -> list[str]:
    return [] if isinstance(value, str) and is_name(value) else [f"{path}: not {NAME_RULE}"]


def _equal_names(names: Iterable[str]) -> list[str]:
    """List the names that are the same folder on a case-insensitive file system."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.casefold(), []).append(name)
    return [f"{' and '.join(g)} differ only in case" for g in groups.values() if len(g) > 1]


def _is_hub(url: str) -> bool:
    """Return whether a text is the URL of a self-hosted hub: scheme and host only."""
    try:
        return parse_reference(f"{url}/owner/name").host == url
    except ConfigError:
        return False


_SCHEMA = schema.record(
    {
        "version": schema.integer(1, 1),
        "adapters": schema.mapping(_name_problems, _pin_problems),
    }
)


@dataclass(frozen=True)
class Pin:
    """One adapter of a project."""

    reference: str
    digest: str
    backbone: str
    fingerprint: str
    registry: str | None = None


def read_lock(path: Path) -> dict[str, Pin]:
    """Read the pins of a lock file by name; empty if the file does not exist.

    Raises:
        FileError: the file is not a valid lock file.
    """
    if not os.path.lexists(path):
        return {}
    try:
        tree, offenders = schema.parse_object(read_file(path, 0, _MAX_BYTES, None), _MAX_BYTES)
    except UnreadableError as error:
        tree, offenders = {}, [str(error)]
    offenders = offenders or _SCHEMA("", tree) or _equal_names(tree["adapters"])
    if offenders:
        raise FileError(
            f"{path} is not a lock file",
            offenders=schema.shorten(offenders),
            hint="adapterhub lock REFERENCE...",
        )
    return {name: Pin(**pin) for name, pin in tree["adapters"].items()}


def write_lock(path: Path, pins: dict[str, Pin]) -> None:
    """Write a lock file atomically; equal pins give equal bytes."""
    tree = {"version": 1, "adapters": {name: asdict(pin) for name, pin in pins.items()}}
    with explained(path):
        replace_file(path, schema.canonical_json(tree))


def pin(
    reference: str,
    registry: str | Path | None = None,
    *,
    name: str | None = None,
    project: Path = Path(),
) -> tuple[str, Pin]:
    """Pull and verify the version that a reference currently resolves to, and pin it.

    Args:
        reference: the adapter, in a registry or on a hub.
        registry: the folder of the local registry, if not the default one.
        name: the adapter's name in the project, if not its own.
        project: the folder of the lock file.

    Returns:
        The name in the project, and the pin.

    Raises:
        ConfigError: the reference is a folder, or the name is invalid.
        RegistryError: not found, or the store cannot be reached.
        FileError: the files are invalid, or another library's.
    """
    if name is not None:
        check_name(name)
    parsed = parse_reference(reference)
    if parsed.kind == "folder":
        raise ConfigError(
            f"cannot pin the folder {reference}: its contents may change",
            hint=f"adapterhub publish {reference}, then lock the published name",
        )
    store = store_of(parsed, registry)
    entry = store.resolve(parsed.name, parsed.version)
    if not entry.fingerprint:
        raise FileError(
            f"cannot pin {reference}: another library's adapter has no backbone fingerprint",
            hint=f"adapterhub pull {reference}, import it, and publish the result",
        )
    warn_if_yanked(entry)
    store.get(entry)
    pinned = _pin_of(entry, recorded_registry(parsed, registry, project))
    return name or entry.name.rpartition("/")[2], pinned


def recorded_registry(
    reference: Reference, registry: str | Path | None, project: Path
) -> str | None:
    """Return what a lock file records of a store, if it is not the same one everywhere.

    Args:
        reference: the adapter's reference.
        registry: the folder of the local registry, if not the default one.
        project: the folder of the lock file.
    """
    if reference.kind == "hub":
        from huggingface_hub import constants  # slow to import

        other = constants.ENDPOINT != constants._HF_DEFAULT_ENDPOINT
        return constants.ENDPOINT if other and _is_hub(constants.ENDPOINT) else None
    if reference.kind != "local":
        return None
    folder = Path(registry or default_root())
    if folder.resolve().is_relative_to(project.resolve()):
        return folder.resolve().relative_to(project.resolve()).as_posix()
    if registry is None:
        return None
    if folder.is_absolute():
        return str(folder)
    return Path(os.path.relpath(folder, project)).as_posix()


def with_pins(pins: dict[str, Pin], new: Sequence[tuple[str, Pin]]) -> dict[str, Pin]:
    """Return the pins with new ones added, which replace older pins of the same adapter.

    Raises:
        ConfigError: two different adapters would have the same name.
    """
    merged, conflicts = dict(pins), []
    for name, pinned in new:
        old = merged.get(name, pinned)
        if _unversioned(old) != _unversioned(pinned):
            conflicts.append(f"{name}: {old.reference} and {pinned.reference}")
        merged[name] = pinned
    if conflicts := conflicts + _equal_names(merged):
        raise ConfigError(
            "different adapters would have the same name in the project",
            offenders=conflicts,
            hint="adapterhub lock REFERENCE --name OTHER",
        )
    return merged


def sync(
    pins: dict[str, Pin],
    folder: Path,
    registry: str | Path | None = None,
    *,
    project: Path = Path(),
) -> list[str]:
    """Restore every pinned adapter to `folder/NAME`; existing ones are verified.

    Args:
        pins: the pins by name.
        folder: the project's folder of adapters.
        registry: the folder of the local registry, if not the recorded or the default one.
        project: the folder of the lock file.

    Returns:
        The names of the adapters that were missing.

    Raises:
        MismatchError: a store or `folder` has other bytes for a pinned adapter; all are listed.
        RegistryError: a version is missing from its store, a store cannot be reached, or `registry`
            does not exist.
    """
    if registry is not None:
        LocalRegistry(registry).exists()  # or an error, even if it is not needed
    restored, mismatches = [], []
    for name, pinned in pins.items():
        target = folder / name
        if not target.exists():
            source = _pulled(pinned, registry, project)
            if _verified_digest(source) == pinned.digest:
                copy_adapter(source, target, pinned.digest)
                restored.append(name)
            else:
                mismatches.append(f"{pinned.reference} changed since it was locked")
        elif _verified_digest(target) != pinned.digest:
            mismatches.append(f"{target} is not {pinned.reference}")
    if mismatches:
        raise MismatchError(
            "these adapters differ from the lock file",
            offenders=mismatches,
            hint="move the folder away, or adapterhub lock REFERENCE to pin the current version",
        )
    return restored


def _pulled(pinned: Pin, registry: str | Path | None, project: Path) -> Path:
    """Return the folder of a pinned version, from `registry`, the recorded store or one's own."""
    parsed = parse_reference(pinned.reference)
    recorded = project / pinned.registry if parsed.kind == "local" and pinned.registry else None
    if registry is None and recorded is not None and recorded.is_dir():
        registry = recorded
    store = _other_hub(pinned) or store_of(parsed, registry)
    try:
        entry = store.resolve(parsed.name, parsed.version, backbone=pinned.fingerprint)
    except RegistryError as error:
        if parsed.kind != "local" or registry is not None:
            raise
        where = f"in {recorded}" if recorded else "in the own registry of who locked it"
        raise RegistryError(
            f"{pinned.reference} was locked {where}, and is not here",
            offenders=[error.problem],
            hint="adapterhub sync --registry FOLDER with a copy of that registry",
        ) from error
    warn_if_yanked(entry)
    return store.get(entry)


def _other_hub(pinned: Pin) -> Store | None:
    """Return the hub that a lock file names, without a token, unless it is this machine's own."""
    if not pinned.reference.startswith("hf:") or pinned.registry is None:
        return None
    from huggingface_hub import constants

    from adapterhub.registry.hub import HubStore

    is_own = pinned.registry == constants.ENDPOINT
    return None if is_own else HubStore(pinned.registry, token=False)


def _verified_digest(folder: Path) -> str:
    read_adapter(folder)
    return digest_of(folder)


def _unversioned(pinned: Pin) -> Reference:
    return replace(parse_reference(pinned.reference), version=None)


def _pin_of(entry: Entry, registry: str | None) -> Pin:
    return Pin(entry.reference, entry.digest, entry.backbone, entry.fingerprint, registry)
