"""`ah.pull`: fetch the verified files of an adapter."""

from __future__ import annotations

from pathlib import Path

from adapterhub.errors import one_line, warn_user
from adapterhub.files.native import MANIFEST_FILE, adapter_folder
from adapterhub.registry.other_formats import CONFIG_FILE
from adapterhub.registry.reference import read_reference
from adapterhub.registry.store import Entry
from adapterhub.registry.stores import store_of


def pull(
    reference: str | Path,
    folder: str | Path | None = None,
    *,
    backbone: str | None = None,
    registry: str | Path | None = None,
    allow_pickle: bool = False,
) -> Path:
    """Return a folder with the verified files of an adapter, downloaded if necessary.

    A yanked version is returned with a warning that gives the reason.

    Args:
        reference: a folder, or an adapter in a registry or on a hub.
        folder: a new folder to copy the files to; by default the store's own copy is returned.
        backbone: a backbone's id or fingerprint, to choose between adapters of the same name.
        registry: the folder of the local registry, if not the default one.
        allow_pickle: accept another library's adapter as a pickle if it has no safetensors file.

    Raises:
        ConfigError: not a reference.
        RegistryError: not found, or the store cannot be reached.
        FileError: the files differ from the published ones.
        OutputError: `folder` exists or cannot be written.
    """
    parsed = read_reference(reference)
    if parsed.kind == "folder":
        path = Path(parsed.name).expanduser()
        foreign = (path / CONFIG_FILE).is_file() and not (path / MANIFEST_FILE).is_file()
        return path if foreign else adapter_folder(path)
    store = store_of(parsed, registry, allow_pickle=allow_pickle)
    entry = store.resolve(parsed.name, parsed.version, backbone=backbone)
    warn_if_yanked(entry)
    return store.get(entry, None if folder is None else Path(folder).expanduser())


def warn_if_yanked(entry: Entry) -> None:
    """Warn that a version was yanked, with the reason; the warning points at the verb's caller."""
    if entry.yanked is not None:
        warn_user(f"{entry.reference} was yanked: {one_line(entry.yanked)}", stacklevel=3)
