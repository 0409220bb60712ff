"""A weight that adapts the products with it: W in W x, with modules on x and on W x.

It stands for a parameter while the forward of its module runs, whatever way that forward has of
multiplying: one expert after the other, copies of matrices, grouped or batched products. A product
with the weight is torch's own with the parameter, and the modules are applied to its input and
output, so no changed copy of the weight is computed. Any other use of the weight gets such a copy,
computed from the products with unit vectors.

    F.linear(x, W[e])    x @ Wᵀ[e]    bmm(W[numbers], x)    bmm(x, W)    grouped_mm(x, W, ends)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from adapterhub.anatomy.projections import HeldWeight
from adapterhub.methods._expert_rows import (
    EveryExpert,
    ExpertRows,
    OneExpert,
    RowsByIndex,
    SortedRows,
)

# Adapts a product of some rows: apply(x, product, rows) -> y'.
Product: TypeAlias = Callable[[Tensor], Tensor]
ApplyProduct: TypeAlias = Callable[[Tensor, Product, ExpertRows], Tensor]
_CASTS = ("to", "type", "float", "type_as", "contiguous")
_GROUPED = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")


class AdaptedWeight:
    """A parameter, or matrices of it, whose products are adapted.

    Args:
        tensor: the parameter, or what the module made of it: an item, a cast, a transpose.
        held: how the module holds the parameter.
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
        """Whether a matrix is (d_out, d_in) here, as `linear` takes it."""
        return self.held.transposed == self.turned

    @property
    def rows(self) -> ExpertRows:
        """Which experts the matrices are of; for one matrix without experts, the only one."""
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
        """Compute the matrices with which the modules are parts of the products."""
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
        """Adapt a product with the weight; give other functions a changed copy."""
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
    """Compute an adapted product, if a call is one.

    `options` are its named arguments that are not None.

    Returns:
        None for another use of the weight.
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
    named = function.__name__ == "_grouped_mm"  # the others take the ends by place
    ends: dict[str, Any] = {"offs": offs} if named else {}
    places = () if named else (offs,)
    if options:
        return None
    return weight.apply(x, lambda x: function(x, weight.tensor, *places, **ends), SortedRows(offs))
