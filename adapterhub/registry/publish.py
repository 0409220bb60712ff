"""`ah.publish`: add an adapter to a local registry."""

from __future__ import annotations

from pathlib import Path

from adapterhub.config.user_folders import expanded
from adapterhub.files.native import adapter_folder, read_manifest
from adapterhub.files.signature import PrivateKey
from adapterhub.registry.publication import PublicationInfo, prepared_folder, published_foundations
from adapterhub.registry.published_files import name_to_publish
from adapterhub.registry.reference import Reference
from adapterhub.registry.sign import put_signed
from adapterhub.registry.store import Entry, Publication
from adapterhub.registry.stores import registry_at


def publish(
    folder: str | Path,
    name: str | None = None,
    *,
    version: str | None = None,
    tags: tuple[str, ...] = (),
    registry: str | Path | None = None,
    listing: PublicationInfo | None = None,
    sign: str | Path | PrivateKey | None = None,
    allow_findings: tuple[str, ...] = (),
) -> Entry:
    """Publish the adapter in a folder to a local registry.

    Publishing the same bytes again returns the existing version.

    Args:
        folder: the adapter's folder, or the folder of its training run.
        name: the name to publish it under, if not its own; that of an adapter which was given none
            is the name of its run's folder.
        version: the version, such as `v2`; the next one if None.
        tags: movable names for this version.
        registry: the folder of the registry, if not the default one.
        listing: description, licence, languages and topics; they become part of the manifest, and
            so of the version.
        sign: the file of a private key, or the key: sign the version.
        allow_findings: codes, from the error, of texts that look private and are not.

    Raises:
        FileError: the folder holds no valid adapter, or its files contain private information.
        ConfigError: the name, version or a tag is invalid.
        OutputError: `listing` is invalid, or the registry cannot be written.
        SignatureError: without `sign`, and the folder's signature is not for what is published.
        RegistryError: the version is taken by other bytes, or an adapter that this one was trained
            on is not in the registry.
    """
    source = adapter_folder(expanded(folder))
    manifest, store = read_manifest(source), registry_at(registry)
    name = name or name_to_publish(source, manifest)
    on = published_foundations(source, manifest, store, Reference("local", name))
    publication = Publication(name, version, tuple(tags), allowed=tuple(allow_findings))
    with prepared_folder(source, listing or PublicationInfo(), name, on=on) as prepared:
        return put_signed(store, prepared, publication, source, sign)
