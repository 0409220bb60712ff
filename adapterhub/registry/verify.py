"""`ah.verify`: who signed an adapter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from adapterhub.errors import FileError
from adapterhub.files.native import adapter_folder, read_manifest, read_tensors
from adapterhub.files.signature import read_signatures
from adapterhub.registry.fetch import published_signatures
from adapterhub.registry.published_files import digest_of
from adapterhub.registry.reference import Reference
from adapterhub.registry.signers import CheckedSignature, SignedSubject, checked_signatures
from adapterhub.registry.stores import read_reference, store_of
from adapterhub.registry.trust import SigningRule, rule_of


@dataclass(frozen=True)
class Verification:
    """The signatures of an adapter whose files are intact.

    `digest` is the sha256 of its manifest; `rule` says which keys are trusted for it.
    """

    reference: str
    digest: str
    rule: SigningRule
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
    rule = rule_of(parsed)
    if parsed.kind == "folder":
        folder = adapter_folder(Path(parsed.name).expanduser())
        digest = digest_of(folder)
        read_tensors(folder, read_manifest(folder, digest))
        subject = SignedSubject(Reference("folder", str(folder)), digest)
        checked = checked_signatures(read_signatures(folder), subject, rule)
        return Verification(str(folder), digest, rule, tuple(checked))
    store = store_of(parsed, registry)
    entry = store.resolve(parsed.name, parsed.version, backbone=backbone)
    if not entry.fingerprint:
        raise FileError(f"{entry.reference} is another library's adapter, which cannot be signed")
    checked = published_signatures(parsed, store, entry, store.get(entry), rule)
    return Verification(entry.reference, entry.digest, rule, tuple(checked))
