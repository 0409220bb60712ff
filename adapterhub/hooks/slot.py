"""How a module enters the forward pass: one child module (a slot) and one hook on its host.

The host may be `Linear`, `Conv1D`, a quantized layer or anything else: it is called, never
replaced. Hooks are plain functions that find their slot through the host, so that a model with
adapters can be copied, pickled, moved and compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import CHILD, Site
from adapterhub.errors import AttachError
from adapterhub.hooks.banks import BankPlace, Banks
from adapterhub.hooks.composition import ApplyModule, BatchPlan, through
from adapterhub.hooks.forward_pass import (
    NO_MODULES,
    AppliedModules,
    ModelScope,
    current_entry,
    kept_values,
)
from adapterhub.hooks.row_stacks import (
    RowStacks,
    StackedRows,
    by_rows,
    from_banks,
    global_hooks,
    pays,
    places_of,
)
from adapterhub.methods._affine import constant_form
from adapterhub.methods._site_module import SiteModule
from adapterhub.patch import Patch

SUBLAYER_INPUT = "sublayer_input"
_SUBLAYER_MARK = "_adapterhub_sublayer_input"


def _any(module: SiteModule, site: Site) -> bool:
    return True


class Mark:
    """An entry in a list on a module, through which a hook on that module finds its slots.

    `remove` takes the entry off, and deletes the list with its last entry.
    """

    def __init__(self, module: nn.Module, name: str, entry: Any) -> None:
        # In a list, the slot does not become a second child, under a second state-dict key.
        self.module, self.name, self.entry = module, name, entry
        module.__dict__.setdefault(name, []).append(entry)

    def remove(self) -> None:
        """Remove the entry."""
        entries = self.module.__dict__.get(self.name, [])
        if self.entry in entries:
            entries.remove(self.entry)
        if not entries:
            self.module.__dict__.pop(self.name, None)


class Slot(nn.Module):
    """The one child that a host gets: the modules of all adapters there, and which are active.

    `active` is what applies where the context has no entry for the model, `scope`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.active = NO_MODULES
        self.scope = ModelScope()
        self.sites: dict[str, Site] = {}
        self.banks = Banks()  # of modules that nobody changes
        self.patch = Patch()  # the changes of the model that the slot needs
        self.input_host: str | None = None
        self.stacks = RowStacks()
        self.traced: dict[str, Any] = {}  # what hooks keep for each other in a compiled model

    @property
    def applied(self) -> AppliedModules:
        """What applies in this call."""
        entry = current_entry(self.scope)
        return self.active if entry is None else entry.table.get(self, NO_MODULES)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the modules that apply in this call."""
        return self.applied.keys

    @property
    def plan(self) -> BatchPlan | None:
        """The rows of this call that go through which modules; None: all through all."""
        return self.applied.plan

    def add(self, key: str, site: Site, module: nn.Module) -> None:
        """Add a module, inactive."""
        self.add_module(key, module)
        self.sites[key] = site

    def remove(self, key: str) -> None:
        """Remove a module, which is not active."""
        del self._modules[key], self.sites[key]
        self.banks.remove(key)
        self.stacks.clear()

    def hold(self, key: str, host: nn.Module) -> BankPlace:
        """Promise that nobody changes a module, nor the weight of the host where it reads that.

        Returns:
            Where it is stacked.
        """
        module = self.placed(key)
        if not (module.training and getattr(module, "dropout", None)):
            self.banks.add(key, self.sites[key], partial(self.constant, host))
        return self.banks.place(key)

    def constant(self, host: nn.Module, key: str) -> SiteModule:
        """Return the form in which a module is stacked while nobody changes it."""
        module = self.placed(key)
        assert isinstance(module, SiteModule)
        return constant_form(module, self.sites[key])

    def keep(self, name: str, value: Any) -> None:
        """Keep a value for a later hook of the same forward pass."""
        kept_values(self)[name] = value

    def kept(self, name: str, default: Any = None) -> Any:
        """Return a value that an earlier hook of the same forward pass kept."""
        return kept_values(self).get(name, default)

    def take(self, name: str, default: Any = None) -> Any:
        """Return a value that an earlier hook of the same forward pass kept, and forget it."""
        return kept_values(self).pop(name, default)

    def run(self, apply: ApplyModule, y: Tensor, *others: Any, dim: int = 0) -> Tensor:
        """Pass y through the active modules, one after the other or as the plan says.

        `apply(key, y, *others) -> y'` applies the module of one key; tensors among `others` have
        the rows of y.

        Returns:
            y', like y.
        """
        keys, plan, _ = self.applied
        if plan is not None:
            return plan.run(apply, y, others, dim, self.where())
        return through(keys, y, lambda key, y: apply(key, y, *others))

    def stacked(
        self, y: Tensor, dim: int = 0, wanted: Callable[[SiteModule, Site], bool] = _any
    ) -> list[StackedRows] | None:
        """Return the modules of each row of this call as stacks, in the order that they apply in.

        `wanted(module, site)` says whether modules of a kind are to be computed now.

        Returns:
            None where groups of rows are to be computed one after the other.
        """
        plan = self.plan
        if plan is None or len(plan.groups) == 1 or plan.columns is None:
            return None
        if torch.compiler.is_compiling() or global_hooks():
            return None
        if y.shape[dim] % plan.rows:
            plan.copies(y.shape[dim], self.where())  # an error that says what is expected
        banked = self.banks.banked
        if banked.places and not torch.is_grad_enabled():
            places = places_of(banked, plan)
            if places is not None:
                return from_banks(banked, plan, places, y, wanted)
        modules: Any = tuple(
            tuple(None if key is None else self.placed(key) for key in column)
            for column in plan.columns
        )
        columns = self.stacks.columns(plan.columns, modules, self.sites, y)
        if columns is None or not all(pays(each, plan, y) for each in columns):
            return None
        some = [each for each in columns if wanted(each.example, each.site)]
        return [by_rows(each, plan.group_of_row) for each in some]

    def where(self) -> str:
        """Return the id of the site, for messages."""
        return next(iter(self.sites.values())).id

    def placed(self, key: str) -> nn.Module:
        """Return the module with a key.

        Raises:
            AttachError: another thread has removed it during this forward pass.
        """
        module = self._modules.get(key)
        if module is None:
            raise AttachError(f"another thread detached {key!r} during this forward pass")
        return module

    def __getstate__(self) -> dict[str, Any]:
        # Tensors of a forward pass belong to a graph, and cannot be copied.
        return self.__dict__ | {"traced": {}}


def capture_input(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Store the input of a sublayer for the slots that read it: a forward pre-hook."""
    for slot in getattr(module, _SUBLAYER_MARK, ()):  # none: another thread has removed it
        if slot.keys:
            slot.keep(SUBLAYER_INPUT, args[0])


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the input x of a module: its first argument, or the first tensor among the named."""
    return args[0] if args else next(v for v in kwargs.values() if isinstance(v, Tensor))


def read_sublayer_input(model: nn.Module, slot: Slot, path: str | None) -> None:
    """Let a slot read the input of a module that runs before its host.

    `path` is None if there is none to read.
    """
    if path is None or slot.input_host is not None:
        return
    slot.input_host = path
    module = model.get_submodule(path)
    slot.patch.hook(Mark, module, _SUBLAYER_MARK, slot)
    # First of all pre-hooks: others may change the input.
    slot.patch.hook(module.register_forward_pre_hook, capture_input, prepend=True)


def put_slot(host: nn.Module, slot: Slot) -> None:
    """Give a host its slot.

    Raises:
        AttachError: it has one of another kind, for modules that change something else there.
    """
    if (other := host._modules.get(CHILD)) is not None:
        assert isinstance(other, Slot)
        slot.patch.undo()
        raise AttachError(
            f"{other.where()} is adapted, and what is at the same {type(host).__name__} cannot be",
            expected="adapters at other sites, or at the same kind of site",
            hint="detach the other one, or name other sites",
        )
    host.add_module(CHILD, slot)


def drop_slot(model: nn.Module, host_path: str) -> None:
    """Remove a slot and its hooks: the host is as before."""
    host = model.get_submodule(host_path)
    slot = host._modules[CHILD]
    assert isinstance(slot, Slot)
    slot.patch.undo()
    del host._modules[CHILD]
