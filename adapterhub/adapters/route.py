"""What is attached to a model, and which of it applies: to all rows, or to each row of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn

from adapterhub.adapters.activation import StackActivation, head_of, route_activation_of
from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.attachable import require_model
from adapterhub.adapters.foundations import adapters_below
from adapterhub.adapters.passes import STRUCTURE_LOCK
from adapterhub.adapters.state import (
    ModelState,
    find_state,
    get_state,
    refuse_in_route,
    require_attached,
)
from adapterhub.errors import AttachError
from adapterhub.hooks.composition import Average, Composition, adapter_names, parse_composition

RouteRow: TypeAlias = str | Average | tuple[str | Average, ...] | None


@dataclass(frozen=True)
class Routed:
    """An open route.

    Attributes:
        rows: the composition of each row.
        labels: the class names of each row's head, () without one.
        classes: their number, None if the heads of all rows have as many.
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
    largest head; classes that a row's head lacks are -inf, and `split` removes them:

        with route(model, ["polite", "urgent", None]) as routed:
            logits = routed.split(model(**batch).logits)

    In `generate`, beams and samples of a row follow its route: a batch of k times as many rows
    repeats each row k times. Routes may be nested; attach, activate and detach are refused inside.

    A route applies to the calls of its own thread or asyncio task: each thread may have its own. A
    route of one adapter for all rows may be one that changes backbone parameters, which all
    threads share; then no other thread may have a route open.

    Yields:
        The route: labels of each row, and `split`.

    Raises:
        AttachError: no rows, a name that is not attached, an adapter that changes parameters of
            the backbone for some of the rows, or for all while another thread has a route open. In
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
            activation = route_activation_of(state.model, state.adapters, compositions)
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
    """Return the adapters that are attached to a model, by name, in the order of attaching.

    `adapter.active` is whether one applies.

    Raises:
        AttachError: not a model of transformers.
    """
    require_model(model)
    state = find_state(model)
    return {} if state is None else dict(state.adapters)


def disabled(model: nn.Module) -> AbstractContextManager[None]:
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


def only_foundations(model: nn.Module) -> AbstractContextManager[None]:
    """Apply only the adapters that are below the active ones: what those were trained on top of.

    Returns:
        A context, as that of `disabled`.
    """
    active = [adapter for adapter in adapters(model).values() if adapter.active]
    tops = [adapter for adapter in active if not any(adapter in adapters_below(a) for a in active)]
    return _only(model, [below for top in tops for below in adapters_below(top)])


@contextmanager
def _only(model: nn.Module, kept: Sequence[Adapter]) -> Iterator[None]:
    """Open a route of no adapter but those that are kept, for any number of rows."""
    require_model(model)
    with ExitStack() as opened:
        with STRUCTURE_LOCK:
            if state := find_state(model):
                opened.enter_context(state.route(StackActivation(kept)))
        yield


def activate(model: nn.Module, *parts: str | Average) -> None:
    """Make exactly these adapters active, in this order; without names, none.

    `activate(model, "a", "b")` is a stack: b gets the output of a. `Average(["a", "b"])` is their
    mean, and may be used like a name. What trains does not change. The head is that of the last
    adapter that has one; for an average, the mean of the heads' outputs.

    In other threads it takes effect with the next forward pass. A pass during which heads, labels
    or backbone parameters are exchanged raises an `AttachError`.

    Raises:
        AttachError: a name that is not attached, two adapters that train one parameter, or an
            average of adapters that cannot be averaged. What was active stays active.
    """
    state = get_state(model)
    refuse_in_route(state)
    state.activate(parse_composition(parts))
