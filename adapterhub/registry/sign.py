"""`ah.sign` and `ah.verify`: sign an adapter, and check its signatures.

An adapter is signed in a folder, in a local registry, or on publication.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from adapterhub.errors import ConfigError, FileError
from adapterhub.files.atomic import explained, replace_file
from adapterhub.files.native import SIGNATURE_FILE, Saved
from adapterhub.files.signature import (
    PrivateKey,
    Signature,
    Statement,
    read_private_key,
    sign_statement,
)
from adapterhub.registry.local import store_of
from adapterhub.registry.pull import published_signatures, read_reference
from adapterhub.registry.store import Entry, Reference, version_number
from adapterhub.registry.trust import (
    CheckedSignature,
    SignedSubject,
    checked_signatures,
    current_trust,
    signed_subject,
)
from adapterhub.registry.version_files import (
    merged_signatures,
    name_to_publish,
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
        name: for a folder, the name to sign, if not the adapter's own.
        version: for a folder, the version to sign, such as `v3`; any if None.
        backbone: a backbone's id or fingerprint, to choose between adapters of the same name.
        registry: the folder of the local registry, if not the default one.

    Returns:
        The signature, which is also written next to the manifest.

    Raises:
        ConfigError: the reference is on a hub, or has its own name and version.
        FileError: the adapter is damaged, or the key cannot be read.
        RegistryError: no such adapter.
        OutputError: the signature cannot be written.
    """
    parsed = read_reference(reference, registry)
    if parsed.kind == "folder":
        return _sign_folder(Saved.of(parsed.name).check(), read_private_key(key), name, version)
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
    signature = sign_statement(
        Statement(entry.digest, entry.name, entry.version), read_private_key(key)
    )
    store.add_signatures(entry, [signature])
    return signature


def _sign_folder(saved: Saved, key: PrivateKey, name: str | None, version: str | None) -> Signature:
    if version is not None and version_number(version) is None:
        raise ConfigError(f"invalid version {version!r}", expected="v1, v2, ...")
    number = version and f"v{version_number(version)}"
    called = name or name_to_publish(saved)
    signature = sign_statement(Statement(saved.digest, called, number), key)
    with explained(saved.folder):
        data = merged_signatures(saved.signatures(), [signature], saved.digest)
        replace_file(saved.folder / SIGNATURE_FILE, data)
    return signature


@dataclass(frozen=True)
class Verification:
    """The signatures of an adapter whose files are intact.

    Attributes:
        reference: the adapter.
        digest: the sha256 of its manifest.
        signatures: the signatures, each compared with the digest.
    """

    reference: str
    digest: str
    signatures: tuple[CheckedSignature, ...]

    @property
    def is_trusted(self) -> bool:
        """Whether the adapter is signed by a trusted key."""
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
        saved = Saved.of(parsed.name).check()
        checked = signatures_beside(parsed, saved)
        return Verification(str(saved.folder), saved.digest, tuple(checked))
    store = store_of(parsed, registry)
    entry = store.resolve(parsed.name, parsed.version, backbone=backbone)
    if not entry.fingerprint:
        raise FileError(f"{entry.reference} is another library's adapter, which cannot be signed")
    checked = published_signatures(parsed, store, entry, store.get(entry), current_trust())
    return Verification(entry.reference, entry.digest, tuple(checked))


def signatures_beside(
    reference: Reference, saved: Saved, entry: Entry | None = None
) -> list[CheckedSignature]:
    """Check the signatures in the folder of an adapter; its store is not searched for later ones.

    Without an entry, only the digest is compared.

    Raises:
        FileError: the signature file is broken.
        ConfigError: the adapter has signatures, and cryptography is not installed.
    """
    if entry is None:
        subject = SignedSubject(Reference("folder", str(saved.folder)), saved.digest)
    else:
        subject = signed_subject(reference, entry.digest, entry.name, entry.version)
    return checked_signatures(saved.signatures(), subject, current_trust())
