"""What belongs to one call of a model: several threads may compute with one model.

Which modules apply in a slot is set by `route` for the calls inside it, in a context variable; a
forward pass without a route takes what is active when it begins. What the hooks of a pass keep for
each other belongs to its thread.

torch.compile cannot trace context variables. A compiled model reads a copy that belongs to the
thread that opened the route.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn

from adapterhub.hooks.composition import BatchPlan


class AppliedModules(NamedTuple):
    """The modules that apply in one slot: their keys, and a plan where rows differ.

    `variants` has modules, by key, that are called instead of the host and are not in the slot.
    """

    keys: tuple[str, ...] = ()
    plan: BatchPlan | None = None
    variants: Mapping[str, nn.Module] | None = None


NO_MODULES = AppliedModules()
# By slot: what applies there. A slot that is not listed has no modules that apply.
SlotTable: TypeAlias = Mapping[Any, AppliedModules]


class ModelScope:
    """Identifies a model with adapters among those that a context has an entry for."""

    @property
    def traced(self) -> dict[str, Any]:
        """What hooks keep for each other in a compiled model, until its pass ends."""
        return _TRACED.setdefault(self, {})


# Not an attribute: tensors of one would be compiled for their sizes, as parameters are.
_TRACED: dict[ModelScope, dict[str, Any]] = {}


class ContextEntry(NamedTuple):
    """What applies to a model in this context; `owner` is the route or the pass that set it."""

    table: SlotTable
    owner: Any


_Entries: TypeAlias = Mapping[ModelScope, ContextEntry]
_ENTRIES: ContextVar[_Entries | None] = ContextVar("adapterhub_entries", default=None)
_thread = threading.local()  # opened, entries: of its open routes; kept: by slot and name


def current_entry(scope: ModelScope) -> ContextEntry | None:
    """Return what applies to a model in this context, or None: what is active on it."""
    compiling = torch.compiler.is_compiling()
    entries = getattr(_thread, "entries", None) if compiling else _ENTRIES.get()
    return None if entries is None else entries.get(scope)


def set_entry(scope: ModelScope, entry: ContextEntry | None) -> None:
    """Set what applies to a model in this context; None: what is active on it."""
    others = {k: v for k, v in (_ENTRIES.get() or {}).items() if k is not scope}
    entries = others if entry is None else others | {scope: entry}
    _ENTRIES.set(entries or None)


@contextmanager
def applying(scope: ModelScope, entry: ContextEntry) -> Iterator[None]:
    """Apply modules to a model inside, in this context and in compiled models of this thread."""
    before, applied = current_entry(scope), (scope, entry)
    try:
        set_entry(scope, entry)
        _set_opened((*_opened(), applied))
        yield
    finally:
        # The routes of coroutines, which share a thread, end in any order.
        _set_opened(tuple(each for each in _opened() if each is not applied))
        set_entry(scope, before)


def _opened() -> tuple[tuple[ModelScope, ContextEntry], ...]:
    """Return the entries that this thread applies, in order."""
    return getattr(_thread, "opened", ())


def _set_opened(opened: tuple[tuple[ModelScope, ContextEntry], ...]) -> None:
    _thread.opened = opened
    _thread.entries = dict(opened) or None


def forget_traced(scope: ModelScope) -> None:
    """Forget what hooks kept in a compiled model."""
    _TRACED.pop(scope, None)


def kept_values(slot: Any) -> dict[str, Any]:
    """Return what the hooks of a slot keep for each other in this thread, by name."""
    if torch.compiler.is_compiling():  # one graph: nothing runs in between
        return slot.traced  # type: ignore[no-any-return]
    kept: WeakKeyDictionary[Any, dict[str, Any]] | None = getattr(_thread, "kept", None)
    if kept is None:
        kept = _thread.kept = WeakKeyDictionary()
    return kept.setdefault(slot, {})


class RecomputedInContext:
    """A checkpointing function whose recomputation has the context of the first computation.

    Autograd may recompute in a thread of its own, where no route is open.
    """

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Checkpoint a function."""
        entries, kept = _ENTRIES.get(), _copied(getattr(_thread, "kept", None) or {})
        computed = False

        def run(*inputs: Any, **options: Any) -> Any:
            nonlocal computed
            if not computed:
                computed = True
                return function(*inputs, **options)
            with _earlier_context(entries, kept):
                return function(*inputs, **options)

        return self.checkpoint(run, *args, **kwargs)


@contextmanager
def _earlier_context(
    entries: _Entries | None, kept: Mapping[Any, dict[str, Any]]
) -> Iterator[None]:
    """Set what applied, and what hooks kept, in an earlier call."""
    before = _ENTRIES.get(), getattr(_thread, "kept", None)
    _ENTRIES.set(entries)
    _thread.kept = _copied(kept)
    try:
        yield
    finally:
        own, _thread.kept = before
        _ENTRIES.set(own)


def _copied(kept: Mapping[Any, dict[str, Any]]) -> WeakKeyDictionary[Any, dict[str, Any]]:
    return WeakKeyDictionary({slot: dict(values) for slot, values in kept.items() if values})
