"""`ah.sign` and `ah.verify`: sign an adapter, and check who signed one.

A signature is made of an adapter in a folder, in a local registry, or on publication.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from adapterhub.config.user_folders import expanded
from adapterhub.errors import ConfigError, FileError, SignatureError
from adapterhub.files.atomic import explained, replace_file
from adapterhub.files.native import (
    PEFT_FILES,
    SIGNATURE_FILE,
    Saved,
    adapter_folder,
)
from adapterhub.files.signature import (
    PrivateKey,
    Signature,
    Statement,
    read_private_key,
    read_signatures,
    sign_statement,
    signatures_to_json,
)
from adapterhub.registry.published_files import (
    BESIDE,
    BESIDE_FILE,
    BESIDE_SIGNATURE,
    PUBLISHED,
    beside_bytes,
    files_beside,
    merged_signatures,
    name_to_publish,
)
from adapterhub.registry.pull import published_signatures
from adapterhub.registry.reference import Reference
from adapterhub.registry.store import Entry, Publication, Store, version_number
from adapterhub.registry.stores import read_reference, store_of
from adapterhub.registry.trust import (
    CheckedSignature,
    SignedSubject,
    checked_signatures,
    current_trust,
    same_name,
    signed_subject,
)


def sign(
    reference: str | Path,
    key: str | Path | PrivateKey,
    *,
    name: str | None = None,
    version: str | None = None,
    backbone: str | None = None,
    registry: str | Path | None = None,
) -> Signature:
    """Sign the adapter in a folder, or a version in a local registry.

    Args:
        reference: the folder of an adapter or a run, or a name in a local registry.
        key: the file of the private key, or the key.
        name: for a folder, the name that the adapter is called by, if not its own.
        version: for a folder, the version that it is called, such as `v3`; any if None.
        backbone: a backbone's id or fingerprint, to choose between adapters of the same name.
        registry: the folder of the local registry, if not the default one.

    Returns:
        The signature, which is also written beside the manifest.

    Raises:
        ConfigError: the reference is on a hub, or has its own name and version.
        FileError: the adapter is damaged, or the key cannot be read.
        RegistryError: no such adapter.
        OutputError: the signature cannot be written.
    """
    parsed = read_reference(reference, registry)
    if parsed.kind == "folder":
        folder = adapter_folder(expanded(parsed.name))
        return _sign_folder(folder, _private(key), name, version)
    if parsed.kind != "local":
        raise ConfigError(
            f"{reference} is on a hub: sign the files that you have, not those a hub gives",
            hint=f"adapterhub push FOLDER {replace(parsed, version=None)} --sign KEY",
        )
    if name or version:
        raise ConfigError(f"{reference} has its own name and version", expected="a folder")
    store = store_of(parsed, registry)
    entry = store.resolve(parsed.name, parsed.version, backbone=backbone)
    store.get(entry)
    signature = sign_statement(Statement(entry.digest, entry.name, entry.version), _private(key))
    store.add_signatures(entry, [signature])
    return signature


def put_signed(
    store: Store,
    folder: Path,
    publication: Publication,
    source: Path,
    key: str | Path | PrivateKey | None,
) -> Entry:
    """Publish a folder with the signatures that its source has, and with a new one.

    `source` is the folder that it was made from. Without a key, no signature is added.

    Raises:
        SignatureError: without a key, and a signature in `source` is not for what is published.
        RegistryError: the version is taken by other bytes, or the store denies write access.
        FileError: the folder holds no valid adapter, or the key cannot be read.
    """
    private = None if key is None else _private(key)
    digest, found = Saved.at(folder).digest, read_signatures(source)
    carried = [s for s in found if _is_about(s.statement, digest, publication.name)]
    if private is None and len(carried) < len(found):
        raise SignatureError(
            f"{source / SIGNATURE_FILE} is not for what is published as {publication.name}",
            offenders=[f"it is for {s.statement.name}" for s in found if s not in carried],
            hint=f"--sign KEY to sign it anew, or delete {SIGNATURE_FILE}",
        )
    if private is None and not carried:
        return store.put(folder, publication)
    stated = (s.statement.version for s in carried if s.statement.version)
    publication = replace(publication, version=publication.version or next(stated, None))
    version, is_published = store.version_for(folder, publication)
    if private is not None:
        carried.append(sign_statement(Statement(digest, publication.name, version), private))
    publication = replace(publication, version=version)
    entry = _put_with(store, folder, publication, carried, private)
    if is_published:
        store.add_signatures(entry, carried)
    return entry


def _sign_folder(folder: Path, key: PrivateKey, name: str | None, version: str | None) -> Signature:
    if version is not None and version_number(version) is None:
        raise ConfigError(f"invalid version {version!r}", expected="v1, v2, ...")
    number = version and f"v{version_number(version)}"
    saved = Saved.at(folder).check()
    called = name or name_to_publish(saved)
    signature = sign_statement(Statement(saved.digest, called, number), key)
    with explained(folder):
        data = merged_signatures(read_signatures(folder), [signature], saved.digest)
        replace_file(folder / SIGNATURE_FILE, data)
    return signature


def _private(key: str | Path | PrivateKey) -> PrivateKey:
    return key if isinstance(key, PrivateKey) else read_private_key(key)


def _is_about(statement: Statement, digest: str, name: str) -> bool:
    return statement.digest == digest and same_name(statement.name, name)


def _put_with(
    store: Store,
    folder: Path,
    publication: Publication,
    signatures: Sequence[Signature],
    key: PrivateKey | None,
) -> Entry:
    """Publish a folder with exactly these signatures; a key signs peft's files in it, too."""
    with tempfile.TemporaryDirectory() as path:
        copy = Path(path)
        for name in (*PUBLISHED, *BESIDE):
            if name != SIGNATURE_FILE and (folder / name).is_file():
                _link(folder / name, copy / name)
        (copy / SIGNATURE_FILE).write_bytes(signatures_to_json(signatures))
        beside = {file: data for file, data in files_beside(copy).items() if file in PEFT_FILES}
        if key is not None and beside:
            for file in (BESIDE_FILE, BESIDE_SIGNATURE):  # those of an earlier publication
                (copy / file).unlink(missing_ok=True)
            data = beside_bytes(Saved.at(copy).digest, beside)
            called = Statement(
                hashlib.sha256(data).hexdigest(), publication.name, publication.version
            )
            (copy / BESIDE_FILE).write_bytes(data)
            signature = signatures_to_json([sign_statement(called, key)])
            (copy / BESIDE_SIGNATURE).write_bytes(signature)
        return store.put(copy, publication)


def _link(source: Path, target: Path) -> None:
    """Link a file, which may be large, or copy it to another disk."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


@dataclass(frozen=True)
class Verification:
    """The signatures of an adapter whose files are intact.

    Attributes:
        reference: the adapter.
        digest: the sha256 of its manifest.
        signatures: the signatures, each compared with it.
    """

    reference: str
    digest: str
    signatures: tuple[CheckedSignature, ...]

    @property
    def is_trusted(self) -> bool:
        """Whether a trusted key signed it."""
        return any(checked.is_valid and checked.is_trusted for checked in self.signatures)


def verify(
    reference: str | Path,
    *,
    backbone: str | None = None,
    registry: str | Path | None = None,
) -> Verification:
    """Verify the files of an adapter, and check its signatures without requiring any.

    Args:
        reference: a folder, or an adapter in a registry or on a hub.
        backbone: a backbone's id or fingerprint, to choose between adapters of the same name.
        registry: the folder of the local registry, if not the default one.

    Raises:
        FileError: the files are damaged, or of another library.
        RegistryError: not found, or the store cannot be reached.
    """
    parsed = read_reference(reference, registry)
    if parsed.kind == "folder":
        folder = adapter_folder(expanded(parsed.name))
        saved = Saved.at(folder).check()
        checked = signatures_beside(parsed, folder)
        return Verification(str(folder), saved.digest, tuple(checked))
    store = store_of(parsed, registry)
    entry = store.resolve(parsed.name, parsed.version, backbone=backbone)
    if not entry.fingerprint:
        raise FileError(f"{entry.reference} is another library's adapter, which cannot be signed")
    checked = published_signatures(parsed, store, entry, store.get(entry), current_trust())
    return Verification(entry.reference, entry.digest, tuple(checked))


def signatures_beside(
    reference: Reference, folder: Path, entry: Entry | None = None
) -> list[CheckedSignature]:
    """Check the signatures in the folder of an adapter; its store is not asked for later ones.

    Without an entry, the folder is compared by its digest only.

    Raises:
        FileError: the signature file is broken.
        ConfigError: there are signatures, and cryptography is not installed.
    """
    if entry is None:
        subject = SignedSubject(Reference("folder", str(folder)), Saved.at(folder).digest)
    else:
        subject = signed_subject(reference, entry.digest, entry.name, entry.version)
    return checked_signatures(read_signatures(folder), subject, current_trust())
