"""What a user does with the registry: publish, push, pull, search, yank."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from adapterhub.errors import ConfigError
from adapterhub.files.card import InPeft
from adapterhub.files.native import MANIFEST_FILE, adapter_folder, read_manifest
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.other_formats import CONFIG_FILE
from adapterhub.registry.publication import Note, PublicationInfo, peft_files, prepared, silent
from adapterhub.registry.reference import Reference, parse_reference
from adapterhub.registry.store import Entry, Publication, Query, Store

_UNASKED = "its publisher did not write the files of peft"


def store_of(
    reference: Reference, registry: str | Path | None = None, *, allow_pickle: bool = False
) -> Store:
    """The store that a reference points into; `registry` is the folder of the local one.

    Raises:
        ConfigError: the reference is a folder, which is in no store.
    """
    if reference.place == "local":
        return LocalRegistry(registry)
    if reference.place == "folder":
        raise ConfigError(f"{reference} is a folder, not a published adapter")
    from adapterhub.registry.hub import HubStore  # the Hub's client is slow to import

    return HubStore(endpoint=reference.host, allow_pickle=allow_pickle)


def read_reference(place: str | Path) -> Reference:
    """The reference that is meant: a path, or a text; an existing folder needs no ./ before it.

    Raises:
        ConfigError: a text of none of the forms.
    """
    if isinstance(place, Path) or ("/" in place and Path(place).is_dir()):
        return Reference("folder", str(place))
    return parse_reference(place)


def publish(
    folder: str | Path,
    name: str | None = None,
    *,
    version: str | None = None,
    tags: tuple[str, ...] = (),
    registry: str | Path | None = None,
    listing: PublicationInfo | None = None,
) -> Entry:
    """Publish the adapter in a folder to the local registry, or to the one in `registry`.

    Without a name it is published under its own. The same bytes are the same version. `tags` name
    this version, and may move to another; what `listing` says (description, licence, languages,
    topics) is written into the manifest, and so belongs to the version.

    Raises:
        FileError: the folder holds no sound adapter. ConfigError: a name or tag that cannot be.
        OutputError: a listing that cannot be. RegistryError: the version is taken by other bytes.
    """
    source = adapter_folder(Path(folder).expanduser())
    chosen = name or read_manifest(source).name
    with prepared(source, listing or PublicationInfo(), chosen) as ready:
        return LocalRegistry(registry).put(ready, Publication(chosen, version, tuple(tags)))


def push(
    folder: str | Path,
    reference: str,
    *,
    visibility: Literal["public", "private"] = "public",
    tags: tuple[str, ...] = (),
    listing: PublicationInfo | None = None,
    peft: bool = True,
    backbone: str | None = None,
    note: Note = silent,
) -> Entry:
    """Publish the adapter in a folder on the Hub (`hf:owner/name`) or a hub of one's own, as one
    commit: our files, a card, and where peft can express the adapter its two files beside them
    (not with `peft=False`), so that plain peft loads the repository.

    For peft's files the configuration of the backbone is read, of `backbone` if it is not where the
    adapter says. Where peft cannot have the adapter, `note` is told why, and the card says it.
    `tags` are git tags for this version; `listing` is as of `publish`.

    Raises:
        ConfigError: another kind of reference. FileError: the folder holds no sound adapter, or
            something that must not leave this machine. BackboneError: `backbone` is none.
            RegistryError: the hub refuses, or cannot be reached.
    """
    place = parse_reference(reference)
    if place.place not in ("hub", "server"):
        raise ConfigError(
            f"{reference!r} is not on a hub",
            expected="hf:owner/name or https://host/owner/name",
            hint=f"adapterhub publish {folder} for the local registry",
        )
    source = adapter_folder(Path(folder).expanduser())
    beside, said = _for_peft(source, backbone, note) if peft else ({}, InPeft(None, (_UNASKED,)))
    publication = Publication(place.name, place.version, tuple(tags), visibility, beside)
    target = str(replace(place, version=None))
    with prepared(source, listing or PublicationInfo(), target, said) as ready:
        return store_of(place).put(ready, publication)


def _for_peft(source: Path, backbone: str | None, note: Note) -> tuple[dict[str, bytes], InPeft]:
    files, said = peft_files(source, backbone)
    if said.problems:
        more = f" (and {len(said.problems) - 1} more)" if len(said.problems) > 1 else ""
        note(f"plain peft will not load it: {said.problems[0]}{more}")
    else:
        note("plain peft loads it too: its two files go beside ours")
    return files, said


def pull(
    reference: str | Path,
    folder: str | Path | None = None,
    *,
    backbone: str | None = None,
    registry: str | Path | None = None,
    allow_pickle: bool = False,
) -> Path:
    """The verified files of an adapter, wherever it is: in `folder`, or where its store keeps them.
    Of a version that was yanked a warning tells why. With `allow_pickle` another library's adapter
    comes in a pickle where it has no safetensors.

    Raises:
        ConfigError: no reference. RegistryError: it is not there, or cannot be reached. FileError:
            what came is not what was published.
    """
    place = read_reference(reference)
    if place.place == "folder":
        path = Path(place.name).expanduser()
        other = (path / CONFIG_FILE).is_file() and not (path / MANIFEST_FILE).is_file()
        return path if other else adapter_folder(path)
    store = store_of(place, registry, allow_pickle=allow_pickle)
    entry = store.resolve(place.name, place.version, backbone=backbone)
    warn_of_yanked(entry)
    return store.get(entry, None if folder is None else Path(folder).expanduser())


def warn_of_yanked(entry: Entry) -> None:
    """Tell who named a version that was yanked, why."""
    if entry.yanked is not None:
        warnings.warn(f"{entry.reference} was yanked: {entry.yanked}", stacklevel=3)


def search(
    text: str = "",
    *,
    registry: str | Path | None = None,
    hub: bool | str = False,
    **fields: Any,
) -> list[Entry]:
    """The adapters that a query finds in the local registry, or in the one in `registry`; on the
    Hub with `hub=True`, or on a hub of one's own by its address. `fields` are those of `Query`.

    Raises:
        RegistryError: the hub cannot be reached. ConfigError: no address of a hub.
    """
    place = (
        parse_reference(f"{hub.rstrip('/')}/owner/name")
        if isinstance(hub, str)
        else Reference("hub", "")
    )
    store = store_of(place) if hub else LocalRegistry(registry)
    return store.search(Query(text, **fields))


def yank(reference: str, reason: str, *, registry: str | Path | None = None) -> Entry:
    """Take a version out of searches and of what its bare name means.

    Raises:
        ConfigError: the reference names no version. RegistryError: it is not there.
    """
    place = parse_reference(reference)
    if place.version is None:
        raise ConfigError(f"{reference!r} names no version", hint=f"{reference}@v1")
    store = store_of(place, registry)
    entry = store.resolve(place.name, place.version)
    store.yank(entry, reason)
    return entry
