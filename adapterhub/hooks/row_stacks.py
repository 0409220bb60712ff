"""Modules of a slot as stacks: the rows of a batch in one product, each with its own module.

A stack is kept for later calls and used while its modules are unchanged: the same objects with the
same attributes and the same bytes in their tensors. Versions of tensors do not reflect changes
through `.data` or numpy, so bytes are compared, which takes a fraction of the time of a product.
Stacks with gradients, and stacks on other devices than the CPU, are made for each call.

Constant modules (`Adapter.hold`) are in banks, which are stacks of all such modules of one kind in
a slot. A batch gathers its rows' modules by place, whatever its mix. With several kinds in a batch,
the rows of each kind are one product.

Banks: constant modules of a slot, stacked once for all batches.

A bank has the modules of one kind, each at its own place, with room for more. A batch gathers the
modules of its rows by place, so a random mix of adapters does not need a new stack. Banks grow by
doubling, reuse the places of removed modules, and shrink when few are taken.

The applied state is replaced as a whole, so that passes of other threads read a consistent state.

Packed passes: one row with the tokens of several texts, each through its own adapter.

In the slots of projections and sublayers, the tokens of the row replace the rows of a batch. The
virtual tokens of prefixes and prompts are tokens of the row, at the front of their text: the keys
and values of a prefix replace the backbone's keys and values there.
"""

from __future__ import annotations

import copy
import ctypes
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from adapterhub.anatomy.sites import Site
from adapterhub.errors import AttachError
from adapterhub.hooks.composition import BankRows, BatchPlan, Composition, RowOrder
from adapterhub.methods.common.ops import RowStack, declared_stack
from adapterhub.methods.common.site_module import InputModule, SiteModule


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


KEPT = 2  # stacks of one slot
LARGEST = 1 << 24  # numbers of one stack: products of larger modules take longer than their calls
CALL, COPIES = 40_000, 3  # in copied numbers: the time of one module's call; copies of y by groups
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_CONTENT = ("_parameters", "_buffers", "_modules")
# For each column, the key or the module of each group; None if the group has none there.
Keys: TypeAlias = tuple[tuple[str | None, ...], ...]
Modules: TypeAlias = tuple[tuple[SiteModule | None, ...], ...]
Places: TypeAlias = tuple[tuple[int, int] | None, ...]
_NOWHERE = (-1, -1)


class StackedColumn(NamedTuple):
    """One module for each row; `example` is one of them, and all are at `site`."""

    stack: RowStack
    example: SiteModule
    site: Site


class StackedRows(NamedTuple):
    """The rows of a call in parts, with one module for each row; None for rows without one.

    `order` is None for one part with all rows.
    """

    parts: Sequence[StackedColumn | None]
    order: RowOrder | None = None

    def run(self, apply: Callable[..., Tensor], y: Tensor, *others: Any, dim: int = 0) -> Tensor:
        """Pass the rows of y through their parts.

        `apply(part, y, *others) -> y'` applies one part; tensors among `others` have the rows of y.
        """
        if self.order is None:
            return apply(self.parts[0], y, *others)
        copies = y.shape[dim] // self.order.rows
        split = [
            [None] * len(self.parts) if each is None else self.order.split(each, copies, dim)
            for each in (y, *others)
        ]
        pieces = [
            own if part is None else apply(part, own, *rest)
            for part, own, *rest in zip(self.parts, *split, strict=True)
        ]
        return self.order.join(pieces, copies, dim)


class Snapshot:
    """A snapshot of modules: attributes, hooks, children and tensors, on the CPU."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        parts = [part for module in modules for part in _parts(module)]
        named = (vars(part) for part in parts)
        content = (each for names in named for each in (names, *map(names.get, _CONTENT)) if each)
        self.dicts: list[dict[str, Any]] = list(content)
        self.values = list(_values(self.dicts))
        self.hooks = [vars(part)[name] for part in parts for name in _HOOKS]
        self.tensors = list(_tensors(modules))
        self.layouts = list(map(_layout, self.tensors))
        self.pointers = [tensor.data_ptr() for tensor in self.tensors]
        self.sizes = [tensor.nbytes for tensor in self.tensors]
        self.copies = [tensor.detach().clone() for tensor in self.tensors]
        self.copied = [copy.data_ptr() for copy in self.copies]

    def holds(self) -> bool:
        """Return whether nothing has changed."""
        return (
            not any(self.hooks)
            and sum(map(len, self.dicts)) == len(self.values)
            and all(map(operator.is_, _values(self.dicts), self.values))
            and list(map(_layout, self.tensors)) == self.layouts
            and self._same_bytes()
        )

    def _same_bytes(self) -> bool:
        if _MEMCMP is None:
            return all(map(torch.equal, self.tensors, self.copies))
        return not any(map(_MEMCMP, self.pointers, self.copied, self.sizes))


def _values(dicts: Sequence[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, dicts))


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _compare() -> Any:
    """Return C's memcmp, which holds Python's lock here; None if it is not found."""
    try:
        compare = ctypes.PyDLL(None).memcmp
    except (OSError, TypeError, AttributeError):
        return None
    compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return compare


_MEMCMP = _compare()


class KeptStack(NamedTuple):
    """The columns of a slot for some modules, in their compute dtype."""

    modules: Modules
    columns: list[StackedColumn]
    snapshot: Snapshot

    def fits(self, modules: Modules) -> bool:
        """Return whether the columns match the current state of these modules."""
        if self.modules != modules or _trained(self.snapshot.tensors):
            return False
        return self.snapshot.holds()


class RowStacks:
    """The stacks of one slot, by the keys of their modules."""

    def __init__(self) -> None:
        self.kept: dict[Any, KeptStack] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> RowStacks:
        return RowStacks()

    def __reduce__(self) -> tuple[type[RowStacks], tuple[()]]:
        return RowStacks, ()

    def clear(self) -> None:
        """Discard all stacks."""
        self.kept = {}

    def columns(
        self,
        keys: Keys,
        modules: Modules,
        sites: Mapping[str, Site],
        y: Tensor,
    ) -> list[StackedColumn] | None:
        """Return modules as stacks, one for each column.

        `keys` has one key of each group, or None, for each column; the modules change `y`.

        Returns: None if they cannot be stacked: modules of different kinds, or with hooks.
        """
        dtype = _computed_in(y)
        kept = self.kept.get((keys, dtype))
        if kept is not None and kept.fits(modules):
            return kept.columns
        if not all(_of_one_kind(*column, sites) for column in zip(keys, modules, strict=True)):
            return None  # checked first: a batch of different methods has some at every site
        present = [module for column in modules for module in column if module is not None]
        tensors = list(_tensors(present))
        trained = _trained(tensors)
        if any(map(hooked, present)) or not all(map(plain, tensors)):
            return None
        # Before the stack is made, so that it detects concurrent changes by another thread.
        with torch.inference_mode(False), torch.set_grad_enabled(trained):
            snapshot = None if trained else _snapshot(present)
            if snapshot is None:
                made = list(_stacked(keys, modules, sites, dtype))
                return made if len(made) == len(keys) else None
        with torch.inference_mode(False), torch.no_grad():
            made = list(_stacked(keys, modules, sites, dtype))
        if len(made) < len(keys):
            return None
        self._keep((keys, dtype), KeptStack(modules, made, snapshot))
        return made

    def _keep(self, name: tuple[Keys, torch.dtype | None], stack: KeptStack) -> None:
        others = [(key, kept) for key, kept in self.kept.items() if key != name]
        self.kept = dict([*others[1 - KEPT :], (name, stack)])


def _stacked(
    keys: Keys, modules: Modules, sites: Mapping[str, Site], dtype: torch.dtype | None
) -> Iterator[StackedColumn]:
    """Yield the stacks of columns, until one cannot be stacked."""
    for names, column in zip(keys, modules, strict=True):
        present = [module for module in column if module is not None]
        largest = max(sum(t.numel() for t in _tensors([m])) for m in present)
        stack_modules = declared_stack(present)
        if stack_modules is None or largest * len(column) > LARGEST:
            return
        stack = stack_modules(column)
        if stack is None:
            return
        place = next(sites[name] for name in names if name is not None)
        yield StackedColumn(stack.cast(dtype) if dtype else stack, present[0], place)


def _of_one_kind(
    names: Sequence[str | None], column: Sequence[SiteModule | None], sites: Mapping[str, Site]
) -> bool:
    """Return whether the modules of a column declare the same stack, place and inputs."""
    present = [(n, m) for n, m in zip(names, column, strict=True) if n and m]
    kinds = {(module.training, *what_is_read(module, sites[name])) for name, module in present}
    return len(kinds) == 1 and declared_stack(column) is not None


def _snapshot(modules: Sequence[nn.Module]) -> Snapshot | None:
    """Return a snapshot of modules whose bytes can be compared."""
    if all(t.device.type == "cpu" and t.is_contiguous() for t in _tensors(modules)):
        return Snapshot(modules)
    return None


def _tensors(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    for module in modules:
        for part in _parts(module):
            yield from (p for p in part._parameters.values() if p is not None)
            yield from (b for b in part._buffers.values() if b is not None)


def _parts(module: nn.Module) -> Iterable[nn.Module]:
    """Return a module and its submodules, if any."""
    return module.modules() if module._modules else (module,)


def _trained(tensors: Iterable[Tensor]) -> bool:
    """Return whether any of the tensors requires gradients."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def hooked(module: nn.Module) -> bool:
    """Return whether a call of the module differs from its class's forward."""
    named = (vars(part) for part in _parts(module))
    return any(names.get(name) for names in named for name in (*_HOOKS, "forward"))


def places_of(banked: BankedModules, plan: BatchPlan) -> list[Places] | None:
    """Return the places of a plan's modules, by column; None if one of them is not in a bank."""
    found = banked.places
    columns = [
        tuple([None if key is None else found.get(key, _NOWHERE) for key in column])
        for column in plan.columns or ()
    ]
    return None if any(_NOWHERE in column for column in columns) else columns


def from_banks(
    banked: BankedModules,
    plan: BatchPlan,
    columns: Sequence[Places],
    y: Tensor,
    wanted: Callable[[SiteModule, Site], bool],
) -> list[StackedRows] | None:
    """Gather the modules of each row of a plan from banks, by column.

    `wanted(module, site)` tells whether to compute modules of a kind now. Returns: None if copying
    modules takes longer than calling them.
    """
    found, dtype = [], _computed_in(y)
    for places in columns:
        order, rows_by_bank = plan.by_bank(places)
        parts: list[StackedColumn | None] = []
        for rows in rows_by_bank:
            bank = None if rows.bank is None else banked.banks[rows.bank]
            if bank is None or not wanted(bank.example, bank.site):
                parts.append(None)
                continue
            copied = bank.stack.numbers * len(rows.places) if rows.modules > 1 else 0
            if copied > min(LARGEST, CALL * rows.modules + COPIES * y.numel()):
                return None
            stack = bank.at(rows)
            own = stack.tensors[0]
            if own.device != y.device:
                return None
            stack = stack if dtype in (None, own.dtype) else stack.cast(dtype)
            parts.append(StackedColumn(stack, bank.example, bank.site))
        if any(parts):
            found.append(StackedRows(parts, order if len(parts) > 1 else None))
    return found


def _computed_in(y: Tensor) -> torch.dtype | None:
    """Return the compute dtype of modules, from their input; None if autocast chooses it."""
    return None if torch.is_autocast_enabled(y.device.type) else y.dtype


def pays(column: StackedColumn, plan: BatchPlan, y: Tensor) -> bool:
    """Return whether copying modules for their rows is faster than calling each of them."""
    copied = column.stack.numbers * plan.rows
    return plan.group_of_row is None or copied < CALL * len(plan.groups) + COPIES * y.numel()


def by_rows(column: StackedColumn, rows: Tensor | None) -> StackedRows:
    """Expand a column of groups' modules to rows; `rows[i]` is the group of row i."""
    own = column if rows is None else column._replace(stack=column.stack.at(rows))
    return StackedRows([own])


def global_hooks() -> bool:
    """Return whether torch calls hooks for every module."""
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


ROOM = 4  # places of a new bank
SMALL = 1 << 16  # numbers of a module: smaller ones share a bank, larger ones a bank of their size
_ALIKE = 4  # size ratio allowed within one bank

# Returns the module with a key, in its stackable form.
FormOf = Callable[[str], SiteModule]


class Bank(NamedTuple):
    """Modules of one kind.

    Attributes:
        kind: the properties shared by all modules.
        stack: the modules at their places.
        keys: the key of the module at each place; None: the place is free.
        widest: modules without values that have the bank's width when stacked.
        site: the site of one of them.
    """

    kind: tuple[object, ...]
    stack: RowStack
    keys: tuple[str | None, ...]
    widest: tuple[SiteModule, ...]
    site: Site

    @property
    def example(self) -> SiteModule:
        """A module of the kind, without values."""
        return self.widest[0]

    def taken(self) -> list[str]:
        """Return the keys of the modules."""
        return [key for key in self.keys if key is not None]

    def row_bytes(self) -> int:
        """Return the memory size of a module."""
        return sum(tensor[0].nbytes for tensor in self.stack.tensors)

    def at(self, rows: BankRows) -> RowStack:
        """Return a stack with the module of each row."""
        if rows.modules > 1:
            return self.stack.at(rows.numbers)
        place, count = rows.places[0], len(rows.places)
        shared = (each.narrow(0, place, 1) for each in self.stack.tensors)  # not copied
        return RowStack(tuple(t.expand(count, *t.shape[1:]) for t in shared), self.stack.compute)

    def with_module(self, key: str, form: SiteModule, form_of: FormOf) -> Bank | None:
        """Return the bank with one more module, or None if it cannot be stacked with these."""
        made = _bank_stack([*self.widest, form])  # wide enough for all of them and the new one
        if made is None:
            return None
        if list(map(_row_form, made.tensors)) != list(map(_row_form, self.stack.tensors)):
            keys = self.taken()
            made = _bank_stack([*map(form_of, keys), form])
            if made is None:
                return None
            widest = (*self.widest, _without_values(form))
            return Bank(self.kind, made, (*keys, key), widest, self.site)._with_room()
        bank = self if None in self.keys else self._resized(2 * len(self.keys))
        place = bank.keys.index(None)
        for tensor, row in zip(bank.stack.tensors, made.tensors, strict=True):
            tensor[place] = row[-1]
        return bank._replace(keys=(*bank.keys[:place], key, *bank.keys[place + 1 :]))

    def without(self, key: str) -> Bank | None:
        """Return the bank without a module; None if it was the only one."""
        bank = self._replace(keys=tuple(None if each == key else each for each in self.keys))
        taken = len(bank.taken())
        if not taken:
            return None
        few = len(bank.keys) > ROOM and 4 * taken <= len(bank.keys)
        return bank._resized(len(bank.keys) // 2) if few else bank

    def _resized(self, room: int) -> Bank:
        """Return the bank with this many places, the first ones taken."""
        places = [place for place, key in enumerate(self.keys) if key is not None]
        tensors = []
        for before in self.stack.tensors:
            tensor = before.new_zeros(room, *before.shape[1:])
            tensor[: len(places)] = before[places]
            tensors.append(tensor)
        keys = (*self.taken(), *(None,) * (room - len(places)))
        return self._replace(stack=RowStack(tuple(tensors), self.stack.compute), keys=keys)

    def _with_room(self) -> Bank:
        return self._resized(max(ROOM, 1 << (len(self.keys) - 1).bit_length()))


def _row_form(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape[1:], tensor.dtype, tensor.device


def _bank_stack(forms: Sequence[SiteModule]) -> RowStack | None:
    """Stack modules of one class, unless their settings differ."""
    stack_modules = declared_stack(forms)
    return None if stack_modules is None else stack_modules(forms)


def _without_values(form: SiteModule) -> SiteModule:
    """Return a copy of a module with zeros that take no memory."""
    twin = copy.deepcopy(form)
    for part in twin.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                empty = parameter.new_zeros(()).expand(parameter.shape)
                part._parameters[name] = nn.Parameter(empty, requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.new_zeros(()).expand(buffer.shape)
    return twin


class BankedModules(NamedTuple):
    """The banks of a slot, and the bank and the place of each module, by its key."""

    places: Mapping[str, tuple[int, int]]
    banks: tuple[Bank | None, ...]

    def replaced(self, number: int, bank: Bank | None) -> BankedModules:
        """Return the banks with one of them replaced."""
        banks = (*self.banks[:number], bank, *self.banks[number + 1 :])
        others = {key: place for key, place in self.places.items() if place[0] != number}
        keys = bank.keys if bank is not None else ()
        own = {key: (number, place) for place, key in enumerate(keys) if key is not None}
        return BankedModules(others | own, banks)


class BankPlace(NamedTuple):
    """The number of a module's bank, None without one, and the bytes that it takes there."""

    bank: int | None
    bytes: int


class Banks:
    """The banks of one slot; a copy of the slot has none."""

    def __init__(self) -> None:
        self.banked = BankedModules({}, ())

    def __deepcopy__(self, memo: dict[int, Any]) -> Banks:
        return Banks()

    def __reduce__(self) -> tuple[type[Banks], tuple[()]]:
        return Banks, ()

    def add(self, key: str, site: Site, form_of: FormOf) -> None:
        """Stack a module with the others of its kind, unless its class declares no stack.

        `form_of` returns the module with a key in its stackable form, also for other keys.
        """
        self.remove(key)
        with torch.inference_mode(False), torch.no_grad():
            form = form_of(key)
            kind = _kind(form, site)
            if kind is None:
                return
            for number, bank in enumerate(self.banked.banks):
                if bank is not None and bank.kind == kind:
                    changed = bank.with_module(key, form, form_of)
                    if changed is not None:
                        self.banked = self.banked.replaced(number, changed)
                        return
            made = _bank_stack([form])
            if made is None:
                return
            new = Bank(kind, made, (key,), (_without_values(form),), site)._with_room()
            numbers = [n for n, bank in enumerate(self.banked.banks) if bank is None]
            number = numbers[0] if numbers else len(self.banked.banks)
            self.banked = self.banked.replaced(number, new)

    def remove(self, key: str) -> None:
        """Free the place of a module, if it has one."""
        place = self.banked.places.get(key)
        bank = None if place is None else self.banked.banks[place[0]]
        if place is not None and bank is not None:
            with torch.inference_mode(False), torch.no_grad():  # other rows are written later
                self.banked = self.banked.replaced(place[0], bank.without(key))

    def place(self, key: str) -> BankPlace:
        """Return the place of a module."""
        place = self.banked.places.get(key)
        bank = None if place is None else self.banked.banks[place[0]]
        if place is None or bank is None:
            return BankPlace(None, 0)
        return BankPlace(place[0], bank.row_bytes())


def _kind(form: SiteModule, site: Site) -> tuple[object, ...] | None:
    """Return the kind shared by the modules of one bank; None for a module that is not stacked."""
    stack_modules = declared_stack([form])
    tensors: list[Tensor] = [*form.parameters(), *form.buffers()]
    if stack_modules is None or not all(map(plain, tensors)):
        return None
    size, alike = sum(tensor.numel() for tensor in tensors), SMALL
    while alike < size:
        alike *= _ALIKE
    return stack_modules, alike, *what_is_read(form, site)


def what_is_read(module: SiteModule, site: Site) -> tuple[object, ...]:
    """Return the inputs of a module and their place, which modules of one stack share."""
    read = (getattr(module, "source", None), getattr(module, "positions", None))
    return isinstance(module, InputModule), *read, site.part, site.input_host


def plain(tensor: Tensor) -> bool:
    """Return whether a tensor can be a row of a stack."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
