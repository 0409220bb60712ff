"""Let a composition of adapters act on a model: averaged, or by row.

A plain stack needs none of this: its modules are switched on, and its head and parameters stand in
the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.parts import LABEL_FIELDS, set_labels, slot_at
from adapterhub.adapters.state import (
    Attachments,
    known_names,
    refuse_in_route,
    state_of,
)
from adapterhub.backbones.weights import device_of
from adapterhub.errors import AttachError
from adapterhub.hooks.composition import (
    Average,
    BatchPlan,
    Node,
    is_stack,
    localized,
    names_in,
    node_of,
)
from adapterhub.hooks.head import clear_variants, set_variants, with_parameters
from adapterhub.hooks.slot import Slot
from adapterhub.methods._base import METHODS

Adapters = Mapping[str, Adapter]


def check_composition(model: PreTrainedModel, adapters: Adapters, rows: Sequence[Node]) -> None:
    """Refuse what cannot be averaged or routed.

    Raises:
        AttachError: adapters that change parameters of the backbone; in an average, also prefixes
            and prompts, and heads with different labels.
    """
    chosen = _chosen(adapters, rows)
    wrong = [f"{a.name!r}: {', '.join(m.name for m in a.methods)}" for a in chosen if _changes(a)]
    if wrong:
        fitting = sorted(name for name, method in METHODS.items() if not method.trains_backbone)
        raise AttachError(
            "what changes the backbone's own parameters, its tokens or their positions does so for "
            "the whole batch",
            offenders=wrong,
            expected=f"methods that add modules beside them: {', '.join(fitting)}",
            hint="activate such an adapter alone, one batch after the other",
        )
    for node in dict.fromkeys(rows):
        _check_averages(adapters, node)


def _changes(adapter: Adapter) -> bool:
    new_tokens = adapter.vocabulary is not None  # one embedding serves all rows
    skips = any(hasattr(placed.module, "skips") for placed in adapter.placed)  # positions
    return (
        new_tokens
        or skips
        or any(c.method is not None for c in adapter.changed)
        or any(adapter.anatomy.layer_of(path) != "above" for path, _ in _fresh(adapter))
    )


def _check_averages(adapters: Adapters, node: Node) -> None:
    if isinstance(node, str):
        return
    if not isinstance(node, Average):
        for part in node:
            _check_averages(adapters, part)
        return
    virtual = [n for n in names_in(node) if _adds_tokens(adapters[n])]
    if virtual:
        raise AttachError(
            "virtual tokens have no average",
            offenders=[f"{n!r}: {', '.join(m.name for m in adapters[n].methods)}" for n in virtual],
            expected="adapters without a prefix or prompt",
            hint="a stack of them, activate(model, 'a', 'b')",
        )
    heads = {str(list(names_in(p))): _labels(adapters, p) for p in node.parts}
    if len({str(labels) for labels in heads.values()}) > 1:
        raise AttachError(
            "heads with different labels have no average",
            offenders=[f"{name}: {_classes(labels)}" for name, labels in heads.items()],
            expected="one set of labels in one order",
            hint="route(model, [...]), which gives each row the head of its adapter",
        )
    for part in node.parts:
        _check_averages(adapters, part)


def _adds_tokens(adapter: Adapter) -> bool:
    return any(p.site.kind in ("keyvalue", "embed") for p in adapter.placed)


def _classes(labels: Mapping[str, Any] | None) -> str:
    return "no head" if labels is None else ", ".join(labels["id2label"].values())


def compose(model: PreTrainedModel, adapters: Adapters, rows: Sequence[Node]) -> None:
    """Switch on the modules of all rows' adapters, and plan at each slot which rows they serve."""
    chosen = _chosen(adapters, rows)
    slots: dict[Slot, dict[str, tuple[str, ...]]] = {}
    for adapter in chosen:
        adapter.take_part(True)
        for placed in adapter.placed:
            keys = slots.setdefault(slot_at(model, placed.site), {})
            keys[adapter.name] = (*keys.get(adapter.name, ()), placed.key)
    for slot, keys in slots.items():
        slot.plan = BatchPlan([localized(node, keys) for node in rows], device_of(model) or "cpu")
    for path, variants in _variants(chosen).items():
        set_variants(model, path, variants, _last(rows, variants, model))
    _set_common_labels(model, [_labels(adapters, node) for node in rows])


def _last(
    rows: Sequence[Node], variants: Mapping[str, nn.Module], model: PreTrainedModel
) -> BatchPlan:
    """Of a stack, the head of the last adapter that has one."""
    keys = {name: (name,) for name in variants}
    nodes = [localized(node, keys) for node in rows]
    return BatchPlan(
        [n[-1:] if isinstance(n, tuple) else n for n in nodes], device_of(model) or "cpu"
    )


def clear_composition(model: PreTrainedModel, adapters: Iterable[Adapter]) -> None:
    """Undo `compose`; which modules are on stays as it is."""
    for adapter in adapters:
        for placed in adapter.placed:
            slot_at(model, placed.site).plan = None
    clear_variants(model)


def _chosen(adapters: Adapters, rows: Iterable[Node]) -> list[Adapter]:
    return [adapters[n] for n in dict.fromkeys(n for node in rows for n in names_in(node))]


def _variants(chosen: Iterable[Adapter]) -> dict[str, dict[str, nn.Module]]:
    """By the path of a module of the model, what stands in for it in each adapter."""
    found: dict[str, dict[str, nn.Module]] = {}
    for adapter in chosen:
        for path, module in (adapter.head.own if adapter.head else {}).items():
            found.setdefault(path, {})[adapter.name] = module
        fresh: dict[str, dict[str, nn.Parameter]] = {}
        for path, parameter in _fresh(adapter):
            host, _, attribute = path.rpartition(".")
            fresh.setdefault(host, {})[attribute] = parameter
        for host, parameters in fresh.items():
            module = with_parameters(adapter.model.get_submodule(host), parameters)
            found.setdefault(host, {})[adapter.name] = module
    return found


def _fresh(adapter: Adapter) -> list[tuple[str, nn.Parameter]]:
    """The parameters that the checkpoint of the backbone lacked, with their paths."""
    own = {id(p): c.own for c in adapter.changed if c.method is None for p in (c.original, c.own)}
    named = adapter.anatomy.parameters().items() if own else ()
    return [(path, own[id(p)]) for path, p in named if id(p) in own]


def head_of(adapters: Adapters, node: Node) -> Adapter | None:
    """The adapter whose head a composition has: the last one that has one; None: the model's."""
    return next((adapters[n] for n in reversed(list(names_in(node))) if adapters[n].head), None)


def _labels(adapters: Adapters, node: Node) -> dict[str, Any] | None:
    owner = head_of(adapters, node)
    return owner.head.labels if owner and owner.head else None


def _set_common_labels(model: PreTrainedModel, rows: Sequence[dict[str, Any] | None]) -> None:
    """The labels that all rows have; else as many numbered ones as the longest has."""
    own = {name: getattr(model.config, name) for name in LABEL_FIELDS}
    each = [labels if labels is not None else own for labels in rows]
    common = dict(each[0])
    if any(labels != common for labels in each):
        names = [f"LABEL_{i}" for i in range(max(len(labels["id2label"]) for labels in each))]
        kinds = {labels["problem_type"] for labels in each}
        common = {
            "id2label": dict(enumerate(names)),
            "label2id": {name: i for i, name in enumerate(names)},
            "problem_type": kinds.pop() if len(kinds) == 1 else None,
        }
    set_labels(model, common)


def activate_per_row(state: Attachments, rows: Sequence[Node]) -> None:
    """Let each row of a batch go through its composition; a single one is that of all rows.

    Raises:
        AttachError: a name that is not on the model, or adapters that cannot act together; what was
            active still is.
    """
    known_names(state, [name for node in rows for name in names_in(node)])
    stack = [state.adapters[name] for name in names_in(rows[0])] if is_stack(rows) else None
    if stack is None:
        check_composition(state.model, state.adapters, rows)
    else:
        _refuse_shared(stack)
    clear_composition(state.model, state.adapters.values())
    for adapter in state.adapters.values():
        adapter.switch(on=False)
    if stack is None:
        compose(state.model, state.adapters, rows)
    else:
        for adapter in stack:
            adapter.switch(on=True)
    state.rows = tuple(rows)


def _refuse_shared(chosen: list[Adapter]) -> None:
    seen: dict[int, str] = {}
    for adapter in chosen:
        for changed in adapter.changed:
            other = seen.setdefault(id(changed.original), adapter.name)
            if other != adapter.name:
                raise AttachError(
                    f"{other!r} and {adapter.name!r} both hold their own {changed.name}",
                    expected="at most one active adapter that changes a backbone parameter",
                )


def activate(model: PreTrainedModel, *parts: str | Average) -> None:
    """Make exactly these adapters active, in this order; without names, none: the bare backbone.

    `activate(model, "a", "b")` is a stack: b maps what a gave. `Average(["a", "b"])` is their mean
    (see there), and may stand in the place of a name. What trains does not change. The head is that
    of the last one that has one; of an average it is the mean of the heads' outputs.

    Raises:
        AttachError: a name that is not on the model, two adapters that change one parameter, or
            an average of what has none. What was active still is.
    """
    state = state_of(model)
    refuse_in_route(state)
    activate_per_row(state, (node_of(parts),))
