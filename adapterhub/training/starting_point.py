"""The adapter that a run starts from: found, verified, and recorded in what it becomes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.start import start_from
from adapterhub.backbones.fingerprint import fingerprint
from adapterhub.files.native import read_manifest
from adapterhub.methods._base import Method
from adapterhub.methods._spec import restore_methods
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.published_files import digest_of
from adapterhub.registry.pull import pull_verified
from adapterhub.registry.reference import Reference
from adapterhub.registry.stores import read_reference, store_of
from adapterhub.training.recipe import Recipe


@dataclass(frozen=True)
class Origin:
    """What a manifest records of the adapter that a run started from.

    Attributes:
        name: the adapter's name.
        version: its version or tag, as it was asked for; None for a folder.
        digest: the sha256 of its manifest, which has those of its tensors.
    """

    name: str
    version: str | None
    digest: str

    def record(self) -> dict[str, Any]:
        """Return the fields, for the manifest."""
        return asdict(self)


@dataclass(frozen=True)
class StartingPoint:
    """A trained adapter whose files are here and verified.

    Attributes:
        reference: how the recipe names it.
        folder: its files.
        methods: its methods.
        origin: what is recorded of it.
    """

    reference: str
    folder: Path
    methods: tuple[Method, ...]
    origin: Origin

    def give(self, adapter: Adapter) -> str:
        """Copy its tensors into a new adapter, and return a sentence about its head.

        Raises:
            MismatchError: it is for another backbone, or has another method, sizes or sites.
        """
        found = start_from(adapter, self.folder, sha256=self.origin.digest)
        text = f"starts from {self.reference}"
        if adapter.head is None:
            return text
        if found.taken:
            return f"{text}, with its head, since the labels are the same"
        return f"{text}, with a newly initialized head: {found.reason}"


def starting_point(recipe: Recipe) -> StartingPoint | None:
    """Find the adapter that a recipe starts from, download it if necessary, and verify it.

    Args:
        recipe: the recipe; None is returned if it starts from none.

    Raises:
        ConfigError: no such reference.
        RegistryError: it cannot be resolved.
        FileError: its files are broken, or those of another library.
    """
    if recipe.from_ is None:
        return None
    parsed, backbone = read_reference(recipe.from_), None
    if parsed.kind != "folder":
        backbone = _backbone_of(parsed, recipe)
        store = store_of(parsed, None, allow_pickle=False)
        found = store.resolve(parsed.name, parsed.version, backbone=backbone)
        parsed = replace(parsed, version=found.version)  # also where it was named by a tag
    fetched = pull_verified(parsed, backbone=backbone)
    digest = fetched.digest or digest_of(fetched.folder)
    manifest = read_manifest(fetched.folder, digest)
    methods = restore_methods(manifest.methods, f"the adapter {manifest.name!r}")
    name = manifest.name if parsed.kind == "folder" else parsed.name
    origin = Origin(name, parsed.version, digest)
    return StartingPoint(recipe.from_, fetched.folder, methods, origin)


def _backbone_of(reference: Reference, recipe: Recipe) -> str | None:
    """Return the fingerprint of the backbone where a name has adapters of several, else None."""
    if reference.kind != "local":
        return None
    versions = LocalRegistry().versions(reference.name)
    if len({entry.fingerprint for entry in versions}) < 2:
        return None
    return fingerprint(recipe.backbone, revision=recipe.revision)
