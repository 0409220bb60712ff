"""Compositions: the adapters to apply and how they combine, in four forms.

    "a"                                  y' = a(y)
    ("a", "b")                           y' = b(a(y)), a stack
    Average(["a", "b"], [0.3, 0.7])      y' = 0.3 a(y) + 0.7 b(y)
    ()                                   y' = y, the bare backbone

They nest, and apply at each site separately: y is the host's output, and a(y) the output of the
module of adapter `a` at this site; y itself if `a` has none here. A route assigns one composition
to each row of a batch.

Several threads may compute with one model. `route` sets the modules that apply in a slot for the
calls inside it, in a context variable. A forward pass without a route uses the modules that are
active when it begins. Values shared by the hooks of a pass belong to its thread.

torch.compile cannot trace context variables. A compiled model reads a copy that belongs to the
thread that opened the route.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias, Union
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from adapterhub.errors import AttachError

Composition: TypeAlias = Union[str, tuple["Composition", ...], "Average"]


@dataclass(frozen=True)
class Average:
    """The weighted mean of the outputs of several adapters: y' = sum_i w_i y'_i, at each site.

    For updates that are added to y, such as LoRA's, this is the mean of the updates. Each part is a
    name or a composition. The weights sum to 1; by default they are equal.

    Raises:
        AttachError: no parts, a different number of weights, or weights that do not sum to 1.
    """

    parts: tuple[Composition, ...]
    weights: tuple[float, ...] = ()

    def __init__(self, parts: Iterable[Any], weights: Iterable[float] | None = None) -> None:
        listed = (parts,) if isinstance(parts, str) else tuple(parts)
        compositions = tuple(map(parse_composition, listed))
        n = len(compositions)
        shares = tuple(weights) if weights is not None else (1 / (n or 1),) * n
        object.__setattr__(self, "parts", compositions)
        object.__setattr__(self, "weights", shares)
        if not n or len(shares) != n or not math.isclose(sum(shares), 1, abs_tol=1e-6):
            raise AttachError(
                f"an average of {n} adapters with weights {list(shares)}",
                expected="one or more adapters and one weight for each, which sum to 1",
                hint='Average(["a", "b"], weights=[0.3, 0.7])',
            )


def parse_composition(value: Any) -> Composition:
    """Parse a composition from a user: None or () is the bare backbone, a list is a stack.

    Raises:
        AttachError: a value of another type.
    """
    if value is None:
        return ()
    if isinstance(value, str | Average):
        return value
    if isinstance(value, Sequence):
        return tuple(map(parse_composition, value))
    raise AttachError(
        f"{value!r} is not the name of an adapter",
        expected="a name, a list of names (a stack), Average([...]), or None (the bare backbone)",
    )


def adapter_names(composition: Composition) -> Iterator[str]:
    """Yield the names in a composition, repeated ones too."""
    if isinstance(composition, str):
        yield composition
        return
    parts = composition.parts if isinstance(composition, Average) else composition
    for part in parts:
        yield from adapter_names(part)


def has_average(composition: Composition) -> bool:
    """Return whether a composition contains an average."""
    return isinstance(composition, Average) or (
        isinstance(composition, tuple) and any(map(has_average, composition))
    )


def is_stack(compositions: Sequence[Composition]) -> bool:
    """Return whether all rows have the same stack of different adapters, without an average."""
    names = list(adapter_names(compositions[0]))
    one = len(set(compositions)) == 1 and not has_average(compositions[0])
    return one and len(set(names)) == len(names)


def localize(composition: Composition, keys: Mapping[str, tuple[str, ...]]) -> Composition:
    """Replace the adapters of a composition by their modules in one slot.

    Returns:
        A composition of keys; () if no adapter has a module here.
    """
    if isinstance(composition, str):
        return keys.get(composition, ())
    if isinstance(composition, Average):
        parts = tuple(localize(part, keys) for part in composition.parts)
        return Average(parts, composition.weights) if any(part != () for part in parts) else ()
    inner = (localize(part, keys) for part in composition)
    # Nested stacks become one stack, so that equal rows compare equal.
    return tuple(p for part in inner for p in (part if isinstance(part, tuple) else (part,)))


class RowOrder:
    """The rows of a batch in parts that are computed together.

    `members` has the rows of each part. A batch of k times as many rows as the route repeats each
    row k times, as `generate` does for beams and a multiple-choice model for choices.
    """

    def __init__(self, members: Sequence[Sequence[int]], device: torch.device | str) -> None:
        self.sizes = [len(rows) for rows in members]
        self.rows = sum(self.sizes)
        self.numbers = [row for rows in members for row in rows]
        self.sorted = self.numbers == list(range(self.rows))
        self.device = device

    @cached_property
    def order(self) -> Tensor:
        """The rows of all parts, one part after the other."""
        return _index(self.numbers, self.device)

    @cached_property
    def inverse(self) -> Tensor:
        """The place of each row in the concatenated parts."""
        places = {row: place for place, row in enumerate(self.numbers)}
        return _index([places[row] for row in range(self.rows)], self.device)

    def split(self, value: Any, copies: int, dim: int = 0) -> list[Any]:
        """Split a tensor into the rows of each part.

        A value without the batch's rows goes to each part unchanged. The batch repeats each row
        `copies` times.

        Returns:
            One value for each part.
        """
        batch = copies * self.rows
        if not isinstance(value, Tensor) or value.ndim <= dim or value.shape[dim] != batch:
            return [value] * len(self.sizes)
        if not self.sorted:
            value = value.index_select(dim, _repeated(self.order, copies, value.device))
        return list(value.split([size * copies for size in self.sizes], dim))

    def split_call(
        self, args: Sequence[Any], named: Mapping[str, Any], copies: int
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Split the arguments of a call for the rows of each part."""
        parts = [self.split(value, copies) for value in args]
        named_parts = {name: self.split(value, copies) for name, value in named.items()}
        return [
            (
                tuple(part[n] for part in parts),
                {name: part[n] for name, part in named_parts.items()},
            )
            for n in range(len(self.sizes))
        ]

    def join(self, pieces: Sequence[Tensor], copies: int, dim: int = 0) -> Tensor:
        """Put the rows of all parts back into their order.

        `pieces` has one tensor for each part.
        """
        joined = torch.cat(list(pieces), dim)
        if self.sorted:
            return joined
        return joined.index_select(dim, _repeated(self.inverse, copies, joined.device))


class BankRows(NamedTuple):
    """The rows of a batch whose modules are in one bank; `bank` is None for rows without any.

    `places` are the places of the rows' modules in the bank, also as a tensor. `modules` is the
    number of distinct modules.
    """

    bank: int | None
    places: tuple[int, ...]
    numbers: Tensor
    modules: int


class BatchPlan(RowOrder):
    """Assignment of the rows of a batch to compositions in one slot.

    Rows with equal compositions form a group and are computed together. `columns` has the keys of
    the groups' modules in order: first modules, second modules, ... `group_of_row` has the number
    of each row's group; None: row i is group i.
    """

    def __init__(
        self, compositions: Sequence[Composition], device: torch.device | str = "cpu"
    ) -> None:
        members: dict[Hashable, list[int]] = {}
        for row, composition in enumerate(compositions):
            members.setdefault(composition, []).append(row)
        super().__init__(list(members.values()), device)
        self.groups: tuple[Any, ...] = tuple(members)  # the distinct compositions
        self.columns = _columns(self.groups)
        numbers = {row: n for n, rows in enumerate(members.values()) for row in rows}
        self.group_numbers = [numbers[row] for row in range(self.rows)]
        self._banked: dict[Hashable, tuple[RowOrder, list[BankRows]]] = {}

    @cached_property
    def group_of_row(self) -> Tensor | None:
        """The number of each row's group."""
        one_each = self.group_numbers == list(range(self.rows))
        return None if one_each else _index(self.group_numbers, self.device)

    def by_bank(
        self, places: tuple[tuple[int, int] | None, ...]
    ) -> tuple[RowOrder, list[BankRows]]:
        """Return the rows of each bank.

        `places` has the bank of each group's module and its place there; None without a module.
        Slots with equal places share a result.
        """
        if places not in self._banked:
            self._banked[places] = self._by_bank(places)
        return self._banked[places]

    def _by_bank(
        self, places: tuple[tuple[int, int] | None, ...]
    ) -> tuple[RowOrder, list[BankRows]]:
        rows_by_bank: dict[int | None, list[int]] = {}
        of_row = [places[group] for group in self.group_numbers]
        for row, place in enumerate(of_row):
            rows_by_bank.setdefault(place and place[0], []).append(row)
        parts = []
        for bank, rows in rows_by_bank.items():
            taken = tuple(place[1] for place in map(of_row.__getitem__, rows) if place)
            parts.append(BankRows(bank, taken, _index(taken, self.device), len({*taken})))
        return RowOrder(list(rows_by_bank.values()), self.device), parts

    def copies(self, batch: int, where: str) -> int:
        """Return how often a batch of this size repeats each row of the route.

        Raises:
            AttachError: the size is not a multiple of the route's rows.
        """
        if batch % self.rows:
            raise AttachError(
                f"the route has {self.rows} rows, the batch at {where} has {batch}",
                expected="one row of the batch for each row of the route (or k, as for beams)",
                hint="some backbones pass more than the batch's rows through a module (DeBERTa its "
                "relative positions): adapt other sites there",
            )
        return batch // self.rows


class PrefixSpan(NamedTuple):
    """Tokens of a row that are virtual tokens of a prefix.

    `key` is its module, `start` the first such token of the row, `first` its number in the prefix.
    """

    key: str
    start: int
    first: int
    tokens: int


class TokenPlan(BatchPlan):
    """Assignment of the tokens of a packed row to compositions in one slot.

    `spans` are the virtual tokens, in the slot of an attention.
    """

    def __init__(
        self,
        compositions: Sequence[Composition],
        device: torch.device | str = "cpu",
        spans: Sequence[PrefixSpan] = (),
    ) -> None:
        super().__init__(compositions, device)
        self.spans = tuple(spans)

    def copies(self, batch: int, where: str) -> int:
        """Return 1: a packed row has the tokens of its plan.

        Raises:
            AttachError: the number of tokens differs.
        """
        if batch != self.rows:
            raise AttachError(f"a packed row of {self.rows} tokens; {where} got {batch}")
        return 1


def _columns(groups: Sequence[Any]) -> tuple[tuple[str | None, ...], ...] | None:
    """Return the modules of groups by column: the first of each group, the second, and so on.

    Returns None if a group is an average. A group without a module in a column has None there.
    """
    if any(
        not isinstance(each, tuple) or not all(isinstance(k, str) for k in each) for each in groups
    ):
        return None
    return tuple(zip_longest(*groups))


def by_row(tensor: Tensor, rows: int, dim: int) -> Tensor:
    """Return the tokens of each row of a route: (rows, tokens, d), also where rows are repeated.

    `tensor`: (batch, ..., d), with the batch in dimension `dim`.
    """
    return tensor.transpose(0, dim).reshape(rows, -1, tensor.shape[-1])


def as_before(rows: Tensor, like: Tensor, dim: int) -> Tensor:
    """Undo `by_row`.

    `rows`: (rows, tokens, d); `like` has the batch's shape, except for d.
    """
    return rows.reshape(like.transpose(0, dim).shape).transpose(0, dim)


def _index(numbers: Sequence[int], device: torch.device | str) -> Tensor:
    """Return numbers of rows as a tensor that passes with gradients can use."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.long, device=device)


def _repeated(order: Tensor, copies: int, device: torch.device) -> Tensor:
    """Return the row numbers of a batch that repeats each row `copies` times."""
    order = order.to(device)
    if copies == 1:
        return order
    return (order[:, None] * copies + torch.arange(copies, device=device)).flatten()


class AppliedModules(NamedTuple):
    """The modules that apply in one slot: their keys, and a plan where rows differ.

    `variants` has modules, by key, that are called instead of the host and are not in the slot.
    """

    keys: tuple[str, ...] = ()
    plan: BatchPlan | None = None
    variants: Mapping[str, nn.Module] | None = None


NO_MODULES = AppliedModules()
# The applied modules by slot. No module applies in a slot that is not listed.
SlotTable: TypeAlias = Mapping[Any, AppliedModules]


class ModelScope:
    """The identity of a model with adapters, the key of its entry in a context."""

    @property
    def traced(self) -> dict[str, Any]:
        """Values that hooks share in a compiled model, until its pass ends."""
        return _TRACED.setdefault(self, {})


# Not an attribute: its tensors would be compiled for their sizes, like parameters.
_TRACED: dict[ModelScope, dict[str, Any]] = {}


class ContextEntry(NamedTuple):
    """The modules applied to a model in this context; `owner` is the route or pass that set it."""

    table: SlotTable
    owner: Any


_Entries: TypeAlias = Mapping[ModelScope, ContextEntry]
_ENTRIES: ContextVar[_Entries | None] = ContextVar("adapterhub_entries", default=None)
_thread = threading.local()  # opened, entries: of its open routes; kept: by slot and name


def current_entry(scope: ModelScope) -> ContextEntry | None:
    """Return the entry of a model in this context; None: its active modules apply."""
    compiling = torch.compiler.is_compiling()
    entries = getattr(_thread, "entries", None) if compiling else _ENTRIES.get()
    return None if entries is None else entries.get(scope)


def set_entry(scope: ModelScope, entry: ContextEntry | None) -> None:
    """Set the entry of a model in this context; None: its active modules apply."""
    others = {k: v for k, v in (_ENTRIES.get() or {}).items() if k is not scope}
    entries = others if entry is None else others | {scope: entry}
    _ENTRIES.set(entries or None)


@contextmanager
def applying(scope: ModelScope, entry: ContextEntry) -> Iterator[None]:
    """Apply modules to a model in a block: in its context, and in models compiled on its thread."""
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
    """Return the entries applied by this thread, in order."""
    return getattr(_thread, "opened", ())


def _set_opened(opened: tuple[tuple[ModelScope, ContextEntry], ...]) -> None:
    _thread.opened = opened
    _thread.entries = dict(opened) or None


def forget_traced(scope: ModelScope) -> None:
    """Discard the values that hooks kept in a compiled model."""
    _TRACED.pop(scope, None)


def kept_values(slot: Any) -> dict[str, Any]:
    """Return the values shared by the hooks of a slot in this thread, by name."""
    if torch.compiler.is_compiling():  # one graph: nothing runs in between
        return slot.traced  # type: ignore[no-any-return]
    kept: WeakKeyDictionary[Any, dict[str, Any]] | None = getattr(_thread, "kept", None)
    if kept is None:
        kept = _thread.kept = WeakKeyDictionary()
    return kept.setdefault(slot, {})


class RecomputedInContext:
    """A checkpointing function whose recomputation has the context of the first computation.

    Autograd may recompute in another thread, where no route is open.
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
    """Restore the applied modules and the kept values of an earlier call."""
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
