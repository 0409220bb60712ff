"""Send each row of a batch through its own adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor
from transformers import PreTrainedModel

from adapterhub.adapters.activation import head_of, route_activation_of
from adapterhub.adapters.passes import STRUCTURE_LOCK
from adapterhub.adapters.state import ModelState, get_state, require_attached
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
def route(model: PreTrainedModel, rows: Sequence[RouteRow]) -> Iterator[Routed]:
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
