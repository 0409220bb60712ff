"""The adapters that a run starts from, or trains on top of: found, verified, and recorded.

Those below are active below the new adapter, in line; or a method that is built from others, such
as adapterfusion, copies them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.load import bring_foundation
from adapterhub.adapters.start import start_from
from adapterhub.backbones.fingerprint import fingerprint
from adapterhub.files.foundation import Foundation
from adapterhub.files.manifest import Manifest
from adapterhub.files.native import read_manifest
from adapterhub.methods._base import Method
from adapterhub.methods._spec import restore_methods
from adapterhub.recipe.recipe import Recipe
from adapterhub.registry.published_files import digest_of
from adapterhub.registry.pull import foundation_of, pull_verified
from adapterhub.registry.reference import Reference
from adapterhub.registry.stores import read_reference, registry_at


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

    Raises:
        ConfigError: no such reference.
        RegistryError: it cannot be resolved.
        FileError: its files are broken, or those of another library.
    """
    if recipe.from_ is None:
        return None
    found = find_adapter_of(recipe.from_, recipe)
    methods = restore_methods(found.manifest.methods, f"the adapter {found.manifest.name!r}")
    ref = found.foundation.ref
    origin = Origin(ref.name, ref.version, ref.digest)
    return StartingPoint(recipe.from_, found.foundation.folder, methods, origin)


@dataclass(frozen=True)
class FoundAdapter:
    """A trained adapter whose files are here and verified, and its manifest."""

    foundation: Foundation
    manifest: Manifest


def find_adapter_of(text: str, recipe: Recipe) -> FoundAdapter:
    """Find an adapter that a recipe names, download it if necessary, and verify it.

    Raises:
        ConfigError: no such reference.
        RegistryError: it cannot be resolved.
        FileError: its files are broken, or those of another library.
    """
    parsed = read_reference(text)
    backbone = _backbone_of(parsed, recipe)
    fetched = pull_verified(parsed, backbone=backbone)
    digest = fetched.digest or digest_of(fetched.folder)
    manifest = read_manifest(fetched.folder, digest)
    reference = fetched.reference or parsed
    return FoundAdapter(foundation_of(reference, fetched.folder, digest, fetched.on), manifest)


def _backbone_of(reference: Reference, recipe: Recipe) -> str | None:
    """Return the fingerprint of the backbone where a name has adapters of several, else None."""
    if reference.kind != "local":
        return None
    versions = registry_at(None).versions(reference.name)
    if len({entry.fingerprint for entry in versions}) < 2:
        return None
    return fingerprint(recipe.backbone, revision=recipe.revision)


@dataclass(frozen=True)
class RunFoundations:
    """What a run trains on top of.

    Attributes:
        below: the adapters below the new one.
        copied: those that its method is built from.
    """

    below: tuple[Foundation, ...] = ()
    copied: tuple[Foundation, ...] = ()

    def attach(self, model: PreTrainedModel) -> list[str]:
        """Attach the adapters below, frozen, and return their names on the model.

        Raises:
            MismatchError: one is for another backbone, or cannot be below others.
        """
        return [bring_foundation(model, each).name for each in self.below]

    def notes(self) -> Iterator[str]:
        """Yield what the user should read before the run starts."""
        if self.below:
            yield f"trains on top of {_named(self.below)}, frozen"
        if self.copied:
            yield f"built from copies of {_named(self.copied)}"

    def record(self) -> dict[str, Any]:
        """Return what a manifest records of the adapters that were copied."""
        return {"on": [asdict(each.ref) for each in self.copied]} if self.copied else {}

    def identity(self) -> dict[str, Any]:
        """Return what a checkpoint records: a run on others is another run."""
        digests = [each.ref.digest for each in (*self.below, *self.copied)]
        return {"on": digests} if digests else {}


def run_foundations(
    recipe: Recipe, methods: Sequence[Method]
) -> tuple[RunFoundations, tuple[Method, ...]]:
    """Find the adapters that a recipe trains on, and give them to a method built from others.

    Raises:
        ConfigError: no such reference.
        RegistryError: one cannot be resolved.
        FileError: the files of one are broken, or those of another library.
    """
    found = tuple(find_adapter_of(text, recipe).foundation for text in dict.fromkeys(recipe.on))
    if not found:
        return RunFoundations(), tuple(methods)
    sources = [str(each.folder) for each in found]
    for number, method in enumerate(methods):
        if (built := method.with_sources(sources)) is not None:
            changed = (*methods[:number], built, *methods[number + 1 :])
            return RunFoundations(copied=found), changed
    return RunFoundations(below=found), tuple(methods)


def _named(foundations: Sequence[Foundation]) -> str:
    return ", ".join(f"{each.ref} (sha256 {each.ref.digest[:12]})" for each in foundations)
