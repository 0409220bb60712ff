"""Send each row of a batch through its own adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from adapterhub.adapters.activate import activate_per_row, head_of
from adapterhub.adapters.state import Attachments, state_of
from adapterhub.errors import AttachError
from adapterhub.hooks.composition import Average, Node, node_of

Row = str | Average | tuple[str | Average, ...] | None


@dataclass(frozen=True)
class Routed:
    """A route: the composition of each row; the names of its head's classes, () where it has none;
    and their number, None where the heads of all rows have as many."""

    rows: tuple[Node, ...]
    labels: tuple[tuple[str, ...], ...]
    classes: tuple[int | None, ...]

    def split(self, logits: Tensor) -> list[Tensor]:
        """Each row's own logits. logits: (rows, ..., most classes) -> (..., the row's classes)."""
        if len(logits) != len(self.rows):
            raise AttachError(
                f"logits of {len(logits)} rows, the route is of {len(self.rows)}",
                expected="outputs.logits of a batch that went through this route",
            )
        return [row[..., :size] for row, size in zip(logits, self.classes, strict=True)]


@contextmanager
def route(model: PreTrainedModel, rows: Sequence[Row]) -> Iterator[Routed]:
    """Inside this context row i of a batch goes through the adapter `rows[i]`.

    A row is a name, a tuple of names (a stack), an `Average`, or None (the bare backbone, with the
    model's own head). Each row is computed as it would be alone: projections, sublayers, prefixes
    and prompts of any lengths, and the task head. Logits have as many columns as the largest head;
    a class that a row's head does not have is -inf there, and `split` cuts it off:

        with route(model, ["polite", "urgent", None]) as routed:
            logits = routed.split(model(**batch).logits)

    In `generate` a row's beams and samples follow it: a batch that is k times as long has each row
    k times in a row. Compute gradients inside the context too. Routes may be nested; attach,
    activate and detach are refused inside. What was active before is active after.

    Raises:
        AttachError: no rows, a name that is not on the model, or an adapter that changes parameters
            of the backbone. From the model's forward: a batch of another number of rows.
    """
    state = state_of(model)
    if isinstance(rows, str) or not rows:
        raise AttachError(
            f"{rows!r} names no rows",
            expected="one adapter, or None, for each row of the batch",
            hint='route(model, ["a", "b", None])',
        )
    nodes = tuple(map(node_of, rows))
    before = state.rows
    activate_per_row(state, nodes)
    state.routes += 1
    try:
        yield _routed(state, nodes)
    finally:
        state.routes -= 1
        activate_per_row(state, before)


def _routed(state: Attachments, nodes: tuple[Node, ...]) -> Routed:
    owners = [head_of(state.adapters, node) for node in nodes]
    labels = tuple(owner.labels if owner else () for owner in owners)
    heads = [a.head for a in state.adapters.values() if a.head]
    bare = heads[0].original_labels if heads else {"id2label": {}}
    sizes = [len((o.head.labels if o and o.head else bare)["id2label"]) for o in owners]
    return Routed(nodes, labels, tuple(sizes if len(set(sizes)) > 1 else [None] * len(sizes)))
