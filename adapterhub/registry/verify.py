"""`ah.verify`: who signed an adapter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from adapterhub.config.user_folders import expanded
from adapterhub.errors import FileError
from adapterhub.files.native import adapter_folder, check_tensor_file, read_manifest
from adapterhub.files.signature import read_signatures
from adapterhub.registry.fetch import published_signatures
from adapterhub.registry.published_files import digest_of
from adapterhub.registry.reference import Reference
from adapterhub.registry.store import Entry
from adapterhub.registry.stores import read_reference, store_of
from adapterhub.registry.trust import (
    CheckedSignature,
    SignedSubject,
    checked_signatures,
    current_trust,
    signed_subject,
)


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
        digest = digest_of(folder)
        check_tensor_file(folder, read_manifest(folder, digest))
        checked = signatures_beside(parsed, folder)
        return Verification(str(folder), digest, tuple(checked))
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

    Args:
        reference: the adapter.
        folder: its files, whose manifest was verified.
        entry: its version; None for a folder.

    Raises:
        FileError: the signature file is broken.
        ConfigError: there are signatures, and cryptography is not installed.
    """
    if entry is None:
        subject = SignedSubject(Reference("folder", str(folder)), digest_of(folder))
    else:
        subject = signed_subject(reference, entry.digest, entry.name, entry.version)
    return checked_signatures(read_signatures(folder), subject, current_trust())
