"""Which adapters act, and how: one vocabulary of four forms.

    "a"                                  y' = a(y)
    ("a", "b")                           y' = b(a(y)), a stack
    Average(["a", "b"], [0.3, 0.7])      y' = 0.3 a(y) + 0.7 b(y)
    ()                                   y' = y, the bare backbone

They nest, and hold at each site on its own: y is what the host gave there, a(y) what the module of
the adapter `a` makes of it, y itself where `a` has none. A route gives each row of a batch one of
these forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, Union

import torch
from torch import Tensor

from adapterhub.errors import AttachError

Node: TypeAlias = Union[str, tuple["Node", ...], "Average"]
Step = Callable[..., Tensor]


@dataclass(frozen=True)
class Average:
    """The weighted mean of what several adapters give: y' = sum_i w_i y'_i, at each site.

    For updates that are added to y, as LoRA's, that is the mean of the updates. Each part is a
    name, or again a composition; the weights sum to 1, and are equal where they are not given.

    Raises:
        AttachError: no parts, another number of weights, or a sum that is not 1.
    """

    parts: tuple[Node, ...]
    weights: tuple[float, ...] = ()

    def __init__(self, parts: Iterable[Any], weights: Iterable[float] | None = None) -> None:
        given = (parts,) if isinstance(parts, str) else tuple(parts)
        nodes = tuple(map(node_of, given))
        shares = tuple(weights) if weights is not None else (1 / (len(nodes) or 1),) * len(nodes)
        object.__setattr__(self, "parts", nodes)
        object.__setattr__(self, "weights", shares)
        if not nodes or len(shares) != len(nodes) or not math.isclose(sum(shares), 1, abs_tol=1e-6):
            raise AttachError(
                f"an average of {len(nodes)} adapters with the weights {list(shares)}",
                expected="one weight for each of one or more adapters, that sum to 1",
                hint='Average(["a", "b"], weights=[0.3, 0.7])',
            )


def node_of(given: Any) -> Node:
    """A composition as the user wrote it: None or () is the bare backbone, a sequence a stack.

    Raises:
        AttachError: something else.
    """
    if given is None:
        return ()
    if isinstance(given, str | Average):
        return given
    if isinstance(given, Sequence):
        return tuple(map(node_of, given))
    raise AttachError(
        f"{given!r} does not name an adapter",
        expected="a name, several in line, Average([...]), or None for the bare backbone",
    )


def names_in(node: Node) -> Iterator[str]:
    """The names in a composition, each time that they occur."""
    if isinstance(node, str):
        yield node
        return
    for part in node.parts if isinstance(node, Average) else node:
        yield from names_in(part)


def averages_in(node: Node) -> bool:
    """Whether an average is anywhere in a composition."""
    return isinstance(node, Average) or (
        isinstance(node, tuple) and any(averages_in(part) for part in node)
    )


def localized(node: Node, keys: Mapping[str, tuple[str, ...]]) -> Node:
    """A composition of adapters as one of the modules that sit at one place; () if none does."""
    if isinstance(node, str):
        return keys.get(node, ())
    if isinstance(node, Average):
        parts = tuple(localized(part, keys) for part in node.parts)
        return Average(parts, node.weights) if any(part != () for part in parts) else ()
    inner = (localized(part, keys) for part in node)
    # Stacks in a stack are one stack, so that equal rows are seen to be equal.
    return tuple(p for part in inner for p in (part if isinstance(part, tuple) else (part,)))


def through(node: Node, y: Tensor, step: Callable[[str, Tensor], Tensor]) -> Tensor:
    """What a composition of modules makes of y, where `step` applies the module of one key."""
    if isinstance(node, str):
        return step(node, y)
    if isinstance(node, Average):
        terms = [w * through(p, y, step) for p, w in zip(node.parts, node.weights, strict=True)]
        return sum(terms[1:], terms[0])
    for part in node:
        y = through(part, y, step)
    return y


class BatchPlan:
    """What happens at one place: one composition for all rows, or one for each.

    Rows with equal compositions are computed together, as a batch of their own; the cost is that of
    the rows. A batch that is k times as long as the route has each of its rows k times in a row, as
    `generate` makes it for beams and a multiple-choice model for choices.
    """

    def __init__(self, rows: Sequence[Node], device: torch.device | str = "cpu") -> None:
        self.rows = tuple(rows)
        members: dict[Hashable, list[int]] = {}
        for number, node in enumerate(rows):
            members.setdefault(node, []).append(number)
        self.nodes: tuple[Any, ...] = tuple(members)
        self.sizes = [len(numbers) for numbers in members.values()]
        order = [number for numbers in members.values() for number in numbers]
        self.sorted = order == list(range(len(order)))
        self.order = torch.tensor(order, device=device)
        self.inverse = self.order.argsort()

    def copies(self, rows: int, where: str) -> int:
        """How often each row of the route stands in a batch of so many rows.

        Raises:
            AttachError: it is no whole number.
        """
        if rows % len(self.rows):
            raise AttachError(
                f"the route is of {len(self.rows)} rows, and {rows} come to {where}",
                expected="a batch with one row for each row of the route (or k rows, as for beams)",
                hint="some backbones send more than the batch's rows through a module (DeBERTa its "
                "relative positions): there, adapt other sites",
            )
        return rows // len(self.rows)

    def split(self, tensor: Any, copies: int, dim: int = 0) -> list[Any]:
        """A tensor's rows, group by group. What is no tensor of the batch's rows is each group's
        as it is."""
        rows = copies * len(self.rows)
        if not isinstance(tensor, Tensor) or tensor.ndim <= dim or tensor.shape[dim] != rows:
            return [tensor] * len(self.nodes)
        if not self.sorted:
            tensor = tensor.index_select(dim, _repeated(self.order, copies, tensor.device))
        return list(tensor.split([size * copies for size in self.sizes], dim))

    def join(self, pieces: Sequence[Tensor], copies: int, dim: int = 0) -> Tensor:
        """The rows of all groups in their own order again."""
        joined = torch.cat(list(pieces), dim)
        if self.sorted:
            return joined
        return joined.index_select(dim, _repeated(self.inverse, copies, joined.device))

    def run(self, step: Step, y: Tensor, others: Sequence[Any], dim: int, where: str) -> Tensor:
        """y': y through each row's composition; `step(key, y, *others)` applies one module."""
        if len(self.nodes) == 1:
            return through(self.nodes[0], y, lambda key, y: step(key, y, *others))
        copies = self.copies(y.shape[dim], where)
        pieces = [self.split(tensor, copies, dim) for tensor in (y, *others)]
        done = [
            through(node, own_y, lambda key, y, own=own: step(key, y, *own))  # type: ignore[misc]
            for node, own_y, *own in zip(self.nodes, *pieces, strict=True)
        ]
        return self.join(done, copies, dim)


def _repeated(order: Tensor, copies: int, device: torch.device) -> Tensor:
    """Row numbers of a batch in which each row stands `copies` times."""
    order = order.to(device)
    if copies == 1:
        return order
    return (order[:, None] * copies + torch.arange(copies, device=device)).flatten()


def is_stack(rows: Sequence[Node]) -> bool:
    """Whether all rows go through one and the same line of adapters, without an average."""
    names = list(names_in(rows[0]))
    return len(set(rows)) == 1 and not averages_in(rows[0]) and len(set(names)) == len(names)
