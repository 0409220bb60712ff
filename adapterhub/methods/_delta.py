"""Modules that add D x to the output of a projection: D a product of factors, or any matrix.

Of those that read the weight W, `WeightFactors` computes the factors from it in each call.

A computed D is built once for each call in training. In `eval()`, without gradients and on the
processor, it is kept for later calls as long as the bytes of its parameters do not change, which
are compared. On other devices comparing would wait for them, so D is built for each call there,
which takes about as long as rank tokens; `merge` costs nothing afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adapterhub.methods._ops import add_product, cast
from adapterhub.methods._site_module import OutputModule

LARGEST = 1 << 22  # numbers of a kept D: those of all sites are kept at the same time


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
        """Leave out what is kept, in copies and pickles."""
        return {name: value for name, value in self.__dict__.items() if name != "_kept"}


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
