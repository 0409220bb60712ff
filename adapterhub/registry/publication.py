"""Prepare an adapter's folder for publication: the publisher's metadata, the card, the foundations.

The metadata becomes part of the manifest, and so of the version: the same adapter under another
licence is another version.

An adapter is published after those that it was trained on: its manifest names versions of the same
registry, or of the same owner on the same hub, so that the name of the adapter on top is enough to
get all of them. One that was trained in a folder is recognized by its content: publication adds a
licence, and so changes its digest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from adapterhub.errors import RegistryError
from adapterhub.files import native
from adapterhub.files.atomic import read_file
from adapterhub.files.card import InPeft, card
from adapterhub.files.foundation import copy_of
from adapterhub.files.manifest import (
    MAX_TENSOR_BYTES,
    FoundationRef,
    Manifest,
    to_json,
)
from adapterhub.files.native import MANIFEST_FILE, read_manifest
from adapterhub.interchange.peft.files import CONFIG_FILE, write_peft
from adapterhub.interchange.peft.files import TENSORS_FILE as PEFT_TENSORS
from adapterhub.registry.fetch import fetch
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.reference import Reference, is_name, parse_reference
from adapterhub.registry.registry import Registry
from adapterhub.registry.store import Entry, Query, Store

_MOST = 10_000  # versions for one backbone that are compared


@dataclass(frozen=True)
class PublicationInfo:
    """Metadata that a publisher adds; fields that are None or empty keep the manifest's value.

    Attributes:
        description: one sentence for the card and the listing.
        license: an identifier such as apache-2.0.
        language: language codes such as en.
        topics: search keywords.
    """

    description: str | None = None
    license: str | None = None
    language: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()

    def apply(self, manifest: Manifest) -> Manifest:
        """Return a copy of the manifest with this metadata."""
        fields = {name: value for name, value in asdict(self).items() if value}
        if "topics" in fields:
            fields["tags"] = fields.pop("topics")
        return replace(manifest, **fields)


@contextmanager
def prepared_folder(
    source: Path,
    info: PublicationInfo,
    reference: str,
    peft: InPeft | None = None,
    on: tuple[FoundationRef, ...] = (),
) -> Iterator[Path]:
    """Provide a folder with the adapter as it is to be published, for the length of the context.

    Args:
        source: the adapter's folder; it is used as it is if nothing changes.
        info: the publisher's metadata.
        reference: the text that loads the adapter, for the card.
        peft: whether peft can load the published repository, for the card.
        on: where the adapters that it was trained on are published.

    Raises:
        FileError: `source` holds no valid adapter.
        OutputError: the metadata is invalid.
    """
    manifest = native.check_adapter(source)
    published = replace(info.apply(manifest), on=on)
    if published == manifest and peft is None:
        yield source
        return
    text = card(published, native.read_card(source), reference=reference, peft=peft)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        files = {
            native.MANIFEST_FILE: to_json(published),
            native.CARD_FILE: native.card_bytes(text),
        }
        native.write_copy(folder, source, manifest, files)
        yield folder


def peft_files(source: Path, backbone: str | None) -> tuple[dict[str, bytes], InPeft]:
    """Convert the adapter in `source` to peft's files.

    Args:
        source: the adapter's folder.
        backbone: the folder or Hub id of the backbone, if not the one in the manifest.

    Returns:
        peft's files by name, empty if peft cannot express the adapter, and the reasons for the
        card.

    Raises:
        FileError: `source` holds no valid adapter.
        BackboneError: `backbone` cannot be read.
    """
    from adapterhub.adapters.export import in_peft  # imports torch and transformers

    conversion = in_peft(source, backbone)
    summary = InPeft(conversion.kind, conversion.problems)
    if conversion.files is None:
        return {}, summary
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path) / "peft"
        write_peft(folder, conversion.files)
        names, most = (CONFIG_FILE, PEFT_TENSORS), MAX_TENSOR_BYTES
        return {name: read_file(folder / name, 0, most, None) for name in names}, summary


Note = Callable[[str], None]
"""Receives one-line messages for the user that are not errors."""


def silent(text: str) -> None:
    """Ignore a message."""


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
