"""Activations of a model: a stack of adapters, or one composition for each row of a batch.

An activation's `table` holds the state of a call: the modules that apply in each slot. State that
all calls share is switched `on` and `off`: the head, labels and backbone parameters that adapters
of a stack replace. Per row, a hook on the model's own head calls the heads of the rows.

`attach(model, method, on=[...])` trains an adapter on top of frozen ones. The frozen adapters are
active with it: they come first, and it gets their outputs (Pfeiffer et al. 2020, "MAD-X",
section 4.3, https://arxiv.org/abs/2005.00052: a task adapter on a language adapter). In a stack of
several adapters on one foundation, the foundation applies once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn

from adapterhub.adapters.adapter import Adapter, set_labels
from adapterhub.anatomy.backbone import Backbone, device_of
from adapterhub.backbones.pooling import max_positions
from adapterhub.errors import AttachError, ConfigError, MismatchError
from adapterhub.files.manifest import Manifest, without_heads
from adapterhub.files.native import Foundation
from adapterhub.hooks.composition import (
    AppliedModules,
    Average,
    BatchPlan,
    Composition,
    adapter_names,
    is_stack,
    localize,
)
from adapterhub.hooks.head import (
    BothSigns,
    add_variant_slot,
    drop_variant_slots,
    with_parameters,
)
from adapterhub.hooks.slot import Slot
from adapterhub.interrupts import deferred_interrupts
from adapterhub.methods.common.base import METHODS
from adapterhub.methods.common.site_module import EmbeddingModule, TokenSet
from adapterhub.patch import Patch

_LEAST_LEFT = 3  # positions: a text between a first and a last special token
_FRESH = ".fresh."  # in the names of parameters that the checkpoint lacked


def with_foundations(adapters: Mapping[str, Adapter], composition: Composition) -> Composition:
    """Return a composition together with the adapters below the named ones."""
    if not any(adapters[name].on for name in adapter_names(composition)):
        return composition
    return _expanded(adapters, composition, frozenset())


def _expanded(
    adapters: Mapping[str, Adapter], composition: Composition, applied: frozenset[str]
) -> Composition:
    """Expand a composition that gets the outputs of the adapters in `applied`."""
    if isinstance(composition, Average):
        parts = [_expanded(adapters, part, applied) for part in composition.parts]
        return Average(parts, composition.weights)
    expanded: list[Composition] = []
    brought: set[str] = set()
    for part in _flat(composition):
        if isinstance(part, Average):
            expanded.append(_expanded(adapters, part, applied))
            continue
        if part in brought:
            continue
        below = [n for n in _names_below(adapters[part]) if n not in applied]
        expanded += (*below, part)
        brought.update(below)
        applied = applied.union(below, [part])
    return tuple(expanded)


def _names_below(adapter: Adapter) -> list[str]:
    return [below.name for below in adapters_below(adapter)]


def _flat(composition: Composition) -> Iterator[str | Average]:
    """Yield the names and averages of a stack with nested stacks."""
    if isinstance(composition, str | Average):
        yield composition
        return
    for part in composition:
        yield from _flat(part)


def adapters_below(adapter: Adapter) -> list[Adapter]:
    """List the adapters below another one, the lowest first, each once."""
    chain = [each for below in adapter.on for each in (*adapters_below(below), below)]
    return list(dict.fromkeys(chain))


def virtual_tokens(adapter: Adapter) -> int:
    """Count the positions that an adapter occupies in front of each text."""
    modules = [placed.module for placed in adapter.placed if placed.site.kind == "embed"]
    with torch.no_grad():
        return sum(
            len(module()) + module.skipped_positions
            for module in modules
            if isinstance(module, EmbeddingModule)
        )


def text_positions(model: nn.Module, adapters: Iterable[Adapter] = ()) -> int:
    """Return the number of positions left for a text and the text generated after it.

    The virtual tokens of adapters, and of the adapters below them, come first.

    Raises:
        ConfigError: too few positions are left.
    """
    positions = max_positions(model)
    chain = dict.fromkeys(each for a in adapters for each in (*adapters_below(a), a))
    taken = {each: count for each in chain if (count := virtual_tokens(each))}
    left = positions - sum(taken.values())
    if left < _LEAST_LEFT and taken:
        raise ConfigError(
            f"virtual tokens leave {max(left, 0):,} of the {positions:,} positions of the backbone",
            offenders=[f"{each.name}: {count:,} virtual tokens" for each, count in taken.items()],
            expected=f"at most {max(positions - _LEAST_LEFT, 0):,}: a text has some tokens, too",
            hint="--method 'prompt(length=20)'",
        )
    return left


def frozen_adapters(adapters: Mapping[str, Adapter], names: Iterable[str]) -> tuple[Adapter, ...]:
    """Return the frozen adapters for a new adapter to be on.

    Raises:
        AttachError: an adapter is not attached or not frozen.
    """
    names = tuple(dict.fromkeys(names))
    wrong = [name for name in names if name not in adapters or not adapters[name].foundation]
    if wrong:
        frozen = [name for name, each in adapters.items() if each.foundation]
        raise AttachError(
            "an adapter can only be on top of saved adapters that are loaded frozen",
            offenders=[
                f"{name!r} is {'not frozen' if name in adapters else 'not attached'}"
                for name in wrong
            ],
            expected=f"one of {', '.join(map(repr, frozen))}" if frozen else "",
            hint=f"ah.load(model, REFERENCE, name={wrong[0]!r}, frozen=True)",
        )
    return tuple(adapters[name] for name in names)


def attached_foundation(adapters: Mapping[str, Adapter], foundation: Foundation) -> Adapter | None:
    """Return the attached frozen adapter with the same digest, or None."""
    for adapter in adapters.values():
        if adapter.foundation and adapter.foundation.ref.digest == foundation.ref.digest:
            return adapter
    return None


def frozen_part(manifest: Manifest) -> Manifest:
    """Return the part of an adapter that others can be on, without its head and the head's inputs.

    The adapter on top provides the task head, and new layers above the last one, such as a pooler.

    Raises:
        MismatchError: nothing is left, or the adapter has new tokens, or it has parameters inside
            the layers that the checkpoint of the backbone lacked.
    """
    fresh = {name for name in manifest.tensors if _FRESH in name}
    part = without_heads(manifest)
    left = {name: info for name, info in part.tensors.items() if name not in fresh}
    problems = [f"newly initialized: {n}" for n in sorted(fresh) if re.match(r"[a-z_]+\.\d+\.", n)]
    problems += [f"new token: {token.content!r}" for token in manifest.tokens]
    problems += [] if left else ["it has a task head only"]
    if problems:
        raise MismatchError(
            f"no adapter can be on top of {manifest.name!r}",
            offenders=problems[:5],
            expected="an adapter that changes layers of the backbone, without new tokens",
        )
    return replace(part, tensors=left)


def freeze(adapter: Adapter, foundation: Foundation) -> None:
    """Make an adapter with the tensors of `frozen_part` a foundation for others."""
    adapter.foundation = foundation
    adapter.changed = [changed for changed in adapter.changed if changed.method is not None]
    for parameter in adapter.parameters():
        parameter.requires_grad_(False)


def refuse_below(adapters: Mapping[str, Adapter], removed: Sequence[Adapter]) -> None:
    """Refuse to detach adapters that others are on.

    Raises:
        AttachError: others are on them; the error names those.
    """
    above = [a for a in adapters.values() if a not in removed and set(a.on) & set(removed)]
    if above:
        raise AttachError(
            f"{', '.join(repr(a.name) for a in removed)} cannot be detached: others are on it",
            offenders=[repr(adapter.name) for adapter in above],
            hint=f"detach(model, {above[0].name!r}) first",
        )


def with_brought(adapters: Mapping[str, Adapter], removed: Sequence[Adapter]) -> list[Adapter]:
    """Return adapters to detach, and the adapters that were only brought along for them."""
    going = list(removed)
    while True:
        needed = {below for each in adapters.values() if each not in going for below in each.on}
        more = [
            below
            for each in going
            for below in each.on
            if below.brought and below not in needed and below not in going
        ]
        if not more:
            return going
        going += dict.fromkeys(more)


Adapters = Mapping[str, Adapter]


class Activatable(Protocol):
    """The part of a model's state that activates compositions."""

    @property
    def activation(self) -> Activation:
        """The activation that applies outside routes."""

    def activate(self, composition: Composition) -> None:
        """Make a composition active."""


@contextmanager
def temporarily(state: Activatable, composition: Composition) -> Iterator[None]:
    """Make a composition active inside, and restore the previous one afterwards.

    Raises:
        AttachError: as `ModelState.activate`.
    """
    (before,) = state.activation.compositions
    try:
        state.activate(composition)
        yield
    finally:
        with deferred_interrupts():
            state.activate(before)


class StackActivation:
    """The same adapters for all rows, in sequence; without adapters, the bare backbone."""

    outer: RouteActivation | None = None

    def __init__(self, adapters: Sequence[Adapter] = ()) -> None:
        self.adapters = tuple(adapters)
        slots = _keys_by_adapter(adapters).items()
        self.table = {slot: AppliedModules(tuple(chain(*keys.values()))) for slot, keys in slots}
        self.token_sets = _token_sets(self.adapters)

    @property
    def compositions(self) -> tuple[Composition, ...]:
        """One composition for all rows."""
        return (tuple(adapter.name for adapter in self.adapters),)

    @property
    def replaces(self) -> bool:
        """Whether the adapters replace a part of the model, which all calls share."""
        return any(adapter.replaces for adapter in self.adapters)

    def check(self) -> None:
        """Refuse adapters whose parts cannot be exchanged.

        Raises:
            AttachError: FSDP2 has sharded them.
        """
        for adapter in self.adapters:
            adapter.check_replaceable()

    def on(self) -> None:
        """Replace parts of the model with the parts of the adapters, in order."""
        for adapter in self.adapters:
            adapter.put_into()

    def off(self) -> None:
        """Undo `on`."""
        for adapter in reversed(self.adapters):
            adapter.patch.undo()

    def prepare(self) -> None:
        """Do nothing: the slots exist."""

    def close(self) -> None:
        """Undo `prepare`."""

    def without(self, adapter: Adapter) -> StackActivation:
        """Return the activation of the other adapters."""
        return StackActivation([other for other in self.adapters if other is not adapter])


class PerRowActivation:
    """One composition for each row of a batch."""

    replaces = False
    outer: RouteActivation | None = None  # the outer route of a nested route
    plan_class: type[BatchPlan] = BatchPlan

    def __init__(
        self, backbone: Backbone, adapters: Adapters, compositions: Sequence[Composition]
    ) -> None:
        self.backbone, self.model = backbone, backbone.module
        self.compositions = tuple(compositions)
        self.adapters = _adapters_in(adapters, compositions)
        self.by_name = {adapter.name: adapter for adapter in self.adapters}
        self.token_sets = _token_sets(self.adapters)
        self.table: dict[Slot, AppliedModules] = {}
        self.called_through: tuple[str, ...] = ()  # paths of modules that have variants
        self.plans: dict[Hashable, BatchPlan] = {}  # slots with equal keys share a plan

    def prepare(self) -> None:
        """Plan the rows in each slot, and add slots that call the heads."""
        for slot, keys in _keys_by_adapter(self.adapters).items():
            if plan := self._plan_of(slot, keys):
                self.table[slot] = AppliedModules(tuple(chain(*keys.values())), plan)
        variants_by_path = _variants(self.adapters)
        _refuse_other_widths(variants_by_path.values())
        self.called_through = tuple(variants_by_path)
        for path, variants in variants_by_path.items():
            plan = self._plan({name: (name,) for name in variants}, last=True)
            slot = add_variant_slot(self.model, path, self)
            slot.scope = self.adapters[0].state.scope
            self.table[slot] = AppliedModules(tuple(variants), plan, variants)

    def close(self) -> None:
        """Undo `prepare`."""
        drop_variant_slots(self.model, self.called_through, self)
        self.table = {}

    def check(self) -> None:
        """Do nothing: no part of the model is replaced."""

    def on(self) -> None:
        """Do nothing: no part of the model is replaced."""

    def off(self) -> None:
        """Undo `on`."""

    def labels(self) -> dict[str, Any]:
        """Return the labels that all rows share, or numbered labels for the largest head."""
        rows = [_labels(self.by_name, c) for c in self.compositions]
        return _common_labels(self.backbone.labels, rows)

    @cached_property
    def _device(self) -> torch.device | str:
        return device_of(self.model) or "cpu"

    def _plan_of(self, slot: Slot, keys: Mapping[str, tuple[str, ...]]) -> BatchPlan | None:
        """Return the plan of one slot, or None if no module applies there."""
        return self._plan(keys)

    def _plan(self, keys: Mapping[str, tuple[str, ...]], last: bool = False) -> BatchPlan:
        """Plan the rows of one slot; `last` keeps the last module of each stack, for heads."""
        name = (last, *keys.items())
        if name not in self.plans:
            local = {c: localize(c, keys) for c in dict.fromkeys(self.compositions)}
            if last:
                local = {c: p[-1:] if isinstance(p, tuple) else p for c, p in local.items()}
            self.plans[name] = self.plan_class([local[c] for c in self.compositions], self._device)
        return self.plans[name]


class AverageActivation(PerRowActivation):
    """A composition with an average for all rows; its labels replace the model's own."""

    replaces = True

    def __init__(
        self, backbone: Backbone, adapters: Adapters, compositions: Sequence[Composition]
    ) -> None:
        super().__init__(backbone, adapters, compositions)
        self.patch = Patch()

    def on(self) -> None:
        """Set the labels."""
        set_labels(self.backbone, self.labels(), self.patch)

    def off(self) -> None:
        """Undo `on`."""
        self.patch.undo()

    def without(self, adapter: Adapter) -> AverageActivation:
        """Return this activation if the adapter is not part of it.

        Raises:
            AttachError: the adapter is part of it.
        """
        if adapter in self.adapters:
            raise AttachError(
                f"{adapter.name!r} is part of the active average",
                hint="activate(model) first, which deactivates all adapters",
            )
        return self


Activation = StackActivation | AverageActivation
RouteActivation = StackActivation | PerRowActivation


def activation_of(backbone: Backbone, adapters: Adapters, composition: Composition) -> Activation:
    """Return the activation of one composition for all rows; the model is not changed.

    Raises:
        AttachError: adapters that cannot be active together.
    """
    composition = with_foundations(adapters, composition)
    if is_stack((composition,)):
        return _stack(adapters, composition)
    _check_rows(adapters, (composition,))
    return AverageActivation(backbone, adapters, (composition,))


def route_activation_of(
    backbone: Backbone, adapters: Adapters, compositions: Sequence[Composition]
) -> RouteActivation:
    """Return the activation of a route; the model is not changed.

    Raises:
        AttachError: adapters that cannot be active together.
    """
    compositions = [with_foundations(adapters, composition) for composition in compositions]
    if is_stack(compositions):
        stack = _stack(adapters, compositions[0])
        if any(map(changes_shared_state, stack.adapters)):
            return stack
    _check_rows(adapters, compositions)
    return PerRowActivation(backbone, adapters, compositions)


def _stack(adapters: Adapters, composition: Composition) -> StackActivation:
    stack = [adapters[name] for name in adapter_names(composition)]
    _refuse_shared_parameters(stack)
    _refuse_other_pooling(stack)
    return StackActivation(stack)


def _check_rows(adapters: Adapters, compositions: Sequence[Composition]) -> None:
    _refuse_unroutable(_adapters_in(adapters, compositions))
    for composition in dict.fromkeys(compositions):
        _refuse_other_pooling([adapters[name] for name in adapter_names(composition)])
        _check_averages(adapters, composition)


def _token_sets(adapters: Iterable[Adapter]) -> tuple[tuple[str, TokenSet], ...]:
    """List the token sets that the modules of adapters change, with the stack of each."""
    sets = (
        (placed.site.reads, tokens)
        for adapter in adapters
        for placed in adapter.placed
        for tokens in placed.module.token_sets
    )
    return tuple(dict.fromkeys(sets))


def _keys_by_adapter(adapters: Iterable[Adapter]) -> dict[Slot, dict[str, tuple[str, ...]]]:
    """Map each slot to the keys of each adapter's modules there."""
    slots: dict[Slot, dict[str, tuple[str, ...]]] = {}
    for adapter in adapters:
        for slot, key in adapter.slots():
            keys = slots.setdefault(slot, {})
            keys[adapter.name] = (*keys.get(adapter.name, ()), key)
    return slots


def head_of(adapters: Adapters, composition: Composition) -> Adapter | None:
    """Return the adapter whose head a composition uses: the last one with a head, or None."""
    names = reversed(list(adapter_names(composition)))
    return next((adapters[name] for name in names if adapters[name].head), None)


def template_of(
    adapters: Adapters, applied: Iterable[Activation | RouteActivation], own: str | None
) -> str | None:
    """Return the chat template that applies; None: the user's own.

    A stack uses the template of its last adapter with one. If several templates apply, the result
    is a template that raises an error: any of them would be wrong for some rows.

    `applied` is the activation, or the innermost open route of each thread. `own` is the user's
    template.
    """
    with_one = {name: (name,) for name, adapter in adapters.items() if adapter.template is not None}
    compositions = dict.fromkeys(c for each in applied for c in each.compositions)
    names = dict.fromkeys(n for c in compositions for n in _last_names(localize(c, with_one)))
    templates = {own if name is None else adapters[name].template for name in names}
    if len(templates) < 2:
        return next((template for template in templates if template != own), None)
    owners = ", ".join("the backbone" if name is None else repr(name) for name in names)
    problem = (
        f"different chat templates apply to the rows, those of {owners}; choose one: "
        "apply_chat_template(..., chat_template=adapter.template)"
    )
    return f"{{{{ raise_exception({json.dumps(problem)}) }}}}"


def _last_names(composition: Composition) -> Iterator[str | None]:
    """Yield the last adapter of each part of an average; None for an empty part."""
    if isinstance(composition, Average):
        for part in composition.parts:
            yield from _last_names(part)
    elif isinstance(composition, tuple):
        yield from _last_names(composition[-1]) if composition else [None]
    else:
        yield composition


def _adapters_in(adapters: Adapters, compositions: Iterable[Composition]) -> list[Adapter]:
    names = [name for composition in compositions for name in adapter_names(composition)]
    return [adapters[name] for name in dict.fromkeys(names)]


def _refuse_shared_parameters(stack: Sequence[Adapter]) -> None:
    owners: dict[int, str] = {}
    for adapter in stack:
        for changed in adapter.changed:
            owner = owners.setdefault(id(changed.original), adapter.name)
            if owner != adapter.name:
                raise AttachError(
                    f"{owner!r} and {adapter.name!r} both train {changed.name}",
                    expected="at most one active adapter for each backbone parameter",
                )


def _refuse_other_pooling(composed: Sequence[Adapter]) -> None:
    """Refuse compositions of adapters whose heads use different poolings."""
    heads = [adapter for adapter in composed if adapter.head]
    poolings = {a.name: a.pooling.how if a.pooling else "model" for a in heads}
    if len(set(poolings.values())) > 1:
        raise AttachError(
            "adapters whose heads pool differently cannot be composed",
            offenders=[f"{name!r}: pooling={pooling}" for name, pooling in poolings.items()],
            expected="the same pooling in all adapters of a composition",
            hint="route(model, [...]), which gives each row the pooling of its adapter",
        )


def _refuse_unroutable(adapters: Iterable[Adapter]) -> None:
    if shared := [a for a in adapters if changes_shared_state(a)]:
        fitting = sorted(name for name, method in METHODS.items() if not method.trains_backbone)
        raise AttachError(
            "these adapters change state shared by the whole batch and cannot be routed per row",
            offenders=[_described(adapter) for adapter in shared],
            expected=f"methods that only add modules: {', '.join(fitting)}",
            hint="activate such an adapter alone, in batches of its own",
        )


def _described(adapter: Adapter) -> str:
    return f"{adapter.name!r}: {', '.join(method.name for method in adapter.methods)}"


def changes_shared_state(adapter: Adapter) -> bool:
    """Return whether an adapter changes backbone parameters, the embedding or positions."""
    return (
        adapter.new_tokens is not None
        or any(placed.skips_positions for placed in adapter.placed)
        or any(changed.method is not None for changed in adapter.changed)
        or any(adapter.anatomy.layer_of(path) != "above" for path, _ in _newly_initialized(adapter))
    )


def _check_averages(adapters: Adapters, composition: Composition) -> None:
    """Refuse averages of prefixes, prompts, or heads with different labels."""
    if isinstance(composition, str):
        return
    parts = composition.parts if isinstance(composition, Average) else composition
    for part in parts:
        _check_averages(adapters, part)
    if not isinstance(composition, Average):
        return
    virtual = [adapters[name] for name in adapter_names(composition)]
    virtual = [adapter for adapter in virtual if _adds_virtual_tokens(adapter)]
    if virtual:
        raise AttachError(
            "virtual tokens cannot be averaged",
            offenders=[_described(adapter) for adapter in virtual],
            expected="adapters without a prefix or prompt",
            hint="stack them: activate(model, 'a', 'b')",
        )
    labels = {str(list(adapter_names(part))): _labels(adapters, part) for part in composition.parts}
    if len({str(each) for each in labels.values()}) > 1:
        raise AttachError(
            "heads with different labels cannot be averaged",
            offenders=[f"{name}: {_classes(each)}" for name, each in labels.items()],
            expected="the same labels in the same order",
            hint="route(model, [...]), which gives each row the head of its adapter",
        )


def _refuse_other_widths(variants: Iterable[Mapping[str, nn.Module]]) -> None:
    """Refuse heads that change the inputs of modules in the model's own head."""
    for modules in variants:
        if wide := [name for name, module in modules.items() if isinstance(module, BothSigns)]:
            raise AttachError(
                f"the head of {wide[0]!r} has layers of its own in front of a ReLU of the model, "
                "and cannot be applied row by row",
                hint=f"activate(model, {wide[0]!r}), in batches of its own",
            )


def _adds_virtual_tokens(adapter: Adapter) -> bool:
    return any(placed.site.kind in ("keyvalue", "embed") for placed in adapter.placed)


def _classes(labels: Mapping[str, Any] | None) -> str:
    return "no head" if labels is None else ", ".join(labels["id2label"].values())


def _variants(adapters: Iterable[Adapter]) -> dict[str, dict[str, nn.Module]]:
    """Map paths of the model's modules to their replacements, by adapter."""
    variants: dict[str, dict[str, nn.Module]] = {}
    for adapter in adapters:
        for path, module in (adapter.head.own if adapter.head else {}).items():
            variants.setdefault(path, {})[adapter.name] = module
        parameters: dict[str, dict[str, nn.Parameter]] = {}
        for path, parameter in _newly_initialized(adapter):
            host, _, attribute = path.rpartition(".")
            parameters.setdefault(host, {})[attribute] = parameter
        for host, replaced in parameters.items():
            module = with_parameters(adapter.model.get_submodule(host), replaced)
            variants.setdefault(host, {})[adapter.name] = module
    return variants


def _newly_initialized(adapter: Adapter) -> list[tuple[str, nn.Parameter]]:
    """List the parameters that the backbone's checkpoint lacked, with their paths."""
    replaced = {
        id(parameter): changed.own
        for changed in adapter.changed
        if changed.method is None
        for parameter in (changed.original, changed.own)
    }
    named = adapter.anatomy.parameters().items() if replaced else ()
    return [(path, replaced[id(p)]) for path, p in named if id(p) in replaced]


def _labels(adapters: Adapters, composition: Composition) -> dict[str, Any] | None:
    owner = head_of(adapters, composition)
    return owner.head.labels if owner and owner.head else None


def _common_labels(
    bare: dict[str, Any], per_row: Sequence[dict[str, Any] | None]
) -> dict[str, Any]:
    """Return the labels that all rows share, or numbered labels for the largest head."""
    labels = [row if row is not None else bare for row in per_row]
    if all(row == labels[0] for row in labels):
        return dict(labels[0])
    names = [f"LABEL_{i}" for i in range(max(len(row["id2label"] or ()) for row in labels))]
    kinds = {row["problem_type"] for row in labels}
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {name: i for i, name in enumerate(names)},
        "problem_type": kinds.pop() if len(kinds) == 1 else None,
    }
