"""`ah.pull`: fetch the verified files of an adapter."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from adapterhub.config.user_folders import expanded
from adapterhub.files.foundation import write_copies
from adapterhub.files.native import MANIFEST_FILE
from adapterhub.registry.fetch import Fetched, fetch, fetch_folder
from adapterhub.registry.foundations import Origins
from adapterhub.registry.other_formats import copy_foreign
from adapterhub.registry.published_files import copy_adapter, digest_of
from adapterhub.registry.reference import Reference
from adapterhub.registry.stores import read_reference, store_of


def pull(
    reference: str | Path,
    folder: str | Path | None = None,
    *,
    backbone: str | None = None,
    registry: str | Path | None = None,
    allow_pickle: bool = False,
    signed: bool = False,
) -> Path:
    """Return a folder with the verified files of an adapter, downloaded if necessary.

    A yanked version is returned with a warning that gives the reason.

    Args:
        reference: a folder, or an adapter in a registry or on a hub.
        folder: a new folder to copy the files to; by default the store's own copy is returned.
        backbone: a backbone's id or fingerprint, to choose between adapters of the same name.
        registry: the folder of the local registry, if not the default one.
        allow_pickle: accept another library's adapter as a pickle if it has no safetensors file.
        signed: require a signature by a trusted key, also where the configuration does not.

    Raises:
        ConfigError: not a reference.
        RegistryError: not found, or the store cannot be reached.
        FileError: the files differ from the published ones.
        SignatureError: a signature is required, and there is none by a trusted key.
        OutputError: `folder` exists or cannot be written.
    """
    options = {"backbone": backbone, "registry": registry, "allow_pickle": allow_pickle}
    target = None if folder is None else expanded(folder)
    return pull_verified(reference, target, signed=signed, **options).folder  # type: ignore[arg-type]


def pull_verified(
    reference: str | Path | Reference,
    folder: Path | None = None,
    *,
    backbone: str | None = None,
    registry: str | Path | None = None,
    allow_pickle: bool = False,
    signed: bool = False,
) -> Fetched:
    """Return what `pull` does, with the digest that was verified, to load exactly these bytes.

    Args:
        reference: see `pull`.
        folder: see `pull`.
        backbone: see `pull`.
        registry: see `pull`.
        allow_pickle: see `pull`.
        signed: see `pull`.
    """
    parsed = read_reference(reference, registry, signed=signed)
    if parsed.kind == "folder":
        asked, source = parsed, fetch_folder(expanded(parsed.name), signed=signed)
        found = source if folder is None else _copied(source, folder, allow_pickle)
    else:
        store = store_of(parsed, registry, allow_pickle=allow_pickle)
        entry = store.resolve(parsed.name, parsed.version, backbone=backbone)
        found = source = fetch(parsed, store, entry, folder, signed=signed)
        asked = replace(parsed, version=entry.version)  # also where it was named by a tag
    if not (found.folder / MANIFEST_FILE).is_file():
        return found  # another library's
    try:
        on = Origins(asked, registry).bring(source.folder, source.digest)
        if folder is not None:
            write_copies(folder, on)
    except BaseException:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)  # it is new
        raise
    return replace(found, reference=asked, on=on)


def _copied(fetched: Fetched, folder: Path, allow_pickle: bool) -> Fetched:
    """Copy the adapter of a folder to a new one, as `Store.get` does."""
    if not (fetched.folder / MANIFEST_FILE).is_file():
        return Fetched(copy_foreign(fetched.folder, folder, allow_pickle=allow_pickle))
    digest = fetched.digest or digest_of(fetched.folder)
    return Fetched(copy_adapter(fetched.folder, folder, digest), digest, fetched.signers)
