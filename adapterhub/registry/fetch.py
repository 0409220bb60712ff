"""The one way of an adapter from a folder or a store to a user: every check is made here.

`pull`, `load`, `lock`, `sync` and the commands get adapters only by `fetch` and `fetch_folder`:
yanked versions and signatures.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from adapterhub.errors import RegistryError, SignatureError, one_line, warn_user
from adapterhub.files.foundation import Foundation
from adapterhub.files.native import MANIFEST_FILE, SIGNATURE_FILE, adapter_folder
from adapterhub.files.signature import (
    MAX_SIGNATURES,
    Signature,
    read_signatures,
    signatures_to_json,
)
from adapterhub.registry.other_formats import CONFIG_FILE
from adapterhub.registry.published_files import digest_of
from adapterhub.registry.reference import Reference
from adapterhub.registry.store import Entry, Store
from adapterhub.registry.trust import (
    CheckedSignature,
    SignedSubject,
    Trust,
    check_enough,
    checked_signatures,
    current_trust,
    signed_subject,
)


@dataclass(frozen=True)
class Fetched:
    """The folder of an adapter, the sha256 of its manifest, and its valid signers.

    `digest` is None if nothing was verified yet: a plain folder, or another library's adapter.
    `signers` are public keys, trusted ones first; empty unless signatures were checked. `reference`
    is where it was found, with its version; `on` are the adapters that it was trained on: both are
    set by `pull_verified`.
    """

    folder: Path
    digest: str | None = None
    signers: tuple[str, ...] = ()
    reference: Reference | None = None
    on: tuple[Foundation, ...] = ()


def fetch_folder(path: Path, *, signed: bool = False) -> Fetched:
    """Return the folder of an adapter on this machine: `path`, or its subfolder `adapter`.

    Args:
        path: the folder of an adapter, of a run, or of another library's adapter.
        signed: require a signature, also if the configuration does not.

    Raises:
        FileError: there is no adapter, or its manifest or signatures cannot be read.
        SignatureError: signatures are required, and it has none by a trusted key.
    """
    trust = current_trust(signed=signed)
    if (path / CONFIG_FILE).is_file() and not (path / MANIFEST_FILE).is_file():
        _refuse_foreign(str(path), trust)
        return Fetched(path)
    folder = adapter_folder(path)
    if not trust.required:
        return Fetched(folder)
    subject = SignedSubject(Reference("folder", str(folder)), digest_of(folder))
    checked = checked_signatures(read_signatures(folder), subject, trust)
    return Fetched(folder, subject.digest, check_enough(checked, subject, trust))


def fetch(
    asked: Reference,
    store: Store,
    entry: Entry,
    folder: Path | None = None,
    *,
    signed: bool = False,
    find_signers: bool = False,
) -> Fetched:
    """Return the verified files of a published version, after all checks.

    Args:
        asked: the reference that was asked for.
        store: the store that it points into.
        entry: what the store resolved it to.
        folder: a new folder for the files; by default the store's own copy is returned.
        signed: require a signature, also if the configuration does not.
        find_signers: look for signatures also if none is required.

    Raises:
        RegistryError: the store cannot be reached.
        FileError: the files differ from the published ones, or a signature file is broken.
        SignatureError: a signature is required, and there is none by a trusted key.
        OutputError: `folder` cannot be written.
    """
    trust = current_trust(signed=signed)
    if entry.yanked is not None:
        warn_user(f"{entry.reference} was yanked: {one_line(entry.yanked)}", stacklevel=3)
    if not entry.fingerprint:
        _refuse_foreign(entry.reference, trust)
        return Fetched(store.get(entry, folder))
    if not (trust.required or find_signers):
        return Fetched(store.get(entry, folder), entry.digest)
    path = store.get(entry)
    checked = published_signatures(asked, store, entry, path, trust)
    signers = check_enough(checked, _subject(asked, entry), trust)
    return Fetched(path if folder is None else store.get(entry, folder), entry.digest, signers)


def check_copy(pinned: Reference, folder: Path, digest: str, *, find: bool) -> tuple[str, ...]:
    """Check the signatures of a project's copy of a published version; return its valid signers.

    Args:
        pinned: the reference that it was pulled by, with its version.
        folder: the copy.
        digest: the sha256 of its manifest.
        find: look for signatures also if none is required.

    Raises:
        SignatureError: a signature is required, and there is none by a trusted key.
    """
    trust = current_trust()
    if not (trust.required or find):
        return ()
    subject = signed_subject(pinned, digest, pinned.name, str(pinned.version))
    return check_enough(checked_signatures(read_signatures(folder), subject, trust), subject, trust)


def published_signatures(
    asked: Reference, store: Store, entry: Entry, path: Path, trust: Trust
) -> list[CheckedSignature]:
    """Check the signatures of a published version, without requiring any.

    Those beside the manifest are checked first; if they are not enough, those added later.

    Args:
        asked: the reference that was asked for.
        store: the store that it points into.
        entry: what the store resolved it to.
        path: the store's own copy.
        trust: the trusted keys.
    """
    subject, beside = _subject(asked, entry), read_signatures(path)
    checked = checked_signatures(beside, subject, trust)
    if any(c.is_valid and c.is_trusted for c in checked):
        return checked
    later = [s for s in _later_signatures(store, entry, trust) if s not in beside]
    if later:
        checked = checked_signatures((*beside, *later), subject, trust)
        _keep_beside(path, [c for c in checked if c.is_valid])
    return checked


def _later_signatures(store: Store, entry: Entry, trust: Trust) -> Sequence[Signature]:
    """List the signatures that are not beside the manifest; none offline, unless required."""
    try:
        return store.signatures(entry)
    except RegistryError:
        if trust.required:
            raise
        return ()


def _keep_beside(path: Path, checked: Sequence[CheckedSignature]) -> None:
    """Add signatures to a store's own copy, so that copies of it have them."""
    if not checked:
        return
    data = signatures_to_json(c.signature for c in checked[:MAX_SIGNATURES])
    staged = path / f".{SIGNATURE_FILE}.{secrets.token_hex(4)}.new"
    with contextlib.suppress(OSError):  # a cache that cannot be written: copies lack them
        staged.write_bytes(data)
        os.replace(staged, path / SIGNATURE_FILE)


def _subject(asked: Reference, entry: Entry) -> SignedSubject:
    return signed_subject(asked, entry.digest, entry.name, entry.version)


def _refuse_foreign(reference: str, trust: Trust) -> None:
    if trust.required:
        raise SignatureError(
            f"{reference} is another library's adapter, which cannot be signed, and signatures are"
            " required",
            hint="import it, sign the result with a key of your own, and load that",
        )
