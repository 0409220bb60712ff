"""Task heads per row: each row of a batch goes through the head of its own adapter.

With a single active adapter, its head replaces the model's own. With several, by row or averaged,
the model's own stays, and a hook on it passes its input to the head of each row. Shorter outputs
are padded with -inf: a class that a row's head lacks has probability 0.

Also heads of one or two linear layers in place of that of a transformers class.

`adapters` puts its own heads on the token states of every model: dropout, linear, activation,
dropout, linear, or the last two alone. The classes of transformers have other layers, or another
activation, and call their head with what they select themselves:

    GPT-2, Llama           score(states)          (batch, tokens, d); one position is selected later
    BART, T5               head(state)            (batch, d)
    ELECTRA, RoBERTa       head(states)           (batch, tokens, d); the first one is read
    DistilBERT             classifier(relu(pre_classifier(state)))
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from adapterhub.anatomy.sites import CHILD
from adapterhub.hooks.composition import BatchPlan, by_row, through
from adapterhub.hooks.forward_pass import AppliedModules
from adapterhub.hooks.precision import hold_in_fp32
from adapterhub.hooks.row_stacks import hooked
from adapterhub.hooks.slot import Slot, drop_slot, put_slot
from adapterhub.methods._ops import padded

LARGEST_HEADS = 1 << 22  # numbers in all heads that are computed in one product; 16 MiB of fp32
NO_ACTIVATION = "linear"  # of a head with one layer
FIRST, LAST = "dense", "out"  # the names of the layers


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

        `inputs` and `options` are the module's arguments; `y` is its own output, (batch, ...,
        classes), for rows without a variant.

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
        calls = zip(plan.groups, plan.split_call((y, *inputs), options, copies), strict=True)
        outputs = [
            _call(modules, composition, own_inputs, own_options, own_y)
            for composition, ((own_y, *own_inputs), own_options) in calls
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

    `inputs` and `options` are the module's arguments, `y` is its own output.
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
    inputs: Sequence[Any],
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

    `user` is the activation that has the variants.
    """
    host = model.get_submodule(path)
    slot = host._modules.get(CHILD)
    if isinstance(slot, VariantSlot) and not slot.users:  # its removal has not finished
        drop_slot(model, path)
        slot = None
    if not isinstance(slot, VariantSlot):
        slot = VariantSlot(path)
        put_slot(host, slot)
        slot.patch.hook(host.register_forward_hook, call_variants, with_kwargs=True)
    if not any(each is user for each in slot.users):
        slot.users.append(user)
    return slot


def drop_variant_slots(model: nn.Module, paths: Iterable[str], user: object) -> None:
    """Remove the slots for variants of these modules with their last user.

    `user` is the activation that has no variants any more; some paths may have no slot.
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


class BothSigns(nn.Module):
    """Makes x of relu(x) and relu(-x), of which a class that applies ReLU leaves x."""

    def forward(self, states: Tensor) -> Tensor:
        """Return (..., 2 d) for states (..., d)."""
        return torch.cat([states, -states], dim=-1)


class LayeredHead(nn.Module):
    """One or two linear layers.

    Args:
        shapes: the shape of each of their parameters.
        activation: between the two, a name of transformers; "linear" for a head of one layer.
        dropout: the rate in front of each layer.
        first: whether it reads the first token of (batch, tokens, d).
        signs: whether it reads the output of `BothSigns`, behind a ReLU.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        activation: str,
        *,
        dropout: float = 0.0,
        first: bool = False,
        signs: bool = False,
    ) -> None:
        super().__init__()
        self.activation, self.first, self.signs = activation, first, signs
        self.dropout = nn.Dropout(dropout)
        for name in (LAST,) if activation == NO_ACTIVATION else (FIRST, LAST):
            outputs, inputs = shapes[f"{name}.weight"]
            layer = nn.Linear(inputs, outputs, bias=f"{name}.bias" in shapes)
            self.add_module(name, layer)

    def forward(self, states: Tensor) -> Tensor:
        """Return (..., classes) for what the model's class gives its head."""
        if self.signs:
            plus, minus = states.chunk(2, dim=-1)
            states = plus - minus
        if self.first and states.dim() == 3:
            states = states[:, 0]
        if self.activation != NO_ACTIVATION:
            states = ACT2FN[self.activation](self.get_submodule(FIRST)(self.dropout(states)))
        logits: Tensor = self.get_submodule(LAST)(self.dropout(states))
        return logits


def layered_head(
    original: Mapping[str, nn.Module], shapes: Mapping[str, tuple[int, ...]], activation: str
) -> dict[str, nn.Module]:
    """Return the modules that take the places of those of a model's head, on the CPU and in fp32.

    The last module of `original` gives the logits. `shapes` are those of the new parameters, by
    module and name, as `classifier.out.weight`. `activation` is between two layers; "linear" for a
    head of one.

    Raises:
        KeyError: a shape is missing, or no activation has this name.
        ValueError: a weight is no matrix.
    """
    *before, last = original
    if activation not in (NO_ACTIVATION, *ACT2FN):
        raise KeyError(activation)
    own = {n.removeprefix(f"{last}."): s for n, s in shapes.items() if n.startswith(f"{last}.")}
    module = original[last]
    dropout = next((m.p for m in module.modules() if isinstance(m, nn.Dropout)), 0.0)
    first = not isinstance(module, nn.Linear)
    head = LayeredHead(own, activation, dropout=dropout, first=first, signs=bool(before))
    return {**{name: BothSigns() for name in before}, last: head}


def activation_between(head: Mapping[str, nn.Module]) -> str | None:
    """Return the activation of a head of own layers; None for the head of the model's class."""
    layered = (module for module in head.values() if isinstance(module, LayeredHead))
    return next((module.activation for module in layered), None)
