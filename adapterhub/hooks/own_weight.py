"""The slot of a module that multiplies by its own weights: routed experts, and routers.

Such a host has no submodule whose product a hook could change. While modules are active in the
slot, an `AdaptedWeight` replaces each adapted weight in the host's own forward. It runs on a
shallow copy of the host, since other threads may use the host itself.

An `AdaptedWeight` adapts all products with it, however the forward multiplies: one expert after the
other, copies of matrices, grouped or batched products. A product with the weight is torch's own
with the parameter, and the modules are applied to its input and output, so no changed copy of the
weight is computed. Any other use of the weight gets such a copy, computed from the products with
unit vectors.

    F.linear(x, W[e])    x @ Wᵀ[e]    bmm(W[numbers], x)    bmm(x, W)    grouped_mm(x, W, ends)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.backbone import CHILD, copy_with
from adapterhub.anatomy.projections import HeldWeight
from adapterhub.anatomy.sites import Site
from adapterhub.backbones.tensor_parallel import tensor_parallel
from adapterhub.errors import AttachError
from adapterhub.hooks.composition import BatchPlan
from adapterhub.hooks.slot import Slot, first_input, put_slot, through
from adapterhub.methods.common.expert_rows import (
    EveryExpert,
    ExpertRows,
    OneExpert,
    RowsByIndex,
    SortedRows,
)
from adapterhub.methods.common.site_module import (
    ExpertsInputModule,
    ExpertsModule,
    InputModule,
    OutputModule,
    SiteModule,
)
from adapterhub.patch import Patch

# Adapts a product of some rows: apply(x, product, rows) -> y'.
Product: TypeAlias = Callable[[Tensor], Tensor]
ApplyProduct: TypeAlias = Callable[[Tensor, Product, ExpertRows], Tensor]
_CASTS = ("to", "type", "float", "type_as", "contiguous")
_GROUPED = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")


class HeldWeightSlot(Slot):
    """Apply the active modules to the products with the weights of the host."""

    def forward(
        self, host: nn.Module, function: Callable[..., Any], args: Sequence[Any], named: Any
    ) -> Any:
        """Run the host's forward with its weights adapted.

        `function` is its forward, as a function of the host. Tensors among `args` have the tokens
        of the batch's rows in their first dimension, one row after the other.

        Returns:
            The host's output.
        """
        composition, plan = self.composition, self.plan
        if plan is None or composition is not None:
            return self.compute(host, function, composition, args, named)
        copies = plan.copies(first_input(tuple(args), named).shape[0], self.where())
        outputs = []
        calls = plan.split_call(args, named, copies)
        for composition, call in zip(plan.groups, calls, strict=True):
            outputs.append(self.compute(host, function, composition, *call, by_row=True))
        if isinstance(outputs[0], tuple):
            return tuple(_joined(plan, pieces) for pieces in zip(*outputs, strict=True))
        return _joined(plan, outputs)

    def compute(
        self,
        host: nn.Module,
        function: Callable[..., Any],
        composition: Any,
        args: Sequence[Any],
        named: Mapping[str, Any],
        by_row: bool = False,
    ) -> Any:
        """Run the forward on a copy of the host whose weights are adapted.

        `by_row`: it computes only some rows of the batch.
        """
        return function(copy_with(host, self.weights(host, composition, by_row)), *args, **named)

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


def _joined(plan: BatchPlan, pieces: Sequence[Tensor | None]) -> Tensor | None:
    """Join outputs in the order of the rows; each row may have become several, as tokens.

    None stays None, as for attention weights that are not requested.
    """
    there = [piece for piece in pieces if piece is not None]
    return plan.join(there, sum(map(len, there)) // plan.rows) if there else None


class _OfSite:
    """Apply the modules of one site to a product."""

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


def override_forward(host: nn.Module, patch: Patch) -> None:
    """Replace a host's forward by one that reads the slot.

    accelerate keeps the wrapped forward under another name. Its own work before that forward, such
    as loading weights, is already done.
    """
    name = "_old_forward" if "_old_forward" in vars(host) else "forward"
    function = _as_function(host, vars(host).get(name))
    patch.override(host, name, functools.partial(call_host, host, function))


def _as_function(host: nn.Module, forward: Any) -> Callable[..., Any]:
    """Return a forward as a function of the module; None is its class's forward."""
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

    `function` is its forward, as a function of the host.

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
    """Return the slot at a host that holds a weight; create it if missing."""
    host = model.get_submodule(site.host)
    slot = host._modules.get(CHILD)
    if not isinstance(slot, HeldWeightSlot):
        if parallel := tensor_parallel(model):
            parallel.boundary(site.host, site.d_out)  # refuses routed experts
        slot = HeldWeightSlot()
        override_forward(host, slot.patch)
        put_slot(host, slot)
    return slot


class AdaptedWeight:
    """A parameter, or matrices of it, whose products are adapted.

    Args:
        tensor: the parameter, or a value derived from it: an item, a cast, a transpose.
        held: the way the module holds the parameter.
        apply: adapts a product: `apply(x, product, rows) -> y'`.
        selected: the number of one expert, or (rows,) numbers; None: all matrices.
        turned: whether the last two dimensions of the parameter are exchanged.
    """

    def __init__(
        self,
        tensor: Tensor,
        held: HeldWeight,
        apply: ApplyProduct,
        selected: int | Tensor | None = None,
        turned: bool = False,
    ) -> None:
        self.tensor, self.held, self.apply = tensor, held, apply
        self.selected, self.turned = selected, turned

    def _like(self, tensor: Tensor, **changes: Any) -> AdaptedWeight:
        now = {"selected": self.selected, "turned": self.turned}
        return AdaptedWeight(tensor, self.held, self.apply, **(now | changes))

    @property
    def inputs_last(self) -> bool:
        """Whether a matrix is (d_out, d_in) here, as for `linear`."""
        return self.held.transposed == self.turned

    @property
    def rows(self) -> ExpertRows:
        """The experts of the matrices; for one matrix without experts, the only one."""
        if self.held.experts is None:
            return OneExpert(0)
        if self.selected is None:
            return EveryExpert()
        one = isinstance(self.selected, int) or self.selected.ndim == 0
        return OneExpert(self.selected) if one else RowsByIndex(torch.as_tensor(self.selected))

    def __getitem__(self, index: Any) -> Any:
        item = self.tensor[index]
        number = isinstance(index, int) or (
            isinstance(index, Tensor)
            and index.ndim <= 1
            and index.dtype in (torch.int64, torch.int32)
        )
        if number and self.held.experts is not None and self.selected is None:
            return self._like(item, selected=index)
        return self.changed()[index]

    def transpose(self, first: int, second: int) -> Any:
        """Exchange two dimensions."""
        dims = {first % self.tensor.ndim, second % self.tensor.ndim}
        if dims == {self.tensor.ndim - 1, self.tensor.ndim - 2}:
            return self._like(self.tensor.transpose(first, second), turned=not self.turned)
        return self.changed().transpose(first, second)

    @property
    def mT(self) -> Any:
        """The matrices, transposed."""
        return self.transpose(-1, -2)

    def __matmul__(self, other: Any) -> Any:
        return self.changed() @ other

    def __len__(self) -> int:
        return len(self.tensor)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "tensor" not in vars(self):
            raise AttributeError(name)
        if name in ("T", "t"):
            return self.mT if name == "T" else lambda: self.mT
        if name in _CASTS:
            return lambda *args, **kwargs: self._like(getattr(self.tensor, name)(*args, **kwargs))
        value = getattr(self.tensor, name)  # its shape, dtype, device
        computes = callable(value) and name not in ("size", "dim", "stride", "data_ptr")
        return getattr(self.changed(), name) if computes else value

    def changed(self) -> Tensor:
        """Compute the matrices that include the effect of the modules."""
        matrices = self.tensor if self.inputs_last else self.tensor.transpose(-1, -2)
        single = matrices.ndim == 2
        stack = matrices[None] if single else matrices
        units = torch.eye(stack.shape[-1], dtype=stack.dtype, device=stack.device)
        x = units.expand(len(stack), -1, -1)
        if single:
            y = self.apply(units, lambda x: F.linear(x, matrices), self.rows)[None]
        elif self.selected is None:
            y = self.apply(x, lambda x: torch.bmm(x, stack.transpose(1, 2)), self.rows)
        else:
            numbers = torch.as_tensor(self.selected)
            y = torch.stack(
                [
                    self.apply(units, lambda x, m=m: F.linear(x, m), OneExpert(number))  # type: ignore[misc]
                    for m, number in zip(stack, numbers, strict=True)
                ]
            )
        result = y.transpose(1, 2) if self.inputs_last else y
        return result[0] if single else result

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Adapt a product with the weight; pass a changed copy to other functions."""
        options = {name: value for name, value in (kwargs or {}).items() if value is not None}
        weights = [a for a in (*args, *options.values()) if isinstance(a, AdaptedWeight)]
        if (
            len(weights) == 1
            and (result := _product(function, weights[0], args, options)) is not None
        ):
            return result
        plain = [_changed(a) for a in args]
        return function(*plain, **{key: _changed(value) for key, value in options.items()})


def _changed(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_changed, value))
    return value.changed() if isinstance(value, AdaptedWeight) else value


def _product(
    function: Callable[..., Any],
    weight: AdaptedWeight,
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> Tensor | None:
    """Compute an adapted product, if the call is a product.

    `options` are its named arguments that are not None. Returns: None for another use of the
    weight.
    """
    name = getattr(function, "__name__", "")
    if len(args) < 2 or (weight is not args[1] and weight is not args[0]):
        return None
    left, right, *rest = args
    if name == "linear" and right is weight and weight.inputs_last and weight.tensor.ndim == 2:
        matrix = weight.tensor
        y: Tensor = weight.apply(left, lambda x: function(x, matrix, *rest, **options), weight.rows)
        return y
    if name in _GROUPED and right is weight and not weight.inputs_last and weight.selected is None:
        grouped: Tensor | None = _grouped(function, weight, left, *rest, **options)
        return grouped
    if rest or options:
        return None
    if name in ("matmul", "bmm") and right is weight and not weight.inputs_last:
        return _right_product(function, weight, left)
    if name == "bmm" and left is weight and weight.inputs_last:
        return _of_columns(weight, right)
    return None


def _right_product(function: Callable[..., Any], weight: AdaptedWeight, x: Tensor) -> Tensor | None:
    """Compute x W: of one matrix, of all, or of one row for each selected matrix."""
    rows, matrices = weight.rows, weight.tensor
    if not isinstance(rows, RowsByIndex):
        return weight.apply(x, lambda x: function(x, matrices), rows)
    if x.ndim != 3 or x.shape[1] != 1:
        return None
    y = weight.apply(x.squeeze(1), lambda x: function(x.unsqueeze(1), matrices).squeeze(1), rows)
    return y.unsqueeze(1)


def _of_columns(weight: AdaptedWeight, x: Tensor) -> Tensor | None:
    """Compute W x for one column of each selected matrix."""
    rows, matrices = weight.rows, weight.tensor
    if not isinstance(rows, RowsByIndex) or x.shape[-1] != 1:
        return None
    y = weight.apply(
        x.squeeze(-1), lambda x: torch.bmm(matrices, x.unsqueeze(-1)).squeeze(-1), rows
    )
    return y.unsqueeze(-1)


def _grouped(
    function: Callable[..., Any], weight: AdaptedWeight, x: Tensor, offs: Tensor, **options: Any
) -> Tensor | None:
    """Compute the product of sorted rows, each with the matrix of its expert."""
    named = function.__name__ == "_grouped_mm"  # the others take the ends by position
    ends: dict[str, Any] = {"offs": offs} if named else {}
    places = () if named else (offs,)
    if options:
        return None
    return weight.apply(x, lambda x: function(x, weight.tensor, *places, **ends), SortedRows(offs))
