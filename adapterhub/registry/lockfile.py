"""A project's lock file: the adapters that it uses, pinned by digest.

    adapterhub.lock      {"adapters": {NAME: {"reference": ..., "registry": ..., "endpoint": ...,
                         "digest": ..., "signer": ..., "backbone": ..., "fingerprint": ...}},
                         "version": 1}

An adapter that was trained on others lists them: {"on": [{"reference": ..., "digest": ...}]}.
`reference` names one version, never a tag or branch. `registry` is the folder of a local registry,
relative to the lock file if it is in the project; null is each user's own. `endpoint` is the origin
of the adapter's hub; null for a local registry. `signer` is the public key of the signer, or null.
With the lock file and access to the stores, everyone gets the same bytes from the same signer, or
an error. Lock files may come from strangers: a hub named in one receives a token only if the user
stored one for exactly its origin (`tokens`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from adapterhub.backbones.hub_network import ForbiddenAddressError, url_origin
from adapterhub.config.options import from_file, option, to_dict
from adapterhub.errors import (
    ConfigError,
    FileError,
    MismatchError,
    RegistryError,
    warn_user,
)
from adapterhub.files import schema
from adapterhub.files.atomic import UnreadableError, explained, read_file, replace_file
from adapterhub.files.manifest import Sha256
from adapterhub.files.native import Foundation, Saved, all_below, copy_problems, write_copies
from adapterhub.files.signature import PublicKey, key_problems
from adapterhub.registry.local import LocalRegistry, default_root, registry_at, store_of
from adapterhub.registry.pull import Origins, fetch
from adapterhub.registry.store import (
    DEFAULT_HUB,
    NAME_RULE,
    Reference,
    Store,
    check_name,
    is_name,
    parse_reference,
    version_number,
)
from adapterhub.registry.trust import check_copy
from adapterhub.registry.version_files import copy_adapter

LOCK_FILE = "adapterhub.lock"
_MAX_BYTES = 4 << 20


def _complete(tree: dict[str, Any]) -> dict[str, Any]:
    """Add missing fields to pins; adapterhub 0.1 had the hub of `hf:` in `registry`."""
    adapters = tree.get("adapters")
    for pin in adapters.values() if isinstance(adapters, dict) else ():
        if isinstance(pin, dict):
            pin |= {"registry": None, "endpoint": None, "signer": None} | pin
            if str(pin.get("reference")).startswith("hf:") and isinstance(pin["registry"], str):
                pin |= {"registry": None, "endpoint": pin["endpoint"] or pin["registry"]}
    return tree


def _origin(url: str) -> str:
    """Return the origin of a URL in one spelling; "" if it has none."""
    try:
        return url_origin(url)
    except ForbiddenAddressError:
        return ""


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


def _place_problems(path: str, pin: Pin) -> list[str]:
    """Check that the reference of a pin can come from its registry or hub."""
    try:
        reference = parse_reference(pin.reference)
    except ConfigError as error:
        return [f"{path}.reference: {error.problem}"]
    if reference.kind == "folder" or reference.version is None:
        return [f"{path}.reference: {pin.reference!r} does not name a published version"]
    kind, problems = reference.kind, []
    # A UNC path would make Windows log in to a host that the lock file names.
    folder, network = pin.registry, re.compile(r"[/\\]{2}|.*://")
    if folder is not None and (kind != "local" or network.match(folder)):
        problems.append(f"{path}.registry: {folder!r} is not a registry of {reference}")
    at = pin.endpoint
    if at is not None and not (
        _is_hub(at) if kind == "hub" else at == recorded_endpoint(reference)
    ):
        problems.append(f"{path}.endpoint: {at!r} is not a hub of {reference}")
    return problems


_Reference = Annotated[str, schema.text(r"\S{1,500}", "a reference")]
_Folder = Annotated[str, schema.text(r"[^\x00-\x1f\x7f]{1,500}", "a folder")]
_Origin = Annotated[str, schema.text(r"\S{1,500}", "the origin of a hub")]


@dataclass(frozen=True)
class PinnedFoundation:
    """An adapter below a pinned one, whose digest is also in the manifest above it."""

    reference: _Reference | None
    digest: Sha256


@dataclass(frozen=True)
class Pin:
    """One adapter of a project, and those that it was trained on, the lowest first."""

    reference: _Reference
    digest: Sha256
    backbone: Annotated[str, schema.text(r".{1,200}", "a backbone's id")]
    fingerprint: Annotated[str, schema.text(r"[\w.:+-]{1,200}", "a fingerprint")]
    registry: _Folder | None = None
    endpoint: _Origin | None = None
    signer: Annotated[str, key_problems] | None = None
    on: Annotated[tuple[PinnedFoundation, ...], schema.items(0, 1000)] = option((), omitted=True)

    def record(self) -> dict[str, Any]:
        """Return the fields for the file; adapters below are included only if there are any."""
        return to_dict(self)


@dataclass(frozen=True)
class _Lock:
    """The contents of a lock file."""

    adapters: Annotated[
        dict[Annotated[str, _name_problems], Annotated[Pin, _place_problems]],
        schema.items(0, 20_000),
    ]
    version: Annotated[int, schema.integer(1, 1)] = 1


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
    lock, problems = from_file(_Lock, _complete(tree))
    offenders = offenders or problems or _equal_names(lock.adapters if lock else ())
    if lock is None or offenders:
        raise FileError(
            f"{path} is not a lock file",
            offenders=schema.shorten(offenders),
            hint="adapterhub lock REFERENCE...",
        )
    return lock.adapters


def write_lock(path: Path, pins: dict[str, Pin]) -> None:
    """Write a lock file atomically; equal pins give equal bytes."""
    with explained(path):
        replace_file(path, schema.canonical_json(to_dict(_Lock(pins))))


def pin(
    reference: str,
    registry: str | Path | None = None,
    *,
    name: str | None = None,
    project: Path = Path(),
    before: Mapping[str, Pin] | None = None,
) -> tuple[str, Pin]:
    """Pull and verify the version that a reference currently resolves to, and pin it.

    `project` is the folder of the lock file and `before` its pins so far. Of several signers, the
    one recorded before is kept. `name` is the adapter's name in the project, if not its own.

    Returns:
        The name in the project, and the pin.

    Raises:
        ConfigError: the reference is a folder, or the name is invalid.
        RegistryError: not found, or the store cannot be reached; also of an adapter below it.
        FileError: the files are invalid, or another library's.
        SignatureError: a signature by a trusted key is required but missing.
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
    fetched = fetch(parsed, store, entry, find_signers=True)
    resolved = replace(parsed, version=entry.version)
    below = all_below(Origins(resolved, registry).bring(fetched.own()))
    own_name = name or entry.name.rpartition("/")[2]
    old = (before or {}).get(own_name)
    signer = next(iter(fetched.signers), None)
    pinned = Pin(
        entry.reference,
        entry.digest,
        entry.backbone,
        entry.fingerprint,
        recorded_registry(parsed, registry, project),
        recorded_endpoint(parsed),
        old.signer if old and old.signer in fetched.signers else signer,
        tuple(PinnedFoundation(each.ref.reference, each.ref.digest) for each in below),
    )
    return own_name, pinned


def recorded_registry(
    reference: Reference, registry: str | Path | None, project: Path
) -> str | None:
    """Return the recorded folder of a local registry; None for the user's own.

    `project` is the folder of the lock file.
    """
    if reference.kind != "local" or not isinstance(registry_at(registry), LocalRegistry):
        return None
    folder = Path(registry or default_root())
    if folder.resolve().is_relative_to(project.resolve()):
        return folder.resolve().relative_to(project.resolve()).as_posix()
    if registry is None or folder.is_absolute():
        return None if registry is None else str(folder)
    return Path(os.path.relpath(folder, project)).as_posix()


def recorded_endpoint(reference: Reference) -> str | None:
    """Return the origin of an adapter's hub; None for a local registry."""
    if reference.kind == "hub":
        from huggingface_hub import constants  # slow to import

        return _origin(constants.ENDPOINT) if _is_hub(constants.ENDPOINT) else None
    return _origin(str(reference.host)) if reference.kind == "server" else None


def with_pins(pins: dict[str, Pin], new: Sequence[tuple[str, Pin]]) -> dict[str, Pin]:
    """Return the pins with new ones added, which replace older pins of the same adapter.

    Raises:
        ConfigError: two different adapters would have the same name.
        MismatchError: an adapter lost the signer that it was locked with.
    """
    merged, conflicts = dict(pins), []
    for name, pinned in new:
        old = merged.get(name, pinned)
        _check_successor(name, old, pinned)
        first, second = (parse_reference(each.reference) for each in (old, pinned))
        if replace(first, version=None) != replace(second, version=None):
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

    `registry` replaces the recorded or default registry; `project` is the folder of the lock file.

    Returns:
        The names of the adapters that were missing.

    Raises:
        MismatchError: a store or `folder` has other bytes or another signer for a pinned adapter;
            all are listed.
        SignatureError: a signature by a trusted key is required but missing.
        RegistryError: a version is missing from its store, a store cannot be reached, or `registry`
            does not exist.
    """
    if registry is not None:
        registry_at(registry).exists()  # raises an error even if it is not needed
    restored, mismatches = [], []
    for name, pinned in pins.items():
        target = folder / name
        if target.exists():
            mismatches += _target_problems(target, pinned)
            continue
        source, on, problems = _pulled(pinned, registry, project)
        mismatches += problems
        if not problems:
            copy_adapter(source, target, pinned.digest)
            write_copies(target, on)
            restored.append(name)
    if mismatches:
        raise MismatchError(
            "these adapters differ from the lock file",
            offenders=mismatches,
            hint="move the folder away, or adapterhub lock REFERENCE to pin the current version",
        )
    return restored


def _pulled(
    pinned: Pin, registry: str | Path | None, project: Path
) -> tuple[Path, tuple[Foundation, ...], list[str]]:
    """Return the folder of a pinned version, the adapters below, and its differences from the pin.

    It is searched in `registry`, the recorded store or the user's own.
    """
    parsed = parse_reference(pinned.reference)
    recorded = project / pinned.registry if parsed.kind == "local" and pinned.registry else None
    if registry is None and recorded is not None and recorded.is_dir():
        registry = recorded
    other = _other_hub(pinned)
    store = other or store_of(parsed, registry)
    try:
        entry = store.resolve(parsed.name, parsed.version, backbone=pinned.fingerprint)
    except RegistryError as error:
        if parsed.kind != "local" or registry is not None:
            raise
        origin = f"in {recorded}" if recorded else "in the own registry of who locked it"
        raise RegistryError(
            f"{pinned.reference} was locked {origin}, and is not here",
            offenders=[error.problem],
            hint="adapterhub sync --registry FOLDER with a copy of that registry",
        ) from error
    if entry.digest != pinned.digest:
        return Path(), (), [f"{pinned.reference} changed since it was locked"]
    fetched = fetch(parsed, store, entry, find_signers=pinned.signer is not None)
    on = Origins(parsed, registry, pinned=True, hub=other).bring(fetched.own())
    return fetched.folder, on, _signer_problems(pinned, fetched.signers)


def _target_problems(target: Path, pinned: Pin) -> list[str]:
    """List the differences of an adapter in the project's folder from its pin."""
    saved = Saved.at(target).check()
    if saved.digest != pinned.digest:
        return [f"{target} is not {pinned.reference}"]
    if problems := copy_problems(saved):
        return [f"{target} lacks what {pinned.reference} is on: {each}" for each in problems]
    parsed = parse_reference(pinned.reference)
    signers = check_copy(parsed, target, pinned.digest, find=bool(pinned.signer))
    return _signer_problems(pinned, signers)


def _signer_problems(pinned: Pin, signers: Sequence[str]) -> list[str]:
    if pinned.signer is None or pinned.signer in signers:
        return []
    signer = PublicKey(pinned.signer).id
    return [f"{pinned.reference} is not signed by key {signer}, which had signed it when locked"]


def _check_successor(name: str, old: Pin, new: Pin) -> None:
    """Refuse a pin that lacks the previous signer; warn of an older version.

    Raises:
        MismatchError: the signer differs, or is missing.
    """
    if old.signer not in (None, new.signer):
        raise MismatchError(
            f"{name} was signed by {old.signer}, and {new.reference} is not",
            expected="the same signer",
            offenders=[f"signed by {new.signer}" if new.signer else "no valid signature"],
            hint=f"if the change is genuine, delete {name} from the lock file, and lock it again",
        )
    numbers = [version_number(parse_reference(p.reference).version or "") or 0 for p in (old, new)]
    if numbers[1] < numbers[0]:
        warn_user(f"{name} goes back from {old.reference} to {new.reference}", stacklevel=3)


def _other_hub(pinned: Pin) -> Store | None:
    """Return the hub that a lock file records for `hf:`, unless it is the user's own.

    Adapters of the Hub may come from this machine's `$HF_ENDPOINT`, such as a mirror.
    """
    parsed = parse_reference(pinned.reference)
    if parsed.kind != "hub" or pinned.endpoint in (None, DEFAULT_HUB, recorded_endpoint(parsed)):
        return None
    from adapterhub.registry.hub import HubStore

    return HubStore(pinned.endpoint)
