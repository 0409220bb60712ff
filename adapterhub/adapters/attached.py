"""What is attached to a model, and the bare backbone for a while."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from adapterhub.adapters.activation import StackActivation
from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.attachable import require_model
from adapterhub.adapters.foundations import adapters_below
from adapterhub.adapters.passes import STRUCTURE_LOCK
from adapterhub.adapters.state import ModelState, find_state, get_state
from adapterhub.hooks.forward_pass import AppliedEntry, ContextEntry
from adapterhub.interrupts import Reversal


def adapters(model: PreTrainedModel) -> dict[str, Adapter]:
    """Return the adapters that are attached to a model, by name, in the order of attaching.

    `adapter.active` is whether one applies.

    Raises:
        AttachError: not a model of transformers.
    """
    require_model(model)
    state = find_state(model)
    return {} if state is None else dict(state.adapters)


class DisabledAdapters(Reversal[None]):
    """Applies no adapter inside: what `disabled` returns."""

    lock = STRUCTURE_LOCK

    def __init__(self, model: PreTrainedModel, kept: Sequence[Adapter] = ()) -> None:
        self.model, self.kept = model, kept
        self.opened: tuple[ModelState, StackActivation] | None = None
        self.entry: AppliedEntry | None = None

    def enter(self) -> None:
        """Open a route of no adapter but those that are kept, for any number of rows."""
        require_model(self.model)
        if find_state(self.model) is None:
            return
        state, nothing = get_state(self.model), StackActivation(self.kept)
        self.opened = state, nothing
        state.open(nothing)
        self.entry = AppliedEntry(state.scope, ContextEntry(nothing.table, nothing))
        self.entry.enter()

    def leave(self) -> None:
        """Close it."""
        if self.entry is not None:
            self.entry.leave()
        if self.opened is not None:
            state, nothing = self.opened
            state.close(nothing)


def disabled(model: PreTrainedModel) -> DisabledAdapters:
    """Apply no adapter inside this context: the bare backbone, with its own head and labels.

        with disabled(model):
            logits = model(**batch).logits

    It is a route (`adapterhub.route`) without adapters: it applies to the calls of its own thread
    or asyncio task, may be nested in routes and they in it, and attach, activate and detach are
    refused inside. What applied before applies again afterwards, also after an error.

    Returns:
        A context, which is entered once.

    Raises:
        AttachError: on entering, not a model of transformers; the active adapter changes parameters
            of the backbone, and another thread has a route open.
    """
    return DisabledAdapters(model)


def only_foundations(model: PreTrainedModel) -> DisabledAdapters:
    """Apply only the adapters that are below the active ones: what those were trained on top of.

    Returns:
        A context, as that of `disabled`.
    """
    active = [adapter for adapter in adapters(model).values() if adapter.active]
    tops = [adapter for adapter in active if not any(adapter in adapters_below(a) for a in active)]
    return DisabledAdapters(model, [below for top in tops for below in adapters_below(top)])
