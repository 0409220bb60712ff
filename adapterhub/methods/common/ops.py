"""Tensor operations that site modules share, and modules of one kind computed as one.

A stack computes module i for row i of a batch, in a few batched products. A class of site modules
declares its stack in its own body, as `stack`: a subclass that computes something else does not
inherit it.

Modules whose output is affine in x and y have one form, LoRA, VeRA, DoRA and IA3 alike:

    y' = y + c * y + t + B A x

    A: (rank, d_in)    B: (d_out, rank)    c, t: (d_out,), None for zeros

While such modules are constant, the rows of a batch are one product, whatever their methods.

Other modules add D x to the output of a projection: D is a product of factors, or any matrix. Of
those that read the weight W, `WeightFactors` computes the factors from it in each call.

A computed D is built once for each call in training. In `eval()`, without gradients and on the
processor, it is kept for later calls while the bytes of its parameters do not change. On other
devices, comparing the bytes would wait for the device, so D is built for each call there, which
takes about as long as rank tokens; `merge` avoids this cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from adapterhub.methods.common.site_module import OutputModule, SiteModule

if TYPE_CHECKING:
    from adapterhub.anatomy.sites import Site
    from adapterhub.methods.common.site_module import SiteModule


def cast(parameter: Tensor, like: Tensor) -> Tensor:
    """Cast a parameter to the dtype of `like`; under autocast, leave the dtype to autocast."""
    if parameter.dtype == like.dtype or torch.is_autocast_enabled(like.device.type):
        return parameter
    return parameter.to(like.dtype)


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in at least fp32, for operations that torch lacks in narrower dtypes."""
    return tensor.float() if tensor.element_size() < 4 else tensor


def no_autocast(like: Tensor) -> AbstractContextManager[Any]:
    """Return a context where products keep their dtype, on the device of a tensor."""
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
        compute: the function of a module's inputs, (modules, tokens, d) each, and `tensors`.
    """

    tensors: tuple[Tensor, ...]
    compute: Callable[..., Any]

    def __call__(self, *inputs: Tensor) -> Any:
        """Compute the output of module i for row i of the inputs."""
        return self.compute(*inputs, *self.tensors)

    @property
    def numbers(self) -> int:
        """The number of values in one module of the stack, including padding."""
        return sum(tensor[0].numel() for tensor in self.tensors)

    def at(self, rows: Tensor) -> RowStack:
        """Return a stack with module `rows[i]` for row i."""
        rows = rows.to(self.tensors[0].device)
        return RowStack(tuple([each.index_select(0, rows) for each in self.tensors]), self.compute)

    def cast(self, dtype: torch.dtype) -> RowStack:
        """Return the stack in its compute dtype."""
        return RowStack(tuple(each.to(dtype) for each in self.tensors), self.compute)


# Modules by their place in a stack, None for a place without changes. The result is None if these
# modules cannot be stacked, as with dropout.
StackModules: TypeAlias = "Callable[[Sequence[SiteModule | None]], RowStack | None]"


def declared_stack(modules: Sequence[SiteModule | None]) -> StackModules | None:
    """Return the stack function of some modules' classes, if all of them declare the same one."""
    classes = {type(module) for module in modules if module is not None}
    declared = {getattr(vars(cls).get("stack"), "__func__", None) for cls in classes}
    return declared.pop() if len(declared) == 1 else None


def stack_low_rank(modules: Sequence[SiteModule | None]) -> RowStack | None:
    """Stack modules that add a product of rank r, by their `factors`."""
    some: Any = next(module for module in modules if module is not None)
    if any(m.training and getattr(m, "dropout", 0) for m in modules if m is not None):
        return None
    left, right = some.factors()
    empty = left[:, :0], right[:0]
    present: Any = modules
    factors = [empty if m is None else m.factors() for m in present]
    lefts = [left for left, _ in factors]
    if len({left.shape for left in lefts}) == 1:
        up = torch.stack(lefts).transpose(1, 2)  # faster than a stack of transposed matrices
    else:
        up = padded([left.T for left in lefts])
    return RowStack((padded([right for _, right in factors]), up), add_low_rank)


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


def _stack_affine(modules: Sequence[SiteModule | None]) -> RowStack:
    """Stack affine modules; c and t are included only if one of them has these."""
    some: Any = next(module for module in modules if module is not None)
    zeros = some.up.new_zeros(some.up.shape[1])
    empty = AffineLayer(some.down[:0], some.up[:0])
    present: list[Any] = [empty if module is None else module for module in modules]
    down, up = padded([m.down for m in present]), padded([m.up for m in present])
    if all(m.change is None and m.shift is None for m in present):
        return RowStack((down, up), add_low_rank)
    change = torch.stack([zeros if m.change is None else m.change for m in present])
    shift = torch.stack([zeros if m.shift is None else m.shift for m in present])
    return RowStack((down, up, change[:, None], shift[:, None]), _add_affine)


def _add_affine(
    x: Tensor, y: Tensor, down: Tensor, up: Tensor, change: Tensor, shift: Tensor
) -> Tensor:
    """Compute y + c * y + t + upᵀ down x, like y, with tensors of `add_low_rank`."""
    scaled = torch.addcmul(y + shift, y, change)
    return add_low_rank(x, scaled, down, up) if down.shape[1] else scaled


class AffineLayer(OutputModule):
    """The map (x, y) -> y + c * y + t + B A x.

    `down` is A, `up` is Bᵀ: (rank, d_out), `change` is c, and `shift` is t.
    """

    affine = True
    stack = staticmethod(_stack_affine)

    down: Tensor
    up: Tensor
    change: Tensor | None
    shift: Tensor | None

    def __init__(
        self, down: Tensor, up: Tensor, change: Tensor | None = None, shift: Tensor | None = None
    ) -> None:
        super().__init__()
        tensors = {"down": down, "up": up, "change": change, "shift": shift}
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor if tensor is None else tensor.detach())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the new output. x: (..., d_in), y: (..., d_out) -> y' like y."""
        update = F.linear(F.linear(x, cast(self.down, x)), cast(self.up, x).T).to(y.dtype)
        update = update if self.shift is None else update + cast(self.shift, y)
        return y + (update if self.change is None else update + cast(self.change, y) * y)


def constant_form(module: SiteModule, site: Site, *weight: Tensor | None) -> SiteModule:
    """Return the stackable form of a constant module.

    A class declares it in its own body, as `constant`: a subclass with other outputs does not
    inherit it. A class stacked by its `factors` has the form of these. `weight` are the weight and
    the bias of the host, for modules that read them.
    """
    declared = vars(type(module)).get("constant")
    if declared is not None:
        return declared(module, site, *weight)  # type: ignore[no-any-return]
    if declared_stack([module]) is stack_low_rank:
        product: Any = module
        left, right = product.factors()
        return AffineLayer(right, left.T)
    return module


LARGEST = 1 << 22  # values of a kept D, since all sites are kept at the same time


class FactorModule(OutputModule):
    """The map (x, y) -> y + L R x, with the factors L and R that a subclass computes."""

    affine = True

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return L: (d_out, r) and R: (r, d_in)."""
        raise NotImplementedError

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the new output. x: (..., d_in), y: (..., d_out) -> y' like y."""
        left, right = self.factors()
        return add_product(y, F.linear(x, cast(right, x)), left, 1.0)


class WeightFactors(OutputModule):
    """The map (x, y, W, b) -> y + L R x, with the L and R that a subclass computes from W."""

    affine = True
    reads_weight = True

    def product(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return L: (d_out, r) and R: (r, d_in). weight: (d_out, d_in)."""
        raise NotImplementedError

    def forward(  # type: ignore[override]
        self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Compute the new output, like y.

        x: (..., d_in), y: (..., d_out), weight: (d_out, d_in), bias: (d_out,) or None.
        """
        left, right = self.product(weight)
        return add_product(y, F.linear(x, cast(right, x)), left, 1.0)


class DeltaModule(OutputModule):
    """The map (x, y) -> y + D x, with the D that a subclass computes."""

    affine = True
    _kept: tuple[list[Tensor], Tensor] | None = None

    def delta(self) -> Tensor:
        """Return D: (d_out, d_in)."""
        raise NotImplementedError

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the new output. x: (..., d_in), y: (..., d_out) -> y' like y."""
        delta = self._kept_delta() if self._may_keep(x, y) else self.delta()
        return y + F.linear(x, cast(delta, x)).to(y.dtype)

    def _may_keep(self, x: Tensor, y: Tensor) -> bool:
        if self.training or x.device.type != "cpu" or torch.compiler.is_compiling():
            return False
        if x.shape[-1] * y.shape[-1] > LARGEST:
            return False
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        return not trained

    def _kept_delta(self) -> Tensor:
        tensors = [*self.parameters(), *self.buffers()]
        kept = self._kept
        if kept is not None and all(map(_same, tensors, kept[0])):
            return kept[1]
        with torch.inference_mode(False), torch.no_grad():
            copies = [tensor.detach().clone() for tensor in tensors]
            delta = self.delta()
        self._kept = (copies, delta)
        return delta

    def __getstate__(self) -> Mapping[str, Any]:
        """Omit kept values in copies and pickles."""
        return {name: value for name, value in self.__dict__.items() if name != "_kept"}


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def in_blocks(x: Tensor, blocks: Tensor) -> Tensor:
    """Multiply the parts of x by a matrix each.

    x: (..., n b), blocks: (n, b, b), or (1, b, b) for all -> like x.
    """
    with no_autocast(x):
        rotated: Tensor = split_last(x, -1, 1, blocks.shape[-1]) @ blocks.to(x.dtype)
        return rotated.flatten(-3)


def skew(upper: Tensor, size: int) -> Tensor:
    """Return skew-symmetric matrices from the entries above their diagonals.

    upper: (n, size (size - 1) / 2), row by row -> (n, size, size).
    """
    rows, columns = torch.triu_indices(size, size, 1, device=upper.device)
    matrix = upper.new_zeros(len(upper), size, size)
    matrix[:, rows, columns] = upper
    return matrix - matrix.mT


def cayley(skewed: Tensor, terms: int = 0) -> Tensor:
    """Return rotations (I + Q) (I - Q)^-1 of skew-symmetric matrices Q, (n, b, b).

    `terms`: the number of terms of the series I + 2 Q + 2 Q^2 + ... instead, whose last term counts
    once; 0 for the exact inverse.
    """
    with no_autocast(skewed):
        skewed = wide(skewed)
        eye = torch.eye(skewed.shape[-1], device=skewed.device, dtype=skewed.dtype)
        if not terms:
            # I - Q has an inverse for each Q; a check of that would wait for the device.
            exact: Tensor = torch.linalg.solve_ex(eye - skewed, eye + skewed).result
            return exact
        total, power = eye.expand_as(skewed), skewed
        for number in range(1, terms):
            total = total + (1.0 if number == terms - 1 > 1 else 2.0) * power
            power = power @ skewed
        return total
