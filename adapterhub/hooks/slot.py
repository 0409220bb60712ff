"""Slots: one child module and one hook on a host, which insert adapters into the forward pass.

The host may be `Linear`, `Conv1D`, a quantized layer or anything else: it is called, never
replaced. Hooks are plain functions that find their slot through the host, so that a model with
adapters can be copied, pickled, moved and compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.backbone import CHILD
from adapterhub.anatomy.projections import is_projection
from adapterhub.anatomy.sites import STREAM, FeatureSlice, Site, Stream
from adapterhub.backbones.tensor_parallel import WHOLE, TensorParallel
from adapterhub.backbones.weights import read_bias, read_weight, reread_weight
from adapterhub.errors import AttachError
from adapterhub.hooks.composition import (
    NO_MODULES,
    AppliedModules,
    Average,
    BatchPlan,
    Composition,
    ModelScope,
    TokenPlan,
    as_before,
    by_row,
    current_entry,
    kept_values,
)
from adapterhub.hooks.rows import (
    NO_BANKS,
    BankPlace,
    StackedColumn,
    StackedRows,
    Wanted,
    from_modules,
    global_hooks,
)
from adapterhub.hooks.token_positions import Chosen, as_states, chosen_tokens
from adapterhub.methods.common.ops import RowStack, constant_form
from adapterhub.methods.common.site_module import InputModule, OutputModule, SiteModule, TokenSet
from adapterhub.patch import Patch

SUBLAYER_INPUT = "sublayer_input"
_SUBLAYER_MARK = "_adapterhub_sublayer_input"


def _any(module: SiteModule, site: Site) -> bool:
    return True


class Mark:
    """An entry in a list on a module that links a hook on it to its slots.

    `remove` removes the entry, and deletes the list with its last entry.
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
    """The child of a host: the modules of all adapters there, and the active ones.

    `active` applies if the context has no entry for the model (`scope`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.active = NO_MODULES
        self.scope = ModelScope()
        self.sites: dict[str, Site] = {}
        self.banks = NO_BANKS  # constant modules
        self.patch = Patch()  # changes of the model that the slot requires
        self.input_host: str | None = None
        self.traced: dict[str, Any] = {}  # values that hooks share in a compiled model

    @property
    def applied(self) -> AppliedModules:
        """The modules that apply in this call."""
        entry = current_entry(self.scope)
        return self.active if entry is None else entry.table.get(self, NO_MODULES)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the modules that apply in this call."""
        return self.applied.keys

    @property
    def plan(self) -> BatchPlan | None:
        """The assignment of this call's rows to modules; None: all modules apply to all rows."""
        return self.applied.plan

    def add(self, key: str, site: Site, module: nn.Module) -> None:
        """Add an inactive module."""
        self.add_module(key, module)
        self.sites[key] = site

    def remove(self, key: str) -> None:
        """Remove an inactive module."""
        del self._modules[key], self.sites[key]
        self.banks = self.banks.without(key)

    def hook(self, register: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Register a hook, or a mark, that is removed with the slot."""
        self.patch.hook(register, *args, **options)

    def hold(self, key: str, host: nn.Module) -> BankPlace:
        """Declare a module constant, with the weight of the host if the module reads it.

        Returns: The place in its bank.
        """
        module = self.placed(key)
        if not (module.training and getattr(module, "dropout", None)):
            self.banks = self.banks.with_module(key, self.sites[key], partial(self.constant, host))
        return self.banks.place(key)

    def constant(self, host: nn.Module, key: str) -> SiteModule:
        """Return the stackable form of a constant module."""
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
        """Remove and return a value that an earlier hook of the same forward pass kept."""
        return kept_values(self).pop(name, default)

    @property
    def composition(self) -> Any:
        """The keys of this call as one composition for all rows; None: the plan has several."""
        keys, plan, _ = self.applied
        if plan is None:
            return keys
        return plan.groups[0] if len(plan.groups) == 1 else None

    def run(self, apply: Callable[..., Tensor], y: Tensor, *others: Any, dim: int = 0) -> Tensor:
        """Pass y through the active modules, one after the other or according to the plan.

        `apply(key, y, *others) -> y'` applies the module of one key; tensors among `others` have
        the rows of y.

        Returns:
            y', like y.

        Raises:
            AttachError: the rows of y are not a multiple of the plan's.
        """
        composition, plan = self.composition, self.plan
        if plan is None or composition is not None:
            return through(composition, y, lambda key, y: apply(key, y, *others))
        copies = plan.copies(y.shape[dim], self.where())
        split = [plan.split(tensor, copies, dim) for tensor in (y, *others)]
        outputs = [
            through(group, rows, lambda key, y, rest=rest: apply(key, y, *rest))  # type: ignore[misc]
            for group, rows, *rest in zip(plan.groups, *split, strict=True)
        ]
        return plan.join(outputs, copies, dim)

    def stacked(self, y: Tensor, dim: int = 0, wanted: Wanted = _any) -> list[StackedRows] | None:
        """Return the modules of each row of this call as stacks, in order of application.

        `wanted(module, site)` tells whether to compute modules of a kind now. Returns: None if
        groups of rows must be computed one after the other.
        """
        plan = self.plan
        if plan is None or len(plan.groups) == 1 or plan.columns is None:
            return None
        if torch.compiler.is_compiling() or global_hooks():
            return None
        if y.shape[dim] % plan.rows:
            plan.copies(y.shape[dim], self.where())  # raises an error with the expected number
        banks = self.banks
        places = None if torch.is_grad_enabled() else banks.places_of(plan)
        if places is None:
            return from_modules(plan, self.placed, self.sites, y, wanted)
        return banks.rows(plan, places, y, wanted)

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


def through(composition: Composition, y: Tensor, apply: Callable[[str, Tensor], Tensor]) -> Tensor:
    """Pass y through a composition of modules.

    `apply(key, y)` applies the module of one key.

    Returns:
        y', like y.
    """
    if isinstance(composition, str):
        return apply(composition, y)
    if isinstance(composition, Average):
        pairs = zip(composition.parts, composition.weights, strict=True)
        terms = [weight * through(part, y, apply) for part, weight in pairs]
        return sum(terms[1:], terms[0])
    for part in composition:
        y = through(part, y, apply)
    return y


def capture_input(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Store the input of a sublayer for the slots that read it: a forward pre-hook."""
    for slot in getattr(module, _SUBLAYER_MARK, ()):  # None: another thread has removed it
        if slot.keys:
            slot.keep(SUBLAYER_INPUT, args[0])


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the input x of a module: its first argument, or the first tensor among named ones."""
    return args[0] if args else next(v for v in kwargs.values() if isinstance(v, Tensor))


def read_sublayer_input(model: nn.Module, slot: Slot, path: str | None) -> None:
    """Make a slot read the input of a module that runs before its host.

    `path` is None if there is nothing to read.
    """
    if path is None or slot.input_host is not None:
        return
    slot.input_host = path
    module = model.get_submodule(path)
    slot.hook(Mark, module, _SUBLAYER_MARK, slot)
    # Before all other pre-hooks, which may change the input.
    slot.hook(module.register_forward_pre_hook, capture_input, prepend=True)


def put_slot(host: nn.Module, slot: Slot) -> None:
    """Add a slot to a host.

    Raises:
        AttachError: the host has another kind of slot, for modules that change something else.
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
    """Remove a slot and its hooks; the host is restored."""
    host = model.get_submodule(host_path)
    slot = host._modules[CHILD]
    assert isinstance(slot, Slot)
    slot.patch.undo()
    del host._modules[CHILD]


_STREAM = "_adapterhub_stream"
_RESIDUAL = "residual"


class OutputSlot(Slot):
    """Applies the active modules of a projection or sublayer.

    An `OutputModule` maps the host's input x and output y to a new y, an `InputModule` maps x to a
    new x. Where its site is a part of a fused projection, the host keeps x, and only that part is
    computed again from the new x, which other modules of the part read. Modules compute on whole
    activations where processes share the host's activations, according to `boundary`.
    """

    def __init__(self, batch_dim: int = 0) -> None:
        super().__init__()
        self.takes_input = False
        self.parts_with_input: list[FeatureSlice] = []  # parts whose input a module changes
        self.boundary = WHOLE
        self.batch_dim = batch_dim
        self.norms: list[nn.Module | None] = []  # in a list, so that they are not child modules
        self.at_tokens: dict[str, tuple[TokenSet, ...]] = {}  # for modules that change some tokens

    def add(self, key: str, site: Site, module: nn.Module) -> None:
        """Add an inactive module."""
        super().add(key, site, module)
        if sets := getattr(module, "token_sets", ()):
            self.at_tokens[key] = sets

    def remove(self, key: str) -> None:
        """Remove an inactive module."""
        super().remove(key)
        self.at_tokens.pop(key, None)

    def placed(self, key: str) -> OutputModule | InputModule:
        """Return the module with a key."""
        module = super().placed(key)
        assert isinstance(module, OutputModule | InputModule)
        return module

    @property
    def row_dim(self) -> int:
        """The dimension of the route's rows: the tokens in a packed pass."""
        packed = isinstance(self.plan, TokenPlan)
        return 1 - self.batch_dim if packed else self.batch_dim

    def enter(self, x: Tensor) -> Tensor:
        """Apply the modules that change the input. x: (batch, tokens, d_in) -> x' like x."""
        share = self.boundary.input
        if share is not None:
            return share.own(self._entered(share.whole(x)))
        return self._entered(x)

    def _entered(self, x: Tensor, part: FeatureSlice | None = None) -> Tensor:
        """Change the input of the host, or of one part only."""
        dim = self.row_dim
        columns = self.stacked(
            x, dim, lambda module, site: isinstance(module, InputModule) and site.part == part
        )
        if columns is None:
            return self.run(lambda key, x: self._change_input(key, x, part), x, dim=dim)
        for rows in columns:
            x = rows.run(lambda column, x: self._rowwise(column.stack)(x), x, dim=dim)
        return x

    def _change_input(self, key: str, x: Tensor, part: FeatureSlice | None) -> Tensor:
        module = self.placed(key)
        enters = isinstance(module, InputModule) and self.sites[key].part == part
        changed: Tensor = module(x) if enters else x
        return changed

    def forward(self, host: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Apply the modules that change the output.

        `x`: its input, (batch, tokens, d_in); `y`: its output, (batch, tokens, d_out). The host is
        the projection, or the last module of the sublayer.

        Returns:
            The new output, like y.
        """
        takes, gives = self.boundary
        x = takes.whole(x) if takes is not None and self._reads_input() else x
        if gives is not None:
            return gives.own(self._left(host, x, gives.whole(y)))
        return self._left(host, x, y)

    def _reads_input(self) -> bool:
        """Return whether a module here, or a submodule, reads the input of the host."""
        inside = (m for m in self.modules() if isinstance(m, OutputModule))
        return bool(self.parts_with_input) or any(m.source != "output" for m in inside)

    def _left(self, host: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Apply the modules to whole activations."""
        entered: dict[FeatureSlice | None, Tensor] = {None: x}
        for part in self.parts_with_input:
            changed = self._entered(x, part)
            if changed is not x:
                entered[part] = changed
                y = _recomputed(host, part, changed - x, y)
        number = {part: n for n, part in enumerate(entered)}  # None, for the host, comes first
        inputs = (
            self.take(SUBLAYER_INPUT) if self.input_host else None,
            self.take(_RESIDUAL) if self.norms else None,
            *entered.values(),
        )
        chosen = self._chosen(y) if self.at_tokens else {}
        inputs = (*inputs, *chosen.values(), *self._states(host))
        places = {tokens: n for n, tokens in enumerate(chosen, start=len(entered))}
        columns = self._stacked_with(y, inputs)
        if columns is not None:

            def apply(column: StackedColumn, *tensors: Any) -> Tensor:
                stack, example, site = column
                read, compute = number.get(site.part, 0), self._rowwise(stack)
                return self._change_output(host, example, site, compute, (read,), *tensors)

            for rows in columns:
                y = rows.run(apply, y, *inputs, dim=self.row_dim)
            return y

        def change(key: str, *tensors: Any) -> Tensor:
            module, site = self.placed(key), self.sites[key]
            sets = self.at_tokens.get(key, ())
            reads = (number.get(site.part, 0), *(places[tokens] for tokens in sets))
            return self._change_output(host, module, site, module, reads, *tensors)

        return self.run(change, y, *inputs, dim=self.row_dim)

    def _chosen(self, y: Tensor) -> Chosen:
        """Return masks of the tokens of y in the sets that the active modules read."""
        sets = dict.fromkeys(tokens for key in self.keys for tokens in self.at_tokens.get(key, ()))
        if not sets:
            return {}
        where = self.where()
        chosen = chosen_tokens(self.scope, next(iter(self.sites.values())).reads, where)
        return {tokens: as_states(chosen[tokens], y, self.batch_dim, where) for tokens in sets}

    def _states(self, host: nn.Module) -> Sequence[Tensor]:
        """Return other states that modules here read, like y."""
        return ()

    def _stacked_with(
        self, y: Tensor, inputs: tuple[Tensor | None, ...]
    ) -> list[StackedRows] | None:
        """Return the stacks of this call if all inputs have the same rows."""
        rows = y.shape[self.row_dim]
        if any(x is not None and x.shape[self.row_dim] != rows for x in inputs):
            return None
        return self.stacked(y, self.row_dim, _changes_output)

    def constant(self, host: nn.Module, key: str) -> SiteModule:
        """Return the stackable form of a constant module."""
        module, site = self.placed(key), self.sites[key]
        if isinstance(module, OutputModule) and module.reads_weight:
            weight = reread_weight(host, site.part), read_bias(host, site.part)
            return constant_form(module, site, *weight)
        return constant_form(module, site)

    def _rowwise(self, stack: RowStack) -> Callable[..., Tensor]:
        """Return a function of (batch, tokens, d) with module i for the rows i of the route."""

        def compute(*inputs: Tensor) -> Tensor:
            rows = [by_row(each, len(stack.tensors[0]), self.row_dim) for each in inputs]
            changed: Tensor = stack(*rows)
            return as_before(changed, inputs[-1], self.row_dim)

        return compute

    def _change_output(
        self,
        host: nn.Module,
        module: SiteModule,
        site: Site,
        compute: Callable[..., Tensor],
        reads: tuple[int, ...],
        y: Tensor,
        sublayer_x: Tensor | None,
        residual: Tensor | None,
        *xs: Tensor,
    ) -> Tensor:
        """Change the output by a module; `compute` computes it.

        `reads` are the numbers of its input, and of its chosen tokens, among `xs`.
        """
        if not isinstance(module, OutputModule):
            return y
        x, *chosen = (xs[number] for number in reads)
        source = sublayer_x if site.input_host else x
        if module.source in STREAM:
            source = x if residual is None else residual
            source = self._block(source, y) if module.source == "block" else source
        weight: tuple[Tensor | None, ...] = ()
        if module.reads_weight:
            weight = (reread_weight(host, site.part), read_bias(host, site.part))
        if site.part is None:
            return compute(source, y, *weight, *chosen)
        return site.part.write(y, compute(source, site.part.read(y), *weight, *chosen))

    def _block(self, residual: Tensor, y: Tensor) -> Tensor:
        """Compute the input of the next sublayer: norm(r + postnorm(y))."""
        norm, postnorm = self.norms
        total: Tensor = residual + (y if postnorm is None else postnorm(y))
        return total if norm is None else norm(total)


def _changes_output(module: SiteModule, site: Site) -> bool:
    return isinstance(module, OutputModule)


def _recomputed(host: nn.Module, part: FeatureSlice, change: Tensor, y: Tensor) -> Tensor:
    """Return the output of a host with one part of it computed from its input plus a change."""
    weight = reread_weight(host, part).to(y.dtype)
    return part.write(y, part.read(y) + F.linear(change.to(y.dtype), weight))


def call_slot(host: nn.Module, args: tuple[Any, ...], y: Any) -> Any:
    """Change the output of a host: its forward hook."""
    slot = host._modules[CHILD]
    return slot(host, args[0], y) if slot is not None and slot.keys else y


def call_slot_of_block(
    host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any
) -> Any:
    """Change the output of a host that is a whole sublayer: its forward hook.

    Layers may pass its input by name. It may return a tuple whose first entry is its output, as
    experts that also return their router's scores. The output may be flat, (batch x tokens, d).
    """
    slot = host._modules[CHILD]
    if slot is None or not slot.keys:
        return y
    x = first_input(args, kwargs)
    output = y if isinstance(y, Tensor) else y[0]
    changed = slot(host, x, output.view(*x.shape[:-1], -1)).view(output.shape)
    return changed if isinstance(y, Tensor) else (changed, *y[1:])


def call_slot_before(host: nn.Module, args: tuple[Any, ...]) -> Any:
    """Change the input of a host: its forward pre-hook."""
    slot = host._modules[CHILD]
    return (slot.enter(args[0]), *args[1:]) if isinstance(slot, OutputSlot) else args


def capture_residual(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Store the residual stream for the slots that read it: a forward pre-hook."""
    for slot in getattr(module, _STREAM):
        if slot.keys:
            slot.keep(_RESIDUAL, args[0])


def _join_stream(model: nn.Module, slot: OutputSlot, stream: Stream) -> None:
    """Connect a slot to the residual stream and the norms behind its sublayer."""
    norms = (stream.norm, stream.postnorm)
    slot.norms = [None if path is None else model.get_submodule(path) for path in norms]
    if stream.input_host is not None:
        module = model.get_submodule(stream.input_host)
        slot.hook(Mark, module, _STREAM, slot)
        slot.hook(module.register_forward_pre_hook, capture_residual, prepend=True)


def output_slot(
    model: nn.Module,
    site: Site,
    module: SiteModule,
    batch_dim: int = 0,
    parallel: TensorParallel | None = None,
) -> OutputSlot:
    """Return the slot at a site's host; create it, with the hooks that a module needs.

    The module's class decides which hooks the slot needs. `batch_dim` is the dimension of the batch
    in the host's input and output. `parallel` is the division of the model, if it is divided.

    Raises:
        SiteError: the module changes the input of a part of a host whose weight cannot be read.
    """
    host = model.get_submodule(site.host)
    slot = host._modules.get(CHILD)
    if not isinstance(slot, OutputSlot):
        slot = OutputSlot(batch_dim)
        if parallel is not None:
            slot.boundary = parallel.boundary(site.host, site.d_out)
        put_slot(host, slot)
        if is_projection(host):
            slot.hook(host.register_forward_hook, call_slot)
        else:
            slot.hook(host.register_forward_hook, call_slot_of_block, with_kwargs=True)
    if isinstance(module, InputModule) and site.part is not None:
        if site.part not in slot.parts_with_input:
            read_weight(host)  # raises if unreadable; each forward pass reads a part of it
            slot.parts_with_input.append(site.part)
    elif isinstance(module, InputModule) and not slot.takes_input:
        slot.takes_input = True
        slot.hook(host.register_forward_pre_hook, call_slot_before)
    read_sublayer_input(model, slot, site.input_host)
    reads_stream = isinstance(module, OutputModule) and module.source in STREAM
    if site.stream and reads_stream and not slot.norms:
        _join_stream(model, slot, site.stream)
    return slot
