"""A project's lock file: the adapters that it uses, pinned by digest.

    adapterhub.lock      {"adapters": {NAME: {"reference": ..., "digest": ..., "backbone": ...,
                         "fingerprint": ...}}, "version": 1}

`reference` names one version, never a tag or branch. Whoever has the lock file, and can reach the
stores, gets the same bytes or an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from adapterhub.errors import ConfigError, FileError, MismatchError
from adapterhub.files import schema
from adapterhub.files.atomic import explained, replace_file
from adapterhub.files.native import read_adapter
from adapterhub.registry.api import pull, store_of, warn_of_yanked
from adapterhub.registry.local_versions import copy_adapter, digest_of
from adapterhub.registry.reference import Reference, is_name, parse_reference
from adapterhub.registry.store import Entry

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
    """The pins of a lock file by name; none if there is no file.

    Raises:
        FileError: it cannot be read.
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
    """Write a lock file in one step; the same pins are the same bytes."""
    tree = {"version": 1, "adapters": {name: asdict(pin) for name, pin in pins.items()}}
    with explained(path):
        replace_file(path, schema.canonical_json(tree))


def pin(
    reference: str, registry: str | Path | None = None, *, name: str | None = None
) -> tuple[str, Pin]:
    """The name and the pin of what a reference means now; its files are pulled and verified.
    `name` is what the project calls it, if not by its own name.

    Raises:
        ConfigError: the reference is a folder, or the name cannot be. RegistryError, FileError: as
            of `pull`.
    """
    if name is not None and not is_name(name):
        raise ConfigError(f"{name!r} is not a name", expected="letters, digits and . _ - inside")
    place = parse_reference(reference)
    if place.place == "folder":
        raise ConfigError(
            f"{reference} is a folder, which may change",
            hint=f"adapterhub publish {reference}, then lock the name",
        )
    store = store_of(place, registry)
    entry = store.resolve(place.name, place.version)
    if not entry.fingerprint:
        raise FileError(
            f"{reference} is of another library, and names no backbone that could be checked",
            hint=f"adapterhub pull {reference}, import it, and publish what came of it",
        )
    warn_of_yanked(entry)
    store.get(entry)
    return name or entry.name.rpartition("/")[2], _pin_of(entry)


def with_pins(pins: dict[str, Pin], new: Sequence[tuple[str, Pin]]) -> dict[str, Pin]:
    """The pins with new ones, each in the place of an older one of the same adapter.

    Raises:
        ConfigError: two different adapters would have one name.
    """
    added, other = dict(pins), []
    for name, pinned in new:
        old = added.get(name, pinned)
        if _adapter(old) != _adapter(pinned):
            other.append(f"{name}: {old.reference} and {pinned.reference}")
        added[name] = pinned
    if other:
        raise ConfigError(
            "two adapters of a project would have one name",
            offenders=other,
            hint="adapterhub lock REFERENCE --name OTHER",
        )
    return added


def sync(pins: dict[str, Pin], folder: Path, registry: str | Path | None = None) -> list[str]:
    """Restore every adapter to `folder/NAME`, and say which were not there already.

    Raises:
        MismatchError: a store has other bytes under a pinned reference now, or `folder` has; all
            are listed. RegistryError: a store has not got it, or cannot be reached.
    """
    restored, other = [], []
    for name, pinned in pins.items():
        target = folder / name
        if not target.exists():
            source = pull(pinned.reference, backbone=pinned.fingerprint, registry=registry)
            if _digest(source) == pinned.digest:
                copy_adapter(source, target)
                restored.append(name)
            else:
                other.append(f"{pinned.reference} is not what it was when it was locked")
        elif _digest(target) != pinned.digest:
            other.append(f"{target} is not {pinned.reference}")
    if other:
        raise MismatchError(
            "these adapters are not those of the lock file",
            offenders=other,
            hint="move the folder away, or adapterhub lock REFERENCE to pin what is there now",
        )
    return restored


def _digest(folder: Path) -> str:
    read_adapter(folder)
    return digest_of(folder)


def _adapter(pinned: Pin) -> Reference:
    return replace(parse_reference(pinned.reference), version=None)


def _pin_of(entry: Entry) -> Pin:
    return Pin(entry.reference, entry.digest, entry.backbone, entry.fingerprint)
