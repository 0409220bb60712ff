"""The modules of a backbone without those of adapters: as many, however many are attached."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

CHILD = "adapterhub"  # the name of the one child module that a host has while adapters are attached


def own_modules(model: nn.Module, *, every_use: bool = False) -> list[tuple[str, nn.Module]]:
    """List the modules of a model with their paths, as `named_modules` does, without slots.

    `every_use` lists a module that has several paths under each of them.
    """
    found: list[tuple[str, nn.Module]] = []
    _collect(model, "", every_use, set(), found)
    return found


def slots_in(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the slots of a model, without the modules that they hold."""
    for _, module in own_modules(model):
        if (slot := module._modules.get(CHILD)) is not None:
            yield slot


def _collect(
    module: nn.Module,
    path: str,
    every_use: bool,
    seen: set[int],
    found: list[tuple[str, nn.Module]],
) -> None:
    """Append a module and those below it, each before its children."""
    if not every_use and id(module) in seen:
        return
    seen.add(id(module))
    found.append((path, module))
    for name, child in module._modules.items():
        if child is not None and name != CHILD:
            _collect(child, f"{path}.{name}" if path else name, every_use, seen, found)
