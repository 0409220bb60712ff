"""Tensor operations that site modules share, and modules of one kind computed as one.

A stack computes module i for row i of a batch, in a few batched products. A class of site modules
declares its stack in its own body, as `stack`: a subclass that computes something else does not
inherit it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:
    from adapterhub.methods._site_module import SiteModule


def cast(parameter: Tensor, like: Tensor) -> Tensor:
    """Cast a parameter to the dtype of `like`; under autocast, leave the dtype to autocast."""
    if parameter.dtype == like.dtype or torch.is_autocast_enabled(like.device.type):
        return parameter
    return parameter.to(like.dtype)


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in fp32 at least, for operations that torch has in no narrower dtype."""
    return tensor.float() if tensor.element_size() < 4 else tensor


def no_autocast(like: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which products keep their dtype, on the device of a tensor."""
    kind = like.device.type
    return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


def orthogonality_loss(factors: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the mean of ||A Aᵀ - I|| and ||Bᵀ B - I|| over pairs A: (r, d_in), B: (d_out, r)."""
    products = [each for a, b in factors for each in (a @ a.T, b.T @ b)]
    norms = [(each - torch.eye(len(each)).to(each)).norm() for each in products]
    return torch.stack(norms).mean()


def split_last(x: Tensor, *sizes: int) -> Tensor:
    """Return a tensor with its last dimension as several: (..., d) -> (..., *sizes)."""
    return x.reshape(*x.shape[:-1], *sizes)


def add_product(y: Tensor, u: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Compute y + scale * u weightᵀ in one pass, like y.

    y: (..., d_out), u: (..., r), weight: (d_out, r).
    """
    if torch.compiler.is_compiling():
        # A compiler fuses this; with dynamic shapes the scale is a symbol, which addmm cannot take.
        return y + scale * F.linear(u.to(y.dtype), cast(weight, y))
    rows = y.reshape(-1, y.shape[-1])
    u = u.reshape(-1, u.shape[-1]).to(y.dtype)
    return torch.addmm(rows, u, cast(weight, y).T, alpha=scale).view(y.shape)


class RowStack(NamedTuple):
    """Several modules, computed at once.

    Attributes:
        tensors: (modules, ...) each; smaller modules are padded so that padding computes nothing.
        compute: what a module computes of its inputs, (modules, tokens, d) each, and `tensors`.
    """

    tensors: tuple[Tensor, ...]
    compute: Callable[..., Any]

    def __call__(self, *inputs: Tensor) -> Any:
        """Compute the output of module i for row i of the inputs."""
        return self.compute(*inputs, *self.tensors)

    @property
    def numbers(self) -> int:
        """How many numbers one module of the stack has, with padding."""
        return sum(tensor[0].numel() for tensor in self.tensors)

    def at(self, rows: Tensor) -> RowStack:
        """Return a stack with module `rows[i]` for row i."""
        rows = rows.to(self.tensors[0].device)
        return RowStack(tuple([each.index_select(0, rows) for each in self.tensors]), self.compute)

    def cast(self, dtype: torch.dtype) -> RowStack:
        """Return the stack in the dtype that it computes in."""
        return RowStack(tuple(each.to(dtype) for each in self.tensors), self.compute)


# Modules by their place in a stack, None for one that changes nothing; the result is None where
# these modules cannot be stacked, as with dropout.
StackModules: TypeAlias = "Callable[[Sequence[SiteModule | None]], RowStack | None]"


def declared_stack(modules: Sequence[SiteModule | None]) -> StackModules | None:
    """Return how the classes of some modules are stacked, if all of them declare the same."""
    classes = {type(module) for module in modules if module is not None}
    declared = {getattr(vars(cls).get("stack"), "__func__", None) for cls in classes}
    return declared.pop() if len(declared) == 1 else None


def stack_low_rank(modules: Sequence[SiteModule | None]) -> RowStack | None:
    """Stack modules that add a product of rank r, as their `factors` say."""
    some: Any = next(module for module in modules if module is not None)
    if any(m.training and getattr(m, "dropout", 0) for m in modules if m is not None):
        return None
    left, right = some.factors()
    empty = left[:, :0], right[:0]
    present: Any = modules
    factors = [empty if m is None else m.factors() for m in present]
    down, up = ([right for _, right in factors], [left.T for left, _ in factors])
    return RowStack((padded(down), padded(up)), add_low_rank)


def add_low_rank(x: Tensor, y: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Compute y + upᵀ down x, like y.

    x: (modules, tokens, d_in), y: (modules, tokens, d_out), down: (modules, r, d_in), up: (modules,
    r, d_out).
    """
    return torch.baddbmm(y, torch.bmm(x, down.transpose(1, 2)).to(y.dtype), up)


def padded(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors whose first dimensions differ: (n, longest, ...), with zeros behind."""
    if len({each.shape for each in tensors}) == 1:
        return torch.stack(list(tensors))
    return pad_sequence(list(tensors), batch_first=True)
