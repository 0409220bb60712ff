"""The attached adapters of a model, and the ones that apply to all rows or to each row of a batch.

A packed row holds several texts: its route sends each token through the adapter of its text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from adapterhub.adapters.activation import (
    PerRowActivation,
    StackActivation,
    adapters_below,
    changes_shared_state,
    head_of,
    route_activation_of,
)
from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.model_methods import STRUCTURE_LOCK
from adapterhub.adapters.state import (
    ModelState,
    find_state,
    get_state,
    refuse_in_route,
    require_attached,
    require_model,
)
from adapterhub.errors import AttachError
from adapterhub.hooks.composition import (
    Average,
    BatchPlan,
    Composition,
    PrefixSpan,
    TokenPlan,
    adapter_names,
    parse_composition,
)
from adapterhub.hooks.keyvalue import KeyValueSlot
from adapterhub.hooks.prompt import PromptSlot
from adapterhub.hooks.slot import Slot
from adapterhub.methods.common.site_module import (
    EmbeddingModule,
    InputModule,
    KeyValueModule,
    OutputModule,
)

RouteRow: TypeAlias = str | Average | tuple[str | Average, ...] | None


@dataclass(frozen=True)
class Routed:
    """An open route.

    Attributes:
        rows: the composition of each row.
        labels: the class names of each row's head; () without a head.
        classes: the number of classes of each row; None if all rows have the same number.
    """

    rows: tuple[Composition, ...]
    labels: tuple[tuple[str, ...], ...]
    classes: tuple[int | None, ...]

    def split(self, logits: Tensor) -> list[Tensor]:
        """Return each row's own logits: (rows, ..., most classes) -> (..., the row's classes).

        Raises:
            AttachError: the logits have a different number of rows.
        """
        if len(logits) != len(self.rows):
            raise AttachError(
                f"logits of {len(logits)} rows, the route has {len(self.rows)}",
                expected="outputs.logits of a batch that went through this route",
            )
        return [row[..., :size] for row, size in zip(logits, self.classes, strict=True)]


@contextmanager
def route(model: nn.Module, rows: Sequence[RouteRow]) -> Iterator[Routed]:
    """Send row i of a batch through the adapter `rows[i]`, inside this context.

    A row is a name, a tuple of names (a stack), an `Average`, or None (the bare backbone, with the
    model's own head). Each row's output equals its output when run alone: projections, sublayers,
    prefixes and prompts of any length, and the task head. Logits have as many columns as the
    largest head. Classes that a row's head lacks are -inf, and `split` removes them:

        with route(model, ["polite", "urgent", None]) as routed:
            logits = routed.split(model(**batch).logits)

    In `generate`, beams and samples of a row follow its route: a batch of k times as many rows
    repeats each row k times. Routes may be nested; attach, activate and detach are refused inside.

    A route applies to the calls of its own thread or asyncio task: each thread may have its own
    route. If all rows use one adapter, it may change backbone parameters. All threads share those,
    so no other thread may have a route open then.

    Yields:
        The route: labels of each row, and `split`.

    Raises:
        AttachError: no rows; a name that is not attached; or an adapter that changes backbone
            parameters for some of the rows, or for all while another thread has a route open. In
            the model's forward: a batch with a different number of rows.
    """
    state = get_state(model)
    if isinstance(rows, str) or not rows:
        raise AttachError(
            f"{rows!r} is not a list of rows",
            expected="one adapter, or None, for each row of the batch",
            hint='route(model, ["a", "b", None])',
        )
    compositions = tuple(map(parse_composition, rows))
    with ExitStack() as opened:
        with STRUCTURE_LOCK:
            require_attached(state, [name for each in compositions for name in adapter_names(each)])
            activation = route_activation_of(state.backbone, state.adapters, compositions)
            opened.enter_context(state.route(activation))
            routed = _routed(state, compositions)
        yield routed


def _routed(state: ModelState, compositions: tuple[Composition, ...]) -> Routed:
    owners = [head_of(state.adapters, composition) for composition in compositions]
    labels = tuple(owner.labels if owner else () for owner in owners)
    heads = [adapter.head for adapter in state.adapters.values() if adapter.head]
    bare = heads[0].original_labels if heads else {"id2label": {}}
    sizes = [len((o.head.labels if o and o.head else bare)["id2label"] or ()) for o in owners]
    one_size = len(set(sizes)) == 1
    return Routed(compositions, labels, (None,) * len(sizes) if one_size else tuple(sizes))


def adapters(model: nn.Module) -> dict[str, Adapter]:
    """Return the adapters attached to a model, by name, in the order of attaching.

    `adapter.active` is True if the adapter applies.

    Raises:
        AttachError: the object is neither a model of transformers nor another module.
    """
    require_model(model)
    state = find_state(model)
    return {} if state is None else dict(state.adapters)


def disabled(model: nn.Module) -> AbstractContextManager[None]:
    """Apply no adapter inside this context: the bare backbone, with its own head and labels.

        with disabled(model):
            logits = model(**batch).logits

    The context is a route (`adapterhub.route`) without adapters. It applies to the calls of its own
    thread or asyncio task. Routes may be nested in it, and it in routes. Attach, activate and
    detach are refused inside. The previous adapters apply again afterwards, also after an error.

    Returns:
        A context to enter once.

    Raises:
        AttachError: on entering, the object is neither a model of transformers nor another module,
            or the active adapter changes backbone parameters while another thread has a route open.
    """
    return _only(model, ())


def only_foundations(model: nn.Module) -> AbstractContextManager[None]:
    """Apply only the adapters below the active ones, which these were trained on top of.

    Returns:
        A context to enter once, as in `disabled`.
    """
    active = [adapter for adapter in adapters(model).values() if adapter.active]
    tops = [adapter for adapter in active if not any(adapter in adapters_below(a) for a in active)]
    return _only(model, [below for top in tops for below in adapters_below(top)])


@contextmanager
def _only(model: nn.Module, kept: Sequence[Adapter]) -> Iterator[None]:
    """Open a route with only the kept adapters, for any number of rows."""
    require_model(model)
    with ExitStack() as opened:
        with STRUCTURE_LOCK:
            if state := find_state(model):
                opened.enter_context(state.route(StackActivation(kept)))
        yield


def activate(model: nn.Module, *parts: str | Average) -> None:
    """Activate exactly these adapters, in this order; without names, deactivate all.

    `activate(model, "a", "b")` is a stack: b gets the output of a. `Average(["a", "b"])` is their
    mean, and may be used like a name. `requires_grad` does not change. The head of the last adapter
    with a head applies; for an average, the mean of the heads' outputs.

    In other threads, the change takes effect with the next forward pass. A pass raises an
    `AttachError` if heads, labels or backbone parameters are exchanged during it.

    Raises:
        AttachError: a name that is not attached, two adapters that train one parameter, or an
            average of adapters that cannot be averaged. The previous adapters stay active.
    """
    state = get_state(model)
    refuse_in_route(state)
    state.activate(parse_composition(parts))


_KEPT = 8  # routes of one model: a batch of texts stays the same for many steps


class TokenRun(NamedTuple):
    """Consecutive tokens of a packed row that belong to one text.

    `adapter` is None for the bare backbone. `first` is the position of the first token in its text,
    counted from the virtual tokens, which come first.
    """

    adapter: str | None
    tokens: int
    first: int


@dataclass(frozen=True)
class PackedAdapter:
    """The virtual tokens that an adapter puts in front of its texts: its prefix and its prompt.

    `prefix` counts the virtual tokens without a position. `prompt` holds embeddings, (length, d).
    """

    adapter: Adapter
    prefix: int
    prompt: Tensor | None

    @property
    def virtual(self) -> int:
        """The number of virtual tokens."""
        return self.prefix + (0 if self.prompt is None else len(self.prompt))


def unpackable(adapter: Adapter) -> str:
    """Return the reason an adapter cannot be applied to packed tokens, or "" if it can."""
    if changes_shared_state(adapter) or adapter.changed:
        return "it changes what all texts share"
    if adapter.head or adapter.pooling or adapters_below(adapter):
        return "it has a head, or adapters below it"
    modules = [placed.module for placed in adapter.placed]
    known = (OutputModule, InputModule, KeyValueModule, EmbeddingModule)
    other = next((m for m in modules if not isinstance(m, known)), None)
    if other is not None:
        return f"{type(other).__name__} reads more than the tokens of one text"
    if any(module.token_sets for module in modules):
        return "it changes tokens by their places in a text, which packed rows do not show"
    outputs = adapter.backbone.output_embedding
    hosts = {adapter.model.get_submodule(placed.site.host) for placed in adapter.placed}
    if outputs in hosts:
        return "it changes the output embeddings, which see the last tokens alone"
    return _prefix_problem(adapter)


def _prefix_problem(adapter: Adapter) -> str:
    prefixes = [p for p in adapter.placed if isinstance(p.module, KeyValueModule)]
    virtual = prefixes or any(isinstance(p.module, EmbeddingModule) for p in adapter.placed)
    config = adapter.backbone.text_config
    if virtual and _slides(config):
        return "its virtual tokens would leave the sliding window"
    if not prefixes:
        return ""
    lengths = {len(each.module()[0]) for each in prefixes}
    if len(lengths) > 1 or len(prefixes) != config.num_hidden_layers:
        return "its prefixes are not of one length, one in each layer"
    return ""


def _slides(config: Any) -> bool:
    """Return whether a layer attends to fewer tokens than a text may have."""
    window = getattr(config, "sliding_window", None)
    if not window or window >= getattr(config, "max_position_embeddings", 1 << 30):
        return False
    kinds = getattr(config, "layer_types", None)
    return kinds is None or any("full" not in kind for kind in kinds)


@torch.no_grad()
def packed_adapter(adapter: Adapter) -> PackedAdapter:
    """Return the virtual tokens that a packable adapter puts in front of its texts."""
    modules = [placed.module for placed in adapter.placed]
    prefix = next((len(m()[0]) for m in modules if isinstance(m, KeyValueModule)), 0)
    prompts = [m() for m in modules if isinstance(m, EmbeddingModule)]
    return PackedAdapter(adapter, prefix, torch.cat(prompts) if prompts else None)


class PackedActivation(PerRowActivation):
    """One adapter, or none, for each token of a packed row.

    `spans` lists the virtual tokens of prefixes, by adapter: their positions in the row, and their
    numbers in the prefix.
    """

    plan_class = TokenPlan

    def __init__(
        self,
        state: ModelState,
        runs: Sequence[TokenRun],
        spans: Mapping[str, Sequence[tuple[int, int, int]]],
    ) -> None:
        of_runs = [() if run.adapter is None else run.adapter for run in runs]
        each = [name for name, run in zip(of_runs, runs, strict=True) for _ in range(run.tokens)]
        super().__init__(state.backbone, state.adapters, each)
        self.spans = spans

    def prepare(self) -> None:
        """Plan the tokens in each slot once."""
        if not self.table:
            super().prepare()

    def _plan_of(self, slot: Slot, keys: Mapping[str, tuple[str, ...]]) -> BatchPlan | None:
        if not isinstance(slot, KeyValueSlot):
            return None if isinstance(slot, PromptSlot) else self._plan(keys)
        spans = [
            PrefixSpan(key, *span)
            for name, some in keys.items()
            for key in some
            for span in self.spans.get(name, ())
        ]
        return TokenPlan(((),), spans=spans) if spans else None

    def close(self) -> None:
        """Keep the plans, since the same texts follow."""


@dataclass
class PackedRoutes:
    """The routes of one model's packed rows.

    Attributes:
        model: the model.
        prefixes: the virtual tokens without positions, by adapter.
    """

    model: nn.Module
    prefixes: dict[str, int] = field(default_factory=dict)
    _kept: dict[Any, PackedActivation] = field(default_factory=dict)

    def open(self, runs: Sequence[TokenRun]) -> AbstractContextManager[None]:
        """Return a context that sends the tokens of a packed row through these adapters."""
        names = {run.adapter for run in runs if run.adapter is not None}
        if not names:
            return disabled(self.model)
        state = get_state(self.model)
        spans: dict[str, list[tuple[int, int, int]]] = {}
        start = 0
        for run in runs:
            inside = self.prefixes.get(run.adapter or "", 0) - run.first
            if inside > 0:
                spans.setdefault(str(run.adapter), []).append(
                    (start, run.first, min(inside, run.tokens))
                )
            start += run.tokens
        adapters = frozenset(state.adapters[name] for name in names)
        key = (
            tuple((run.adapter, run.tokens) for run in runs),
            tuple((name, *each) for name, each in spans.items()),
            adapters,
        )
        activation = self._kept.pop(key, None) or PackedActivation(state, runs, spans)
        attached = set(state.adapters.values())
        others = [(k, kept) for k, kept in self._kept.items() if attached.issuperset(k[-1])]
        self._kept = dict([*others[1 - _KEPT :], (key, activation)])
        return state.route(activation)
