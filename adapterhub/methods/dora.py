"""DoRA: a low-rank update of a weight's direction, and a trained magnitude.

    y = m / ||V||_c * (W x + s B A x) + b,   V = W + s B A,   s = alpha / rank      (equation 5)

    W: (d_out, d_in), frozen    A: (rank, d_in)    B: (d_out, rank), zero    b: the host's bias
    m: (d_out,), initialized as ||W||_c, the norm of the weights of each output feature

||V||_c is a constant in the backward pass (section 4.3). It is computed without V, from

    ||V||² = ||W||² + 2 s <W Aᵀ, B> + s² <B A Aᵀ, B>,   row by row

at the cost of about one additional token.

Parameters: rank (d_in + d_out) + d_out per site.

Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank Adaptation", sections 4.1
and 4.3, https://arxiv.org/abs/2402.09353.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.ops import AffineLayer, cast, no_autocast
from adapterhub.methods.common.projections import weight_at
from adapterhub.methods.lora import LoRA, LoRALayer


class DoRALayer(LoRALayer):
    """The map (x, y, W, b) -> m / ||V||_c (y - b + s B A x) + b."""

    reads_weight = True

    def __init__(self, weight: Tensor, rank: int, scale: float, dropout: float) -> None:
        super().__init__(weight.shape[1], weight.shape[0], rank, scale, dropout)
        self.magnitude = nn.Parameter(weight.detach().square().sum(1).sqrt())

    def forward(  # type: ignore[override]
        self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Compute the new output, like y.

        x: (..., d_in), y: (..., d_out), weight: (d_out, d_in), bias: (d_out,) or None.
        """
        if self.training and self.dropout:
            x = F.dropout(x, self.dropout)
        ratio = self.magnitude / self.norm(weight)
        product = y if bias is None else y - bias.to(y.dtype)
        update = F.linear(F.linear(x, cast(self.A, x)), cast(self.B, x))
        # Written as a change of y, so a ratio of exactly 1 and a zero B return y itself.
        return y + (ratio - 1).to(y.dtype) * product + (self.scale * ratio).to(y.dtype) * update

    def constant(self, site: Site, weight: Tensor, bias: Tensor | None) -> AffineLayer:
        """Return the form that is stacked with other affine modules."""
        ratio = self.magnitude / self.norm(weight)
        shift = None if bias is None else (1 - ratio) * bias
        return AffineLayer(self.A, ((self.scale * ratio)[:, None] * self.B).T, ratio - 1, shift)

    def factors(self) -> None:
        """Return None: the update of W is not low-rank."""

    def norm(self, weight: Tensor) -> Tensor:
        """Compute ||W + s B A||_c: (d_out,), in fp32 and without gradient."""
        with torch.no_grad(), no_autocast(weight):
            A, B = self.A.float(), self.B.float()
            cross = ((weight @ A.T) * B).sum(1)
            square = ((B @ (A @ A.T)) * B).sum(1)
            total = weight.square().sum(1) + 2 * self.scale * cross + self.scale**2 * square
            return total.clamp_min(torch.finfo(total.dtype).tiny).sqrt()


@register_method
@dataclass(frozen=True)
class DoRA(LoRA):
    """Low-rank updates of directions, with trained magnitudes."""

    name = "dora"
    paper = "Liu et al. 2024, https://arxiv.org/abs/2402.09353"
    summary = "low-rank update of a weight's direction, with a trained magnitude"

    kinds = ("linear",)

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> DoRALayer:
        """Return the update of one site, whose weight can be read."""
        return DoRALayer(weight_at(site, anatomy), rank, self.scale(rank), self.dropout)

    def size(self, site: Site, rank: int) -> int:
        """Return rank (d_in + d_out) + d_out."""
        return super().size(site, rank) + site.d_out
