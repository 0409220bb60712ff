"""Modules whose output is affine in x and y, in one form: of LoRA, VeRA, DoRA and IA3 alike.

    y' = y + c * y + t + B A x

    A: (rank, d_in)    B: (d_out, rank)    c, t: (d_out,), None for zeros

While nobody changes such modules, the rows of a batch are one product, whatever their methods are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adapterhub.methods._ops import (
    RowStack,
    add_low_rank,
    cast,
    declared_stack,
    padded,
    stack_low_rank,
)
from adapterhub.methods._site_module import OutputModule, SiteModule

if TYPE_CHECKING:
    from adapterhub.anatomy.sites import Site


def _stack_affine(modules: Sequence[SiteModule | None]) -> RowStack:
    """Stack affine modules; c and t only where one of them has some."""
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
    """Return the form in which a module is stacked as long as nobody changes it.

    A class declares it in its own body, as `constant`: a subclass that computes something else does
    not inherit it. One that is stacked by its `factors` has the form that they say. `weight` are
    the weight and the bias of the host, for modules that read them.
    """
    declared = vars(type(module)).get("constant")
    if declared is not None:
        return declared(module, site, *weight)  # type: ignore[no-any-return]
    if declared_stack([module]) is stack_low_rank:
        product: Any = module
        left, right = product.factors()
        return AffineLayer(right, left.T)
    return module
