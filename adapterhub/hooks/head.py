"""Modules of the model of which each adapter has its own, for one batch: task heads.

Where one adapter is active its head stands in the model in the place of the model's own. Where
several are, by row or averaged, the model's own stays, and a hook on it hands its input to the head
of each row. Rows of shorter outputs are filled up with -inf: a class that a row's head does not
have has the probability 0.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.sites import CHILD
from adapterhub.hooks.composition import BatchPlan, through
from adapterhub.hooks.precision import hold_in_fp32
from adapterhub.hooks.slot import Slot, drop_slot


class VariantSlot(Slot):
    """Sits at a module: the modules that are called in its place, each on its own rows."""

    def __init__(self, path: str, variants: Mapping[str, nn.Module], plan: BatchPlan) -> None:
        super().__init__()
        self.path = path
        self.active = tuple(f"{number}-variant" for number in range(len(variants)))
        self.keys = dict(zip(variants, self.active, strict=True))
        for name, module in variants.items():
            self.add_module(self.keys[name], module)
        self.plan = plan

    def where(self) -> str:
        """The module, for messages."""
        return self.path

    def forward(self, inputs: tuple[Any, ...], options: dict[str, Any], y: Tensor) -> Tensor:
        """y: (batch, ..., classes), of the model's own module -> (batch, ..., most classes)."""
        assert self.plan is not None
        copies = self.plan.copies(len(y), self.path) if len(self.plan.nodes) > 1 else 1
        each = [self._split(value, copies) for value in (y, *inputs, *options.values())]
        done = [
            self._call(node, *(values[group] for values in each), names=tuple(options))
            for group, node in enumerate(self.plan.nodes)
        ]
        most = max(piece.shape[-1] for piece in done)
        padded = [F.pad(p, (0, most - p.shape[-1]), value=-float("inf")) for p in done]
        return self.plan.join(padded, copies) if len(padded) > 1 else padded[0]

    def _split(self, value: Any, copies: int) -> Any:
        assert self.plan is not None
        return self.plan.split(value, copies) if len(self.plan.nodes) > 1 else [value]

    def _call(self, node: Any, y: Tensor, *values: Any, names: tuple[str, ...]) -> Tensor:
        count = len(values) - len(names)
        options = dict(zip(names, values[count:], strict=True))

        def instead(name: str, y: Tensor) -> Tensor:
            module = self.placed(self.keys[name]) if name in self.keys else None
            return y if module is None else module(*values[:count], **options)

        return through(node, y, instead)


def call_variants(
    host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor
) -> Tensor:
    """The forward hook of a module with variants."""
    slot = host._modules[CHILD]
    assert isinstance(slot, VariantSlot)
    result: Tensor = slot(args, kwargs, y)
    return result


def set_variants(
    model: nn.Module, path: str, variants: Mapping[str, nn.Module], plan: BatchPlan
) -> None:
    """Let these modules, by their adapters' names, be called in the place of one of the model."""
    host = model.get_submodule(path)
    slot = VariantSlot(path, variants, plan)
    slot.handles.append(host.register_forward_hook(call_variants, with_kwargs=True))
    host.add_module(CHILD, slot)


def clear_variants(model: nn.Module) -> None:
    """Take all of them away."""
    paths = [
        slot.path
        for module in model.modules()
        if isinstance(slot := module._modules.get(CHILD), VariantSlot)
    ]
    for path in paths:
        drop_slot(model, path)


def with_parameters(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """A module that computes as another does, in its dtype, with some parameters of its own."""
    other = copy.copy(module)
    other._parameters = {**module._parameters, **parameters}
    other._modules = dict(module._modules)
    for hooks in [name for name in vars(module) if name.startswith("_forward_")]:
        setattr(other, hooks, type(getattr(module, hooks))())
    for name, parameter in parameters.items():
        own = module._parameters[name]
        if own is not None and own.dtype != parameter.dtype:
            hold_in_fp32(other, name, own.dtype)
    return other
