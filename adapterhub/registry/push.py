"""`ah.push`: publish an adapter on the Hub or a self-hosted hub."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from adapterhub.config.user_folders import expanded
from adapterhub.errors import ConfigError
from adapterhub.files.card import InPeft
from adapterhub.files.native import adapter_folder, read_manifest
from adapterhub.files.signature import PrivateKey
from adapterhub.registry.publication import (
    Note,
    PublicationInfo,
    peft_files,
    prepared_folder,
    published_foundations,
    silent,
)
from adapterhub.registry.reference import Reference, parse_reference
from adapterhub.registry.sign import put_signed
from adapterhub.registry.store import Entry, Publication
from adapterhub.registry.stores import store_of

_NOT_REQUESTED = "it was published without peft's files"


def push(
    folder: str | Path,
    reference: str,
    *,
    visibility: Literal["public", "private"] = "public",
    tags: tuple[str, ...] = (),
    listing: PublicationInfo | None = None,
    peft: bool = True,
    backbone: str | None = None,
    allow_findings: tuple[str, ...] = (),
    note: Note = silent,
    sign: str | Path | PrivateKey | None = None,
) -> Entry:
    """Publish the adapter in a folder on a hub, as one commit.

    The commit holds our files, a card and, if peft can express the adapter, peft's two files, which
    make the repository loadable with plain peft. If it cannot, or if peft is installed and computes
    other outputs, `note` and the card give the reason.

    Args:
        folder: the adapter's folder, or the folder of its training run.
        reference: `hf:owner/name` or `https://host/owner/name`.
        visibility: of the repository, if it does not exist yet.
        tags: git tags to set on this version.
        listing: description, licence, languages and topics; they become part of the manifest.
        peft: whether to add peft's files.
        backbone: the folder or Hub id of the backbone, whose configuration peft's files need; by
            default the one recorded with the adapter.
        allow_findings: codes, from the error, of texts that look private and are not.
        note: receives messages for the user.
        sign: the file of a private key, or the key: sign the version.

    Raises:
        ConfigError: the reference is not on a hub.
        FileError: the folder holds no valid adapter, or its files contain private information.
        BackboneError: `backbone` cannot be read.
        OutputError: `listing` is invalid.
        SignatureError: without `sign`, and the folder's signature is not for what is published.
        RegistryError: the hub denies access or cannot be reached, or an adapter that this one was
            trained on is not there.
    """
    parsed = _hub_reference(reference, folder)
    source = adapter_folder(expanded(folder))
    store = store_of(parsed)
    on = published_foundations(source, read_manifest(source), store, parsed)
    beside: dict[str, bytes] = {}
    in_peft = InPeft(None, (_NOT_REQUESTED,))
    if peft:
        beside, in_peft = peft_files(source, backbone)
        note(_peft_note(in_peft))
    allowed = tuple(allow_findings)
    publication = Publication(parsed.name, parsed.version, tuple(tags), visibility, beside, allowed)
    target = str(replace(parsed, version=None))
    with prepared_folder(source, listing or PublicationInfo(), target, in_peft, on) as prepared:
        return put_signed(store, prepared, publication, source, sign)


def _hub_reference(reference: str, folder: str | Path) -> Reference:
    parsed = parse_reference(reference)
    if parsed.kind not in ("hub", "server"):
        raise ConfigError(
            f"{reference!r} is not on a hub",
            expected="hf:owner/name or https://host/owner/name",
            hint=f"adapterhub publish {folder} for the local registry",
        )
    return parsed


def _peft_note(in_peft: InPeft) -> str:
    if not in_peft.problems:
        compared = "" if find_spec("peft") else "; outputs not compared, peft is not installed"
        return f"plain peft can load it: peft's two files are included{compared}"
    more = f" (and {len(in_peft.problems) - 1} more)" if len(in_peft.problems) > 1 else ""
    return f"plain peft cannot load it: {in_peft.problems[0]}{more}"
