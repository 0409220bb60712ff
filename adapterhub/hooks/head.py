"""Task heads per row: each row of a batch goes through the head of its own adapter.

With a single active adapter, its head replaces the model's own. With several, by row or averaged,
the model's own head stays, and a hook on it passes its input to the head of each row. Shorter
outputs are padded with -inf: a class that a row's head lacks has probability 0.

The module also has heads of one or two linear layers that replace the head of a transformers class.

`adapters` puts its own heads on the token states of every model: dropout, linear, activation,
dropout, linear, or only the last two. The classes of transformers have other layers or another
activation, and call their head with states that they select:

    GPT-2, Llama           score(states)          (batch, tokens, d); one position is selected later
    BART, T5               head(state)            (batch, d)
    ELECTRA, RoBERTa       head(states)           (batch, tokens, d); the first one is read
    DistilBERT             classifier(relu(pre_classifier(state)))

With pooling, the head reads one vector of each row instead of the model's choice: a hook on the
base model replaces its last hidden state by the pooled vector at every position, and its pooler's
output by that vector. The head of a transformers class then always reads the pooled vector, instead
of the first token, the last one or the pooler's output. No class is named here.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from adapterhub.anatomy.backbone import CHILD
from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.backbones.pooling import POOLS
from adapterhub.errors import SiteError
from adapterhub.hooks.composition import AppliedModules, BatchPlan, by_row
from adapterhub.hooks.precision import hold_in_fp32
from adapterhub.hooks.rows import hooked
from adapterhub.hooks.slot import Mark, Slot, drop_slot, put_slot, through
from adapterhub.methods.common.ops import padded

_POOLING = "_adapterhub_pooling_slot"
_MASK = "mask"
_SITE = "head.pooling"


class Pool(nn.Module):
    """Pools the token states of each row; padding is left out.

    Args:
        how: cls (the first token), mean, last or max.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return the pooled vector of each row at each of its positions.

        `states`: (batch, tokens, d); `mask`: (batch, tokens), false at padding.
        """
        if states.stride(1) == 0:  # pooled by an adapter below this one
            return states
        pooled = POOLS[self.how](states.float(), mask).to(states.dtype)
        return pooled.unsqueeze(1).expand_as(states)


class PoolingSlot(Slot):
    """The poolings of the active adapters, for the whole model.

    Args:
        names: the parameters of the model's `forward`, in order.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Pool the rows of the adapters that have a pooling.

        `states`: (batch, tokens, d); `mask`: (batch, tokens), false at padding.
        """

        def apply(key: str, states: Tensor, mask: Tensor) -> Tensor:
            pooled: Tensor = self.placed(key)(states, mask)
            return pooled

        return self.run(apply, states, mask)

    def first(self, vector: Tensor, states: Tensor) -> Tensor:
        """Replace the vectors of rows that are pooled by the states at their first position.

        `vector`: the output of the model's own pooler, (batch, d); `states`: the pooled states,
        (batch, tokens, d).
        """
        return self.run(lambda key, vector, states: states[:, 0], vector, states)


def _keep_mask(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Keep the mask of a call: a pre-hook of the model."""
    slot = model._modules.get(CHILD)
    if isinstance(slot, PoolingSlot) and slot.keys:  # otherwise another thread has removed it
        values = dict(zip(slot.names, args, strict=False)) | kwargs
        slot.keep(_MASK, (values.get("attention_mask"),))


def _pool_output(base: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Pool the output of the base model: its forward hook."""
    slots: list[PoolingSlot] = getattr(base, _POOLING, [])  # None: another thread has removed it
    kept = slots[0].take(_MASK) if slots else None
    if kept is None or not slots[0].keys:  # the base model was called alone, for its hidden states
        return output
    slot = slots[0]
    states = output[0]
    pooled = slot(states, _mask_of(kept[0], states))
    if isinstance(output, tuple):
        vector: Any = output[1] if len(output) > 1 else None
        has_pooler = isinstance(vector, Tensor) and vector.dim() == 2
        return (pooled, slot.first(vector, pooled), *output[2:]) if has_pooler else (
            pooled, *output[1:]
        )  # fmt: skip
    output["last_hidden_state"] = pooled
    if output.get("pooler_output") is not None:
        output["pooler_output"] = slot.first(output["pooler_output"], pooled)
    return output


def _mask_of(mask: Tensor | None, states: Tensor) -> Tensor:
    """Return the mask of a call as booleans, (batch, tokens).

    Raises:
        SiteError: the mask is not over tokens.
    """
    if mask is None:
        return states.new_ones(states.shape[:2], dtype=torch.bool)
    if mask.dim() == 3:  # (batch, choices, tokens) of multiple choice
        mask = mask.flatten(0, 1)
    if mask.shape != states.shape[:2]:
        raise SiteError(
            f"the token states have shape {list(states.shape[:2])}, the mask {list(mask.shape)}",
            expected="an attention_mask of (batch, tokens), and a backbone that keeps all tokens",
            hint="pooling=model, the pooling of the transformers class",
        )
    return mask.bool()


@dataclass(eq=False)
class HeadPooling:
    """The pooling in front of one adapter's head; `key` is its name in the slot."""

    model: nn.Module = field(repr=False)
    base: nn.Module = field(repr=False)
    how: str
    key: str

    def inject(self) -> None:
        """Add the pooling to the model, inactive."""
        slot = self.model._modules.get(CHILD)
        if not isinstance(slot, PoolingSlot):
            slot = PoolingSlot(tuple(inspect.signature(self.model.forward).parameters))
            put_slot(self.model, slot)
            slot.hook(self.model.register_forward_pre_hook, _keep_mask, with_kwargs=True)
            slot.hook(Mark, self.base, _POOLING, slot)
            slot.hook(self.base.register_forward_hook, _pool_output)
        slot.add(self.key, Site(_SITE, "head", None, "pooling", "mix", "", 0, 0), Pool(self.how))

    def eject(self) -> None:
        """Remove the pooling from the model."""
        for slot in self.slots():
            slot.remove(self.key)
            if not slot.sites:
                drop_slot(self.model, "")

    def slots(self) -> Iterator[PoolingSlot]:
        """Yield the slot that has the pooling."""
        slot = self.model._modules[CHILD]
        assert isinstance(slot, PoolingSlot)
        yield slot


def head_pooling(anatomy: Anatomy, how: str | None, key: str) -> HeadPooling | None:
    """Return the pooling for a head; None for the pooling of the model's class.

    `how` is cls, mean, last or max; "model" or None is the pooling of the class.

    Raises:
        SiteError: the model lacks a head that reads one vector of each text.
    """
    if how not in POOLS:
        return None
    if not anatomy.head() or len(anatomy.stacks) > 1:
        raise SiteError(
            f"pooling={how} needs a task head on one stack of layers",
            expected="a model for classification, regression or multiple choice that is not an "
            "encoder-decoder",
            hint="pooling=model, the pooling of the model's class",
        )
    return HeadPooling(anatomy.model, anatomy.model.get_submodule(anatomy.base_path), how, key)


def default_pooling(anatomy: Anatomy) -> str | None:
    """Return the pooling that the backbone was trained with; None if its class uses the same."""
    trained = anatomy.backbone.trained_pooling
    return None if len(anatomy.stacks) > 1 or trained == _of_class(anatomy) else trained


def _of_class(anatomy: Anatomy) -> str | None:
    """Return the pooling of a class's head, with padding on the right; None if unknown."""
    if anatomy.family.query_stream or bypassed(anatomy):
        return None
    return "last" if "decoder" in anatomy.stacks else "cls"


def bypassed(anatomy: Anatomy) -> tuple[str, ...]:
    """Return the paths of base-model modules that are unused with a pooling."""
    base = anatomy.model.get_submodule(anatomy.base_path)
    return (anatomy.path("pooler"),) if getattr(base, "pooler", None) else ()


LARGEST_HEADS = 1 << 22  # numbers in all heads computed in one product; 16 MiB of fp32
NO_ACTIVATION = "linear"  # of a head with one layer
FIRST, LAST = "dense", "out"  # the names of the layers


class VariantSlot(Slot):
    """Replace the output of a module by the outputs of its variants, each for its own rows.

    The variants come with the modules applied in a call; `users` are the activations that have
    some.
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
    """Replace the output of a module by its variants' outputs: a forward hook."""
    slot = host._modules[CHILD]
    assert isinstance(slot, VariantSlot)
    applied = slot.applied
    result: Tensor = slot(applied, args, kwargs, y) if applied.keys else y
    return result


def add_variant_slot(model: nn.Module, path: str, user: object) -> VariantSlot:
    """Return the slot that calls the variants of a module; create it if missing.

    `user` is the activation that has the variants.
    """
    host = model.get_submodule(path)
    slot = host._modules.get(CHILD)
    if isinstance(slot, VariantSlot) and not slot.users:  # its removal is unfinished
        drop_slot(model, path)
        slot = None
    if not isinstance(slot, VariantSlot):
        slot = VariantSlot(path)
        put_slot(host, slot)
        slot.hook(host.register_forward_hook, call_variants, with_kwargs=True)
    if not any(each is user for each in slot.users):
        slot.users.append(user)
    return slot


def drop_variant_slots(model: nn.Module, paths: Iterable[str], user: object) -> None:
    """Remove the slots for variants of these modules with their last user.

    `user` is the activation that no longer has variants; some paths may lack a slot.
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
    """Concatenate x and -x, so that a head behind a ReLU can compute x = relu(x) - relu(-x)."""

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
        """Return (..., classes) for the head input of the model's class."""
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
    """Return the modules that replace the modules of a model's head, on the CPU and in fp32.

    The last module of `original` computes the logits. `shapes` are the shapes of the new
    parameters, by module and name, as `classifier.out.weight`. `activation` is between two layers;
    "linear" for a head of one.

    Raises:
        KeyError: a shape is missing, or no activation has this name.
        ValueError: a weight is not a matrix.
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
