"""Modules of a slot as stacks: the rows of a batch in one product, each with its own module.

A stack is kept for later calls, and used as long as its modules are what they were when they were
stacked: the same objects with the same attributes, and the same bytes in their tensors. Versions of
tensors do not show a change through `.data` or numpy, so bytes are compared, which takes a fraction
of a product with them. Stacks that gradients flow through, and those on other devices than the
processor, are made for each call.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from adapterhub.anatomy.sites import Site
from adapterhub.hooks.composition import BatchPlan
from adapterhub.methods._row_stack import RowStack, declared_stack
from adapterhub.methods._site_module import InputModule, SiteModule

KEPT = 2  # stacks of one slot
LARGEST = 1 << 24  # numbers of one stack: products of larger modules take longer than their calls
CALL, COPIES = 40_000, 3  # in copied numbers: the time of one module's call; copies of y by groups
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_KIND = ("source", "positions", "training")
# For each column the key, or the module, of each group; None: the group has none there.
Keys: TypeAlias = tuple[tuple[str | None, ...], ...]
Modules: TypeAlias = tuple[tuple[SiteModule | None, ...], ...]


class StackedColumn(NamedTuple):
    """One module of each row: `example` is one of them, at `site` as all of them."""

    stack: RowStack
    example: SiteModule
    site: Site

    def at(self, rows: Tensor) -> StackedColumn:
        """Return a stack with module `rows[i]` for row i."""
        return self._replace(stack=self.stack.at(rows))


class TensorBytes(NamedTuple):
    """A tensor of a module, and a copy of its bytes."""

    holder: dict[str, Tensor | None]
    name: str
    tensor: Tensor
    layout: tuple[Any, ...]
    copy: Tensor

    def unchanged(self) -> bool:
        """Return whether the module still has the tensor, with these bytes."""
        tensor = self.tensor
        return (
            self.holder.get(self.name) is tensor
            and _layout(tensor) == self.layout
            and _same_bytes(tensor, self.copy)
        )


class Snapshot:
    """What modules were at one time: their attributes, children, hooks and tensors."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        parts = [part for module in modules for part in module.modules()]
        self.attributes = [(vars(part), tuple(vars(part).values())) for part in parts]
        self.children = [(p._modules, name, c) for p in parts for name, c in p._modules.items()]
        self.hooks = [hooks for part in parts for hooks in _hooks(part)]
        self.tensors = [
            TensorBytes(holder, name, tensor, _layout(tensor), tensor.detach().clone())
            for part in parts
            for holder in (part._parameters, part._buffers)
            for name, tensor in holder.items()
            if tensor is not None
        ]

    def holds(self) -> bool:
        """Return whether all of it is as it was."""
        return (
            not any(self.hooks)
            and all(_same(own.values(), before) for own, before in self.attributes)
            and all(children.get(name) is child for children, name, child in self.children)
            and all(each.unchanged() for each in self.tensors)
        )


def _hooks(module: nn.Module) -> list[dict[Any, Any]]:
    return [getattr(module, name) for name in _HOOKS]


def _same(values: Any, before: tuple[Any, ...]) -> bool:
    return len(values) == len(before) and all(map(operator.is_, values, before))


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _compare() -> Any:
    """Return C's memcmp, which keeps Python's lock here; None where it is not found."""
    try:
        compare = ctypes.PyDLL(None).memcmp
    except (OSError, TypeError, AttributeError):
        return None
    compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return compare


_MEMCMP = _compare()


def _same_bytes(tensor: Tensor, copy: Tensor) -> bool:
    if _MEMCMP is None or not tensor.is_contiguous():
        return torch.equal(tensor, copy)
    return not _MEMCMP(tensor.data_ptr(), copy.data_ptr(), copy.nbytes)


class KeptStack(NamedTuple):
    """The columns of a slot for some modules, in the dtype that they compute in."""

    modules: Modules
    columns: list[StackedColumn]
    snapshot: Snapshot

    def fits(self, modules: Modules) -> bool:
        """Return whether the columns are those of these modules, as they are now."""
        return self.modules == modules and self.snapshot.holds()


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
        self, keys: Keys, modules: Modules, sites: Mapping[str, Site], y: Tensor
    ) -> list[StackedColumn] | None:
        """Return modules as stacks, one for each column.

        Args:
            keys: the keys of the modules: for each column one of each group, or None.
            modules: the modules.
            sites: of the modules, by key.
            y: what the modules change.

        Returns:
            None where they cannot be stacked: modules of different kinds, or with hooks.
        """
        dtype = None if torch.is_autocast_enabled(y.device.type) else y.dtype
        present = [module for column in modules for module in column if module is not None]
        trained = torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(present))
        kept = None if trained else self.kept.get((keys, dtype))
        if kept is not None and kept.fits(modules):
            return kept.columns
        if any(map(_hooked, present)) or not all(map(_plain, _tensors(present))):
            return None
        with torch.inference_mode(False), torch.set_grad_enabled(trained):
            # Before the stack is made, so that it shows what another thread changes meanwhile.
            snapshot = None if trained else _snapshot(present)
            made = list(_stacked(keys, modules, sites, dtype))
        if len(made) < len(keys):
            return None
        if snapshot is not None:
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
        places = [sites[name] for name in names if name is not None]
        present = [module for module in column if module is not None]
        kinds = {(isinstance(m, InputModule), *(getattr(m, a, 0) for a in _KIND)) for m in present}
        stack_modules = declared_stack(present)
        one_place = len({(site.part, site.input_host) for site in places}) == 1
        largest = max(sum(t.numel() for t in _tensors([m])) for m in present)
        if not stack_modules or not one_place or len(kinds) > 1 or largest * len(column) > LARGEST:
            return
        stack = stack_modules(column)
        if stack is None:
            return
        yield StackedColumn(stack.cast(dtype) if dtype else stack, present[0], places[0])


def _snapshot(modules: Sequence[nn.Module]) -> Snapshot | None:
    """Return a snapshot of modules whose bytes can be compared: those on the processor."""
    if all(tensor.device.type == "cpu" for tensor in _tensors(modules)):
        return Snapshot(modules)
    return None


def _tensors(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    for module in modules:
        yield from module.parameters()
        yield from module.buffers()


def _plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided


def _hooked(module: nn.Module) -> bool:
    """Return whether a call of the module does more than its forward, or another one."""
    parts = list(module.modules())
    return any("forward" in vars(part) or any(_hooks(part)) for part in parts)


def pays(column: StackedColumn, plan: BatchPlan, y: Tensor) -> bool:
    """Return whether copies of modules for their rows take less time than a call of each."""
    copied = column.stack.numbers * plan.rows
    return plan.group_of_row is None or copied < CALL * len(plan.groups) + COPIES * y.numel()


def global_hooks() -> bool:
    """Return whether torch calls hooks for every module."""
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)
