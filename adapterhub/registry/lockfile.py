"""A project's lock file: the adapters that it uses, pinned by digest.

    adapterhub.lock      {"adapters": {NAME: {"reference": ..., "digest": ..., "backbone": ...,
                         "fingerprint": ...}}, "version": 1}

`reference` names one version, never a tag or branch. With the lock file and access to the stores,
everyone gets the same bytes or an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from adapterhub.errors import ConfigError, FileError, MismatchError
from adapterhub.files import schema
from adapterhub.files.atomic import explained, replace_file
from adapterhub.files.native import read_adapter
from adapterhub.registry.local_versions import copy_adapter, digest_of
from adapterhub.registry.pull import pull, warn_if_yanked
from adapterhub.registry.reference import Reference, check_name, parse_reference
from adapterhub.registry.store import Entry
from adapterhub.registry.stores import store_of

_MAX_BYTES = 4 << 20
_PIN = schema.record(
    {
        "reference": schema.text(r"\S{1,500}", "a reference"),
        "digest": schema.text(r"[0-9a-f]{64}", "a sha256 in lower-case hexadecimal"),
        "backbone": schema.text(r".{1,200}", "a backbone's id"),
        "fingerprint": schema.text(r"[\w.:+-]{1,200}", "a fingerprint"),
    }
)
_SCHEMA = schema.record(
    {
        "version": schema.integer(1, 1),
        "adapters": schema.mapping(schema.text(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}", "a name"), _PIN),
    }
)


@dataclass(frozen=True)
class Pin:
    """One adapter of a project."""

    reference: str
    digest: str
    backbone: str
    fingerprint: str


def read_lock(path: Path) -> dict[str, Pin]:
    """Read the pins of a lock file by name; empty if the file does not exist.

    Raises:
        FileError: the file is not a valid lock file.
    """
    if not path.exists():
        return {}
    tree, offenders = schema.parse_object(path.read_bytes(), _MAX_BYTES)
    offenders = offenders or _SCHEMA("", tree)
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
    reference: str, registry: str | Path | None = None, *, name: str | None = None
) -> tuple[str, Pin]:
    """Pull and verify the version that a reference currently resolves to, and pin it.

    Args:
        reference: the adapter, in a registry or on a hub.
        registry: the folder of the local registry, if not the default one.
        name: the adapter's name in the project, if not its own.

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
    return name or entry.name.rpartition("/")[2], _pin_of(entry)


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
    if conflicts:
        raise ConfigError(
            "different adapters would have the same name in the project",
            offenders=conflicts,
            hint="adapterhub lock REFERENCE --name OTHER",
        )
    return merged


def sync(pins: dict[str, Pin], folder: Path, registry: str | Path | None = None) -> list[str]:
    """Restore every pinned adapter to `folder/NAME`; existing ones are verified.

    Args:
        pins: the pins by name.
        folder: the project's folder of adapters.
        registry: the folder of the local registry, if not the default one.

    Returns:
        The names of the adapters that were missing.

    Raises:
        MismatchError: a store or `folder` has other bytes for a pinned adapter; all are listed.
        RegistryError: a version is missing from its store, or a store cannot be reached.
    """
    restored, mismatches = [], []
    for name, pinned in pins.items():
        target = folder / name
        if not target.exists():
            source = pull(pinned.reference, backbone=pinned.fingerprint, registry=registry)
            if _verified_digest(source) == pinned.digest:
                copy_adapter(source, target)
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


def _verified_digest(folder: Path) -> str:
    read_adapter(folder)
    return digest_of(folder)


def _unversioned(pinned: Pin) -> Reference:
    return replace(parse_reference(pinned.reference), version=None)


def _pin_of(entry: Entry) -> Pin:
    return Pin(entry.reference, entry.digest, entry.backbone, entry.fingerprint)
