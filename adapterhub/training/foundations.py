"""The adapters that a run trains on top of: found, verified, and recorded in what it saves.

They are active below the new adapter, in line; or a method that is built from others, such as
adapterfusion, copies them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel

from adapterhub.adapters.load import bring_foundation
from adapterhub.files.foundation import Foundation
from adapterhub.methods._base import Method
from adapterhub.training.recipe import Recipe
from adapterhub.training.starting_point import find_adapter_of


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

    Args:
        recipe: the recipe.
        methods: its methods.

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
