"""What is attached to a model, and the bare backbone for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

from transformers import PreTrainedModel

from adapterhub.adapters.activation import StackActivation
from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.attachable import require_model
from adapterhub.adapters.foundations import adapters_below
from adapterhub.adapters.passes import STRUCTURE_LOCK
from adapterhub.adapters.state import find_state


def adapters(model: PreTrainedModel) -> dict[str, Adapter]:
    """Return the adapters that are attached to a model, by name, in the order of attaching.

    `adapter.active` is whether one applies.

    Raises:
        AttachError: not a model of transformers.
    """
    require_model(model)
    state = find_state(model)
    return {} if state is None else dict(state.adapters)


def disabled(model: PreTrainedModel) -> AbstractContextManager[None]:
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
    return _only(model, ())


def only_foundations(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Apply only the adapters that are below the active ones: what those were trained on top of.

    Returns:
        A context, as that of `disabled`.
    """
    active = [adapter for adapter in adapters(model).values() if adapter.active]
    tops = [adapter for adapter in active if not any(adapter in adapters_below(a) for a in active)]
    return _only(model, [below for top in tops for below in adapters_below(top)])


@contextmanager
def _only(model: PreTrainedModel, kept: Sequence[Adapter]) -> Iterator[None]:
    """Open a route of no adapter but those that are kept, for any number of rows."""
    require_model(model)
    with ExitStack() as opened:
        with STRUCTURE_LOCK:
            if state := find_state(model):
                opened.enter_context(state.route(StackActivation(kept)))
        yield
