"""The adapters that a run starts from, or trains on top of: found, verified, and recorded.

Those below are active below the new adapter, in line; or a method that is built from others, such
as adapterfusion, copies them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.load import bring_foundation
from adapterhub.adapters.start import start_from
from adapterhub.backbones.fingerprint import fingerprint
from adapterhub.files.native import Foundation
from adapterhub.methods.common.base import Method
from adapterhub.methods.common.spec import parse_methods, restore_methods
from adapterhub.recipe.recipe import Recipe
from adapterhub.registry.pull import foundation_of, pull_verified
from adapterhub.registry.reference import Reference
from adapterhub.registry.stores import read_reference, registry_at


@dataclass(frozen=True)
class StartingPoint:
    """A trained adapter whose files are here and verified: its name in a recipe, its methods."""

    reference: str
    found: Foundation
    methods: tuple[Method, ...]

    @property
    def digest(self) -> str:
        """The sha256 of its manifest, which has those of its tensors."""
        return self.found.ref.digest

    def give(self, adapter: Adapter) -> str:
        """Copy its tensors into a new adapter, and return a sentence about its head.

        Raises:
            MismatchError: it is for another backbone, or has another method, sizes or sites.
        """
        started = start_from(adapter, self.found.saved)
        text = f"starts from {self.reference}"
        if adapter.head is None:
            return text
        if started.taken:
            return f"{text}, with its head, since the labels are the same"
        return f"{text}, with a newly initialized head: {started.reason}"


def starting_point(recipe: Recipe) -> StartingPoint | None:
    """Find the adapter that a recipe starts from, download it if necessary, and verify it.

    Raises:
        ConfigError: no such reference.
        RegistryError: it cannot be resolved.
        FileError: its files are broken, or those of another library.
    """
    if recipe.from_ is None:
        return None
    found = _found(recipe.from_, recipe)
    manifest = found.saved.manifest
    methods = restore_methods(manifest.methods, f"the adapter {manifest.name!r}")
    return StartingPoint(recipe.from_, found, methods)


def _found(text: str, recipe: Recipe) -> Foundation:
    """Find and verify an adapter that a recipe names."""
    parsed = read_reference(text)
    fetched = pull_verified(parsed, backbone=_backbone_of(parsed, recipe))
    return foundation_of(fetched.reference or parsed, fetched.own())


def _backbone_of(reference: Reference, recipe: Recipe) -> str | None:
    """Return the fingerprint of the backbone where a name has adapters of several, else None."""
    if reference.kind != "local":
        return None
    versions = registry_at(None).versions(reference.name)
    if len({entry.fingerprint for entry in versions}) < 2:
        return None
    return fingerprint(recipe.backbone, revision=recipe.revision)


@dataclass(frozen=True)
class RunOrigins:
    """The trained adapters that a run starts from or trains on top of.

    Attributes:
        start: the one whose tensors the new one begins with.
        below: those below the new one.
        copied: those that its method is built from.
    """

    start: StartingPoint | None = None
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
        """Return what a manifest records of the adapters that were started from or copied."""
        on = [asdict(each.ref) for each in self.copied]
        return {**self._from(), **({"on": on} if on else {})}

    def identity(self) -> dict[str, Any]:
        """Return what a checkpoint records: a run on others is another run."""
        on = [each.ref.digest for each in (*self.below, *self.copied)]
        return {**self._from(), **({"on": on} if on else {})}

    def _from(self) -> dict[str, Any]:
        if self.start is None:
            return {}
        ref = self.start.found.ref
        return {"from": {"name": ref.name, "version": ref.version, "digest": ref.digest}}


def run_origins(recipe: Recipe) -> tuple[RunOrigins, tuple[Method, ...]]:
    """Find the adapters that a recipe starts from and trains on; return them with its methods.

    The methods are those of the adapter that it starts from where the recipe has none. One that is
    built from trained adapters gets those that the recipe trains on.

    Raises:
        ConfigError: no such reference.
        RegistryError: one cannot be resolved.
        FileError: the files of one are broken, or those of another library.
    """
    start = starting_point(recipe)
    if recipe.method is None and start is not None:
        methods = start.methods
    else:
        methods = parse_methods(recipe.method)  # type: ignore[arg-type]
    found = tuple(_found(text, recipe) for text in dict.fromkeys(recipe.on))
    sources = [str(each.saved.folder) for each in found]
    for number, method in enumerate(methods if found else ()):
        if (built := method.with_sources(sources)) is not None:
            methods = (*methods[:number], built, *methods[number + 1 :])
            return RunOrigins(start, copied=found), methods
    return RunOrigins(start, below=found), methods


def _named(foundations: Sequence[Foundation]) -> str:
    return ", ".join(f"{each.ref} (sha256 {each.ref.digest[:12]})" for each in foundations)
