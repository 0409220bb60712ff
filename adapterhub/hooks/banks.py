"""Banks: modules of a slot that nobody changes, stacked once for all batches.

A bank has the modules of one kind, each at a place of its own, with room for more. A batch takes
the modules of its rows out by their places, so a random mix of adapters costs no new stack. Banks
grow by doubling, reuse the places of modules that have left, and shrink when few are taken.

What applies is replaced as a whole, so that a pass of another thread reads one state of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import Site
from adapterhub.hooks.composition import BankRows
from adapterhub.methods._ops import RowStack, declared_stack
from adapterhub.methods._site_module import InputModule, SiteModule

ROOM = 4  # places of a new bank
SMALL = 1 << 16  # numbers of a module: smaller ones share a bank, larger ones those of their size
_ALIKE = 4  # how much larger a module of the same bank may be

# Returns the module with a key, in the form that is stacked.
FormOf = Callable[[str], SiteModule]


class Bank(NamedTuple):
    """Modules of one kind.

    Attributes:
        kind: what they have in common.
        stack: the modules at their places.
        keys: the key of the module at each place; None: the place is free.
        widest: modules without values, whose stack is as wide as the bank.
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
        """Return the keys of its modules."""
        return [key for key in self.keys if key is not None]

    def row_bytes(self) -> int:
        """Return how much memory a module takes."""
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
        made = _stacked([*self.widest, form])  # as wide as all of them, and as the new one
        if made is None:
            return None
        if list(map(_row_form, made.tensors)) != list(map(_row_form, self.stack.tensors)):
            keys = self.taken()
            made = _stacked([*map(form_of, keys), form])
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
        """Return the bank without a module; None if it has no other."""
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


def _stacked(forms: Sequence[SiteModule]) -> RowStack | None:
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
        """Return the banks with another one in place of one of them."""
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

        `form_of` returns the module with a key in the form that is stacked, also for others.
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
            made = _stacked([form])
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
            with torch.inference_mode(False), torch.no_grad():  # others are written into it later
                self.banked = self.banked.replaced(place[0], bank.without(key))

    def place(self, key: str) -> BankPlace:
        """Return where a module is."""
        place = self.banked.places.get(key)
        bank = None if place is None else self.banked.banks[place[0]]
        if place is None or bank is None:
            return BankPlace(None, 0)
        return BankPlace(place[0], bank.row_bytes())


def _kind(form: SiteModule, site: Site) -> tuple[object, ...] | None:
    """Return what modules of one bank have in common; None for a module that is not stacked."""
    stack_modules = declared_stack([form])
    tensors: list[Tensor] = [*form.parameters(), *form.buffers()]
    if stack_modules is None or not all(map(plain, tensors)):
        return None
    size, alike = sum(tensor.numel() for tensor in tensors), SMALL
    while alike < size:
        alike *= _ALIKE
    return stack_modules, alike, *what_is_read(form, site)


def what_is_read(module: SiteModule, site: Site) -> tuple[object, ...]:
    """Return what a module reads and where: modules of one stack read the same."""
    read = (getattr(module, "source", None), getattr(module, "positions", None))
    return isinstance(module, InputModule), *read, site.part, site.input_host


def plain(tensor: Tensor) -> bool:
    """Return whether a tensor can be a row of a stack."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
