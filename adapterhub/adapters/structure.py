"""The structure of a model: modules, hooks, attributes and what trains, to be restored on an error.

Tensors are not part of it: activations exchange them, and undo it on their own. Nor are the modules
that slots hold, which no change touches. Other threads may compute meanwhile, so that only what
differs is touched.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from adapterhub.anatomy.own_modules import own_modules, slots_in

_OWN = frozenset(["_parameters", "_buffers", "training"])
_ABSENT = object()


class ModelStructure:
    """The attributes of a model's modules and of further objects, and what their containers hold.

    Args:
        model: the model.
        others: further objects.
        parameters: those whose `requires_grad` belongs to the structure.
    """

    def __init__(
        self,
        model: nn.Module,
        others: Iterable[object],
        parameters: Iterable[nn.Parameter],
    ) -> None:
        modules = (module for _, module in own_modules(model))
        slots = list(slots_in(model))
        objects = (*modules, *slots, *(slot.patch for slot in slots), *others)
        attributes = [(each, vars(each).copy()) for each in objects]  # a pass may add some
        self.objects = [(each, names, _contents(names)) for each, names in attributes]
        self.flags = [(parameter, parameter.requires_grad) for parameter in parameters]

    def restore(self) -> None:
        """Make everything as it was."""
        for each, attributes, contents in self.objects:
            for name in vars(each).keys() - attributes.keys() - _OWN:
                del vars(each)[name]
            for name in attributes.keys() - _OWN:
                value = attributes[name]
                if vars(each).get(name, _ABSENT) is not value:
                    vars(each)[name] = value
                if isinstance(value, dict | list | set):
                    _refill(value, contents.get(name, ()))
        for parameter, flag in self.flags:
            if parameter.requires_grad is not flag:
                parameter.requires_grad_(flag)


def _contents(attributes: dict[str, Any]) -> dict[str, Any]:
    """Map the names of containers to copies of them; most are empty, and have none."""
    return {
        name: value.copy()
        for name, value in attributes.items()
        if isinstance(value, dict | list | set) and value and name not in _OWN
    }


def _refill(container: Any, content: Any) -> None:
    """Give a container its content back, unless it has it; the object stays the same."""
    if not content:
        if container:
            container.clear()
    elif isinstance(container, set):
        container.intersection_update(content)
        container.update(content)
    elif isinstance(container, list):
        if not _same(container, content):
            container[:] = content
    elif not (_same(container, content) and _same(container.values(), content.values())):
        container.clear()
        container.update(content)


def _same(some: Iterable[Any], others: Iterable[Any]) -> bool:
    """Return whether two containers have the same objects in the same order."""
    return list(map(id, some)) == list(map(id, others))
