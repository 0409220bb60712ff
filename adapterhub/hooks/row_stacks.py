"""Modules of a slot as stacks: the rows of a batch in one product, each with its own module.

A stack is kept for later calls, and used as long as its modules are what they were when they were
stacked: the same objects with the same attributes, and the same bytes in their tensors. Versions of
tensors do not show a change through `.data` or numpy, so bytes are compared, which takes a fraction
of a product with them. Stacks that gradients flow through, and those on other devices than the
processor, are made for each call.

Modules that nobody changes (`Adapter.hold`) are in banks, which are stacks of all such modules of
one kind in a slot: a batch takes its rows' modules out by their places, whatever its mix. With
several kinds in a batch, the rows of each are one product.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from adapterhub.anatomy.sites import Site
from adapterhub.hooks.banks import BankedModules, plain, what_is_read
from adapterhub.hooks.composition import BatchPlan, RowOrder
from adapterhub.methods._ops import RowStack, declared_stack
from adapterhub.methods._site_module import SiteModule

KEPT = 2  # stacks of one slot
LARGEST = 1 << 24  # numbers of one stack: products of larger modules take longer than their calls
CALL, COPIES = 40_000, 3  # in copied numbers: the time of one module's call; copies of y by groups
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_CONTENT = ("_parameters", "_buffers", "_modules")
# For each column the key, or the module, of each group; None: the group has none there.
Keys: TypeAlias = tuple[tuple[str | None, ...], ...]
Modules: TypeAlias = tuple[tuple[SiteModule | None, ...], ...]
Places: TypeAlias = tuple[tuple[int, int] | None, ...]
_NOWHERE = (-1, -1)


class StackedColumn(NamedTuple):
    """One module of each row: `example` is one of them, at `site` as all of them."""

    stack: RowStack
    example: SiteModule
    site: Site


class StackedRows(NamedTuple):
    """The rows of a call in parts, with one module of each row; None: rows that have none.

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
    """What modules were at one time: attributes, hooks, children and tensors, on the processor."""

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
        """Return whether all of it is as it was."""
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
    """Return C's memcmp, which keeps Python's lock here; None where it is not found."""
    try:
        compare = ctypes.PyDLL(None).memcmp
    except (OSError, TypeError, AttributeError):
        return None
    compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return compare


_MEMCMP = _compare()


class KeptStack(NamedTuple):
    """The columns of a slot for some modules, in the dtype that they compute in."""

    modules: Modules
    columns: list[StackedColumn]
    snapshot: Snapshot

    def fits(self, modules: Modules) -> bool:
        """Return whether the columns are those of these modules, as they are now."""
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
        """Forget all stacks."""
        self.kept = {}

    def columns(
        self,
        keys: Keys,
        modules: Modules,
        sites: Mapping[str, Site],
        y: Tensor,
    ) -> list[StackedColumn] | None:
        """Return modules as stacks, one for each column.

        `keys` has for each column one key of each group, or None; `y` is what the modules change.

        Returns:
            None where they cannot be stacked: modules of different kinds, or with hooks.
        """
        dtype = _computed_in(y)
        kept = self.kept.get((keys, dtype))
        if kept is not None and kept.fits(modules):
            return kept.columns
        if not all(_of_one_kind(*column, sites) for column in zip(keys, modules, strict=True)):
            return None  # first: a batch of different methods has some at every site
        present = [module for column in modules for module in column if module is not None]
        tensors = list(_tensors(present))
        trained = _trained(tensors)
        if any(map(hooked, present)) or not all(map(plain, tensors)):
            return None
        # Before the stack is made, so that it shows what another thread changes meanwhile.
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
    """Yield the stacks of columns, up to the first one that cannot be stacked."""
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
    """Return whether the modules of a column declare one stack, at one place, read alike."""
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
    """Return a module and those inside it; most have none."""
    return module.modules() if module._modules else (module,)


def _trained(tensors: Iterable[Tensor]) -> bool:
    """Return whether gradients flow to one of the tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def hooked(module: nn.Module) -> bool:
    """Return whether a call of the module does more than its forward, or another one."""
    named = (vars(part) for part in _parts(module))
    return any(names.get(name) for names in named for name in (*_HOOKS, "forward"))


def places_of(banked: BankedModules, plan: BatchPlan) -> list[Places] | None:
    """Return where the modules of a plan are, by column; None where one of them is in no bank."""
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
    """Return the modules of each row of a plan out of banks, by column.

    `wanted(module, site)` says whether modules of a kind are to be computed now.

    Returns:
        None where copies of modules take longer than their calls.
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
    """Return the dtype that modules compute in, as their input; None: autocast chooses it."""
    return None if torch.is_autocast_enabled(y.device.type) else y.dtype


def pays(column: StackedColumn, plan: BatchPlan, y: Tensor) -> bool:
    """Return whether copies of modules for their rows take less time than a call of each."""
    copied = column.stack.numbers * plan.rows
    return plan.group_of_row is None or copied < CALL * len(plan.groups) + COPIES * y.numel()


def by_rows(column: StackedColumn, rows: Tensor | None) -> StackedRows:
    """Return a column of groups' modules as one of rows; `rows[i]` is the group of row i."""
    own = column if rows is None else column._replace(stack=column.stack.at(rows))
    return StackedRows([own])


def global_hooks() -> bool:
    """Return whether torch calls hooks for every module."""
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)
