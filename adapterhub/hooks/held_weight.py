"""The slot of a module that multiplies by its own weights: routed experts, and routers.

No module of such a host computes a product that a hook could change. While modules are active in
the slot, the host's own forward runs with an `AdaptedWeight` in the place of each weight that they
adapt: on a shallow copy of the host, since other threads may compute with the host itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import CHILD, Site
from adapterhub.backbones.tensor_parallel import tensor_parallel
from adapterhub.errors import AttachError
from adapterhub.hooks.adapted_weight import AdaptedWeight, Product
from adapterhub.hooks.composition import BatchPlan, through
from adapterhub.hooks.slot import Slot, first_input
from adapterhub.methods._expert_rows import EveryExpert, ExpertRows
from adapterhub.methods._site_module import (
    ExpertsInputModule,
    ExpertsModule,
    InputModule,
    OutputModule,
    SiteModule,
)
from adapterhub.patch import Patch


class HeldWeightSlot(Slot):
    """Applies the active modules to the products with the weights that the host holds."""

    def forward(
        self, host: nn.Module, function: Callable[..., Any], args: Sequence[Any], named: Any
    ) -> Any:
        """Run the host's forward with its weights adapted.

        `function` is its forward, as a function of it. Tensors among `args` have the tokens of the
        batch's rows in their first dimension, one row after the other.

        Returns:
            The host's output.
        """
        plan = self.plan
        if plan is None or len(plan.groups) == 1:
            composition = self.keys if plan is None else plan.groups[0]
            return function(self.adapted(host, composition), *args, **named)
        copies = plan.copies(first_input(tuple(args), named).shape[0], self.where())
        split = [plan.split(value, copies) for value in args]
        split_named = {name: plan.split(value, copies) for name, value in named.items()}
        outputs = []
        for n, composition in enumerate(plan.groups):
            its_named = {name: values[n] for name, values in split_named.items()}
            adapted = self.adapted(host, composition, by_row=True)
            outputs.append(function(adapted, *(values[n] for values in split), **its_named))
        if isinstance(outputs[0], tuple):
            return tuple(_joined(plan, pieces) for pieces in zip(*outputs, strict=True))
        return _joined(plan, outputs)

    def adapted(self, host: nn.Module, composition: Any, by_row: bool = False) -> nn.Module:
        """Return a copy of the host whose weights are adapted; other attributes are its own.

        `by_row`: it computes only some rows of the batch.
        """
        return with_weights(host, self.weights(host, composition, by_row))

    def weights(
        self, host: nn.Module, composition: Any, by_row: bool = False
    ) -> dict[str, AdaptedWeight]:
        """Return the adapted weights by the names of their parameters.

        `by_row`: the host computes only some rows of the batch.
        """
        weights: dict[str, AdaptedWeight] = {}
        for site in {site.role: site for site in self.sites.values()}.values():
            assert site.held is not None
            apply = _OfSite(self, site, composition, by_row)
            parameter = getattr(host, site.held.parameter)
            weights[site.held.parameter] = AdaptedWeight(parameter, site.held, apply)
        return weights


def _joined(plan: BatchPlan, pieces: Sequence[Tensor]) -> Tensor:
    """Join outputs in the order of the rows; each row may have become several, as tokens."""
    return plan.join(pieces, sum(map(len, pieces)) // plan.rows)


class _OfSite:
    """Applies the modules of one site to a product."""

    def __init__(self, slot: HeldWeightSlot, site: Site, composition: Any, by_row: bool) -> None:
        self.slot, self.site, self.composition, self.by_row = slot, site, composition, by_row

    def __call__(self, x: Tensor, product: Product, rows: ExpertRows) -> Tensor:
        """Adapt the product of some rows."""
        if self.by_row and isinstance(rows, EveryExpert):
            raise AttachError(
                f"the rows of a batch cannot have different adapters at {self.site.id}: the host "
                "passes the batch through all experts at once",
                hint="attach the adapters to other sites, or route each batch as a whole",
            )
        x = through(self.composition, x, lambda key, x: self._enter(key, x, rows))
        return through(self.composition, product(x), lambda key, y: self._leave(key, x, y, rows))

    def _module(self, key: str) -> SiteModule | None:
        module = self.slot.placed(key)
        assert isinstance(module, SiteModule)
        return module if self.slot.sites[key].role == self.site.role else None

    def _enter(self, key: str, x: Tensor, rows: ExpertRows) -> Tensor:
        module = self._module(key)
        if isinstance(module, ExpertsInputModule):
            return module(x, rows)  # type: ignore[no-any-return]
        return module(x) if isinstance(module, InputModule) else x

    def _leave(self, key: str, x: Tensor, y: Tensor, rows: ExpertRows) -> Tensor:
        module = self._module(key)
        if isinstance(module, ExpertsModule):
            return module(x, y, rows)  # type: ignore[no-any-return]
        return module(x, y) if isinstance(module, OutputModule) else y


def with_weights(host: nn.Module, parameters: Mapping[str, Any]) -> nn.Module:
    """Return a shallow copy of a module with other objects in place of some parameters."""
    copied = object.__new__(type(host))
    vars(copied).update(vars(host))
    vars(copied)["_parameters"] = {**host._parameters, **parameters}
    return copied


def _override_forward(host: nn.Module, patch: Patch) -> None:
    """Replace a host's forward by one that reads the slot.

    accelerate keeps the forward that it wraps under another name; what it has done before that one
    runs, such as loading weights, is done by then.
    """
    name = "_old_forward" if "_old_forward" in vars(host) else "forward"
    function = _as_function(host, vars(host).get(name))
    patch.override(host, name, functools.partial(call_host, host, function))


def _as_function(host: nn.Module, forward: Any) -> Callable[..., Any]:
    """Return a forward as a function of the module; None is that of its class."""
    if forward is None:
        return type(host).forward
    if isinstance(forward, MethodType) and forward.__self__ is host:
        return forward.__func__
    raise AttachError(
        f"the forward of this {type(host).__name__} has been replaced, and its weights cannot be "
        "adapted",
        expected="a module with the forward of its class",
        hint="attach before the forward is replaced, or adapt other sites",
    )


def call_host(host: nn.Module, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Run a host's forward, with the modules that apply in this call.

    `function` is its forward, as a function of it.

    Raises:
        AttachError: torch.compile is tracing it.
    """
    slot = host._modules.get(CHILD)
    if not isinstance(slot, HeldWeightSlot) or not slot.keys:
        return function(host, *args, **named)
    if torch.compiler.is_compiling():
        raise AttachError(
            f"torch.compile cannot trace the products of a {type(host).__name__} with its weights",
            offenders=[site.id for site in slot.sites.values()],
            hint="run the model without torch.compile, or adapt other sites",
        )
    return slot(host, function, args, named)


def held_weight_slot(model: nn.Module, site: Site) -> HeldWeightSlot:
    """Return the slot at a host that holds a weight; create it if it is missing."""
    host = model.get_submodule(site.host)
    slot = host._modules.get(CHILD)
    if not isinstance(slot, HeldWeightSlot):
        if parallel := tensor_parallel(model):
            parallel.boundary(site.host, site.d_out)  # refuses routed experts
        slot = HeldWeightSlot()
        _override_forward(host, slot.patch)
        host.add_module(CHILD, slot)
    return slot
