"""Rows of a batch with a module each, computed as stacks: one product for the modules of a kind.

Constant modules (`Adapter.hold`) of a slot are in banks. A bank has the modules of one kind, each
at its own place, with room for more. A batch gathers the modules of its rows by place, so a random
mix of adapters does not need a new stack, and the rows of each kind are one product. Banks grow by
doubling, reuse the places of removed modules, and shrink when few are taken.

Other modules may change between calls, also through `.data` or numpy, which no version of a tensor
shows. They are stacked for one call, if all rows have a module of one kind. This takes no longer
than a comparison with an earlier stack.

Modules are called one after the other where copying them takes longer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from adapterhub.anatomy.sites import Site
from adapterhub.hooks.composition import BankRows, BatchPlan, RowOrder
from adapterhub.methods.common.ops import RowStack, declared_stack
from adapterhub.methods.common.site_module import InputModule, OutputModule, SiteModule

LARGEST = 1 << 24  # copied numbers: products of larger modules take longer than their calls
CALL, COPIES = 40_000, 3  # in copied numbers: the time of one module's call; copies of y by groups
STACKING = 2  # calls of a module: the time of a stack that is made for one call, on a CPU
# The bank and the place of each group's module; None without one.
Places: TypeAlias = tuple[tuple[int, int] | None, ...]
_NOWHERE = (-1, -1)
# Tells whether to compute modules of a kind now, from one of them and its site.
Wanted: TypeAlias = Callable[[SiteModule, Site], bool]


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


def from_modules(
    plan: BatchPlan,
    placed: Callable[[str], nn.Module],
    sites: Mapping[str, Site],
    y: Tensor,
    wanted: Wanted,
) -> list[StackedRows] | None:
    """Stack the modules of each row of a plan for this call, by column.

    `placed(key)` returns the module with a key. Returns: None if a column has modules of different
    kinds or with hooks, or copying modules takes longer than calling them.
    """
    results, dtype, rows = [], _computed_in(y), plan.group_of_row
    for column in plan.columns or ():
        modules: dict[str, Any] = {key: placed(key) for key in column if key is not None}
        key, example = next(iter(modules.items()))
        stack_modules = declared_stack([*modules.values()])
        kinds = {(each.training, *what_is_read(each, sites[k])) for k, each in modules.items()}
        if stack_modules is None or len(kinds) > 1:
            return None
        if not wanted(example, sites[key]):
            continue
        copies, calls = 0 if rows is None else plan.rows, len(plan.groups)
        if y.device.type == "cpu":  # on a GPU, the launches of a call take longer than its stack
            copies, calls = copies + 2 * len(column), calls - STACKING
        for module in modules.values():
            numbers = _numbers(module)
            if numbers is None or numbers * len(column) > LARGEST:
                return None
            if not _pays(numbers * copies, calls, y):
                return None
        stack = stack_modules([None if k is None else modules[k] for k in column])
        if stack is None:
            return None
        stack = stack if dtype is None else stack.cast(dtype)
        stack = stack if rows is None else stack.at(rows)
        results.append(StackedRows([StackedColumn(stack, example, sites[key])]))
    return results


def hooked(module: nn.Module) -> bool:
    """Return whether a call of the module differs from its class's forward."""
    return _numbers(module) is None


def _numbers(module: nn.Module) -> int | None:
    """Count the values of a module that can be in a stack.

    Returns: None if it has hooks, a forward of its own, or tensors of other kinds.
    """
    numbers, parts = 0, [module]
    for part in parts:  # without the iterators of torch, since it runs in each call
        own = vars(part)
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
            return None
        for tensor in (*own["_parameters"].values(), *own["_buffers"].values()):
            if tensor is not None:
                if not plain(tensor):
                    return None
                numbers += tensor.numel()
        parts += [child for child in own["_modules"].values() if child is not None]
    return numbers


def _computed_in(y: Tensor) -> torch.dtype | None:
    """Return the compute dtype of modules, from their input; None if autocast chooses it."""
    return None if torch.is_autocast_enabled(y.device.type) else y.dtype


def _pays(copied: int, modules: int, y: Tensor) -> bool:
    """Return whether copying so many numbers is faster than calling so many modules."""
    return copied <= min(LARGEST, CALL * modules + COPIES * y.numel())


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
        stack = _bank_stack([*self.widest, form])  # wide enough for all of them and the new one
        if stack is None:
            return None
        if list(map(_row_form, stack.tensors)) != list(map(_row_form, self.stack.tensors)):
            keys = self.taken()
            stack = _bank_stack([*map(form_of, keys), form])
            if stack is None:
                return None
            widest = (*self.widest, _without_values(form))
            return Bank(self.kind, stack, (*keys, key), widest, self.site)._with_room()
        bank = self if None in self.keys else self._resized(2 * len(self.keys))
        place = bank.keys.index(None)
        for tensor, row in zip(bank.stack.tensors, stack.tensors, strict=True):
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


class BankPlace(NamedTuple):
    """The number of a module's bank, None without one, and the bytes that it takes there."""

    bank: int | None
    bytes: int


class Banks(NamedTuple):
    """The constant modules of one slot; a copy of the slot has none.

    Banks are replaced as a whole, so that passes of other threads read a consistent state.

    Attributes:
        places: the number of the bank, and the place in it, of each module by its key.
        banks: the banks; None: the number is free.
    """

    places: Mapping[str, tuple[int, int]]
    banks: tuple[Bank | None, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> Banks:
        return NO_BANKS

    def __reduce__(self) -> tuple[type[Banks], tuple[Any, ...]]:
        return Banks, ({}, ())

    def places_of(self, plan: BatchPlan) -> list[Places] | None:
        """Return the places of a plan's modules, by column; None if one of them is not here."""
        columns = [
            tuple([None if key is None else self.places.get(key, _NOWHERE) for key in column])
            for column in plan.columns or ()
        ]
        return None if any(_NOWHERE in column for column in columns) else columns

    def rows(
        self, plan: BatchPlan, columns: Sequence[Places], y: Tensor, wanted: Wanted
    ) -> list[StackedRows] | None:
        """Gather the modules of each row of a plan, by column.

        Returns: None if copying modules takes longer than calling them.
        """
        results, dtype = [], _computed_in(y)
        for places in columns:
            order, rows_by_bank = plan.by_bank(places)
            parts: list[StackedColumn | None] = []
            for rows in rows_by_bank:
                bank = None if rows.bank is None else self.banks[rows.bank]
                if bank is None or not wanted(bank.example, bank.site):
                    parts.append(None)
                    continue
                copied = bank.stack.numbers * len(rows.places) if rows.modules > 1 else 0
                if not _pays(copied, rows.modules, y):
                    return None
                stack = bank.at(rows)
                own = stack.tensors[0]
                if own.device != y.device:
                    return None
                stack = stack if dtype in (None, own.dtype) else stack.cast(dtype)
                parts.append(StackedColumn(stack, bank.example, bank.site))
            if any(parts):
                results.append(StackedRows(parts, order if len(parts) > 1 else None))
        return results

    def with_module(self, key: str, site: Site, form_of: FormOf) -> Banks:
        """Return the banks with a module beside the others of its kind.

        A module whose class declares no stack is left out. `form_of` returns the module with a key
        in its stackable form, also for other keys.
        """
        others = self.without(key)
        with torch.inference_mode(False), torch.no_grad():
            form = form_of(key)
            kind = _kind(form, site)
            if kind is None:
                return others
            for number, bank in enumerate(others.banks):
                if bank is not None and bank.kind == kind:
                    changed = bank.with_module(key, form, form_of)
                    if changed is not None:
                        return others._replaced(number, changed)
            stack = _bank_stack([form])
            if stack is None:
                return others
            new = Bank(kind, stack, (key,), (_without_values(form),), site)._with_room()
            number = [*others.banks, None].index(None)
            return others._replaced(number, new)

    def without(self, key: str) -> Banks:
        """Return the banks without a module, whose place is free."""
        number, _ = self.places.get(key, _NOWHERE)
        bank = self.banks[number] if number >= 0 else None
        if bank is None:
            return self
        with torch.inference_mode(False), torch.no_grad():  # other rows are written later
            return self._replaced(number, bank.without(key))

    def place(self, key: str) -> BankPlace:
        """Return the place of a module."""
        number, _ = self.places.get(key, _NOWHERE)
        bank = self.banks[number] if number >= 0 else None
        return BankPlace(None, 0) if bank is None else BankPlace(number, bank.row_bytes())

    def _replaced(self, number: int, bank: Bank | None) -> Banks:
        banks = (*self.banks[:number], bank, *self.banks[number + 1 :])
        others = {key: place for key, place in self.places.items() if place[0] != number}
        keys = bank.keys if bank is not None else ()
        own = {key: (number, place) for place, key in enumerate(keys) if key is not None}
        return Banks(others | own, banks)


NO_BANKS = Banks({}, ())


def _kind(form: SiteModule, site: Site) -> tuple[object, ...] | None:
    """Return the kind shared by the modules of one bank; None for a module that is not stacked."""
    stack_modules = declared_stack([form])
    size, alike = _numbers(form), SMALL
    if stack_modules is None or size is None:
        return None
    while alike < size:
        alike *= _ALIKE
    return stack_modules, alike, *what_is_read(form, site)


def what_is_read(module: SiteModule, site: Site) -> tuple[object, ...]:
    """Return the inputs of a module and their place, which modules of one stack share."""
    is_output = isinstance(module, OutputModule)
    read = module.source if is_output else getattr(module, "positions", None)
    return is_output, isinstance(module, InputModule), read, site.part, site.input_host


def plain(tensor: Tensor) -> bool:
    """Return whether a tensor can be a row of a stack."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
