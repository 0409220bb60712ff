"""Task heads per row: each row of a batch goes through the head of its own adapter.

With a single active adapter, its head replaces the model's own. With several, by row or averaged,
the model's own stays, and a hook on it passes its input to the head of each row. Shorter outputs
are padded with -inf: a class that a row's head lacks has probability 0.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.sites import CHILD
from adapterhub.hooks.composition import BatchPlan, by_row, through
from adapterhub.hooks.forward_pass import AppliedModules
from adapterhub.hooks.precision import hold_in_fp32
from adapterhub.hooks.row_stacks import hooked
from adapterhub.hooks.slot import Slot, drop_slot
from adapterhub.methods._ops import padded

LARGEST_HEADS = 1 << 22  # numbers in all heads that are computed in one product; 16 MiB of fp32


class VariantSlot(Slot):
    """Replaces the output of a module by those of its variants, each applied to its own rows.

    The variants come with what applies in a call; `users` are the activations that have some.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.users: list[object] = []

    def where(self) -> str:
        """Return the path of the module, for messages."""
        return self.path

    def forward(
        self, applied: AppliedModules, inputs: tuple[Any, ...], options: dict[str, Any], y: Tensor
    ) -> Tensor:
        """Apply the variants.

        Args:
            applied: the variants, and which rows go through which of them.
            inputs: the positional arguments of the module.
            options: its keyword arguments.
            y: its own output, (batch, ..., classes), for rows without a variant.

        Returns:
            (batch, ..., most classes).
        """
        _, plan, modules = applied
        assert plan is not None
        assert modules is not None
        if len(plan.groups) == 1:
            return _call(modules, plan.groups[0], inputs, options, y)
        copies = plan.copies(len(y), self.path)
        if (rows := _at_once(modules, plan, inputs, options, y)) is not None:
            return rows
        rows_of_y = plan.split(y, copies)
        rows_of_inputs = [plan.split(value, copies) for value in inputs]
        rows_of_options = {name: plan.split(value, copies) for name, value in options.items()}
        outputs = [
            _call(
                modules,
                composition,
                tuple(rows[n] for rows in rows_of_inputs),
                {name: rows[n] for name, rows in rows_of_options.items()},
                rows_of_y[n],
            )
            for n, composition in enumerate(plan.groups)
        ]
        most = max(output.shape[-1] for output in outputs)
        padded = [F.pad(o, (0, most - o.shape[-1]), value=-float("inf")) for o in outputs]
        return plan.join(padded, copies)


def _at_once(
    modules: Mapping[str, nn.Module],
    plan: BatchPlan,
    inputs: tuple[Any, ...],
    options: dict[str, Any],
    y: Tensor,
) -> Tensor | None:
    """Apply small linear heads in one product, or return None: other heads.

    Args:
        modules: the variants, by key.
        plan: the rows, of several groups.
        inputs: the positional arguments of the module.
        options: its keyword arguments.
        y: its own output.
    """
    if plan.columns is None or len(plan.columns) != 1 or None in plan.columns[0]:
        return None
    heads = [modules.get(key or "") for key in plan.columns[0]]
    if options or len(inputs) != 1 or len(inputs[0]) != len(y) or torch.compiler.is_compiling():
        return None
    if not all(type(head) is nn.Linear and head.bias is not None for head in heads):
        return None
    linear = [head for head in heads if isinstance(head, nn.Linear)]
    if any(map(hooked, linear)) or sum(head.weight.numel() for head in linear) > LARGEST_HEADS:
        return None
    weight = padded([head.weight for head in linear])
    bias = padded([head.bias for head in linear])
    most = weight.shape[1]
    missing = [[n >= head.out_features for n in range(most)] for head in linear]
    if any(map(any, missing)):
        bias = bias.masked_fill(torch.tensor(missing, device=bias.device), -float("inf"))
    if plan.group_of_row is not None:
        weight, bias = weight[plan.group_of_row], bias[plan.group_of_row]
    x = by_row(inputs[0], plan.rows, 0)
    logits = torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))
    return logits.reshape(*inputs[0].shape[:-1], most)


def _call(
    modules: Mapping[str, nn.Module],
    composition: Any,
    inputs: tuple[Any, ...],
    options: dict[str, Any],
    y: Tensor,
) -> Tensor:
    def variant(name: str, y: Tensor) -> Tensor:
        module = modules.get(name)
        return y if module is None else module(*inputs, **options)

    return through(composition, y, variant)


def call_variants(
    host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor
) -> Tensor:
    """Replace the output of a module by those of its variants: a forward hook."""
    slot = host._modules[CHILD]
    assert isinstance(slot, VariantSlot)
    applied = slot.applied
    result: Tensor = slot(applied, args, kwargs, y) if applied.keys else y
    return result


def add_variant_slot(model: nn.Module, path: str, user: object) -> VariantSlot:
    """Return the slot through which variants of a module are called; create it if missing.

    Args:
        model: the model.
        path: the module's path.
        user: the activation that has the variants.
    """
    host = model.get_submodule(path)
    slot = host._modules.get(CHILD)
    if isinstance(slot, VariantSlot) and not slot.users:  # its removal has not finished
        drop_slot(model, path)
        slot = None
    if not isinstance(slot, VariantSlot):
        slot = VariantSlot(path)
        host.add_module(CHILD, slot)
        slot.patch.hook(host.register_forward_hook(call_variants, with_kwargs=True))
    if not any(each is user for each in slot.users):
        slot.users.append(user)
    return slot


def drop_variant_slots(model: nn.Module, paths: Iterable[str], user: object) -> None:
    """Remove the slots for variants of these modules with their last user.

    Args:
        model: the model.
        paths: the modules' paths; some may have no slot.
        user: the activation that has no variants any more.
    """
    for path in paths:
        slot = model.get_submodule(path)._modules.get(CHILD)
        if isinstance(slot, VariantSlot):
            slot.users = [each for each in slot.users if each is not user]
            if not slot.users:
                drop_slot(model, path)


def without_variant_slots(module: nn.Module) -> nn.Module:
    """Remove the slots for variants from a copy of a module."""
    hosts = [m for m in module.modules() if isinstance(m._modules.get(CHILD), VariantSlot)]
    for host in hosts:
        drop_slot(host, "")
    return module


def with_parameters(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """Return a copy of a module that shares all but the given parameters, without its hooks."""
    twin = copy.copy(module)
    twin._parameters = {**module._parameters, **parameters}
    twin._modules = dict(module._modules)
    for hooks in [name for name in vars(module) if name.startswith("_forward_")]:
        setattr(twin, hooks, type(getattr(module, hooks))())
    for name, parameter in parameters.items():
        original = module._parameters[name]
        if original is not None and original.dtype != parameter.dtype:
            hold_in_fp32(twin, name, original.dtype)
    return twin
