"""`ah.load`: fetch an adapter by its reference and attach it to a model."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.attachable import require_model
from adapterhub.adapters.compatibility import backbone_differences
from adapterhub.adapters.load import load_folder
from adapterhub.adapters.state import find_state, new_state
from adapterhub.errors import FileError, RegistryError
from adapterhub.files.native import Foundation, Saved
from adapterhub.registry.pull import Fetched, foundation_of, pull_verified
from adapterhub.registry.reference import Reference
from adapterhub.registry.registry import Registry
from adapterhub.registry.store import Entry, version_number
from adapterhub.registry.stores import read_reference, registry_at


def load(
    model: nn.Module,
    reference: str | Path,
    *,
    name: str | None = None,
    any_backbone: bool = False,
    registry: str | Path | None = None,
    allow_pickle: bool = False,
    signed: bool = False,
    frozen: bool = False,
    **options: Any,
) -> Adapter:
    """Attach a saved adapter to a model, with its head and labels, and activate it.

    The adapters that it was trained on are brought along: they are attached frozen, below it.

    If a name in the local registry exists for several backbones, the adapter for this model is
    loaded.

    Args:
        model: the backbone.
        reference: a folder, or an adapter in a registry: `"./out/polite"`, `"polite@v2"`,
            `"hf:someone/polite"`.
        name: the name to attach it under, if not the saved one; that of an adapter which was
            trained without a name is the one it was published by.
        any_backbone: skip the fingerprint check. The adapter was trained on other weights, and its
            outputs on these are not guaranteed.
        registry: the folder of the local registry, if not the default one.
        allow_pickle: accept another library's adapter as a pickle if it has no safetensors file;
            its code is not run.
        signed: require a signature by a trusted key, also where the configuration does not.
        frozen: load it without its head and frozen, for `attach(model, method, on=[NAME])`.
        options: `tokenizer`, unless `load_backbone` loaded it with the model; `any_tokenizer=True`
            skips its check; `head=False` leaves the model's own head, `head="rte"` loads this one
            of several.

    Raises:
        ConfigError: not a reference, or several heads and none is named.
        RegistryError: not found, or not for this backbone.
        FileError: the files are broken.
        SignatureError: a signature is required, and there is none by a trusted key.
        MismatchError: the files are valid but for another backbone; every tensor that does not fit
            is listed.
        AttachError: the name is already used on this model, or it is not one of transformers.
    """
    require_model(model)
    parsed = read_reference(reference, registry, signed=signed)
    in_registry = parsed.kind == "local" and not any_backbone
    chosen = _backbone_of(model, parsed, registry) if in_registry else None
    store = {"backbone": chosen, "registry": registry, "allow_pickle": allow_pickle}
    fetched = pull_verified(parsed, signed=signed, **store)  # type: ignore[arg-type]
    name = name or _published_name(parsed, fetched.saved)
    options |= {"any_backbone": any_backbone, "allow_pickle": allow_pickle}
    options["foundation"] = _foundation(fetched) if frozen else None
    return load_folder(model, fetched.source, name=name, **options)


def _foundation(fetched: Fetched) -> Foundation:
    """Return a pulled adapter as one that others can be on.

    Raises:
        FileError: it is another library's.
    """
    if fetched.reference is None or fetched.saved is None:
        raise FileError(
            f"{fetched.folder} is another library's adapter, which has no digest",
            hint=f"adapterhub import {fetched.folder} --output DIR, and load that",
        )
    return foundation_of(fetched.reference, fetched.saved)


def _published_name(reference: Reference, saved: Saved | None) -> str | None:
    """Return the name that an adapter which was trained without one was published by, or None."""
    if reference.kind == "folder" or saved is None or not saved.manifest.is_unnamed:
        return None
    return reference.name.rpartition("/")[2]


def _backbone_of(model: nn.Module, reference: Reference, registry: str | Path | None) -> str | None:
    """Return the fingerprint under which a name in a registry has an adapter for a model.

    None if the name has one fingerprint only: the error of `load_folder` then says in what the
    backbone differs.
    """
    store = registry_at(registry)
    fingerprints = {entry.fingerprint for entry in store.versions(reference.name)}
    if len(fingerprints) == 1:
        return None
    state = find_state(model) or new_state(model)
    for entry in _newest_first(store, reference, fingerprints):
        if not backbone_differences(Saved.at(store.get(entry)).manifest, state):
            return entry.fingerprint
    return state.fingerprint()


def _newest_first(
    store: Registry, reference: Reference, fingerprints: Iterable[str]
) -> list[Entry]:
    """List what a reference means for each fingerprint; a backbone may have two over time."""
    entries = []
    for fingerprint in fingerprints:
        with suppress(RegistryError):  # this version is of another backbone
            entry = store.resolve(reference.name, reference.version, backbone=fingerprint)
            entries.append(entry)
    return sorted(entries, key=lambda entry: version_number(entry.version) or 0, reverse=True)
