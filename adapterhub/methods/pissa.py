"""PiSSA: LoRA that is initialized with the principal singular components of the weight.

    W = U S Vᵀ,   A0 = sqrt(S_r / s) V_rᵀ,   B0 = U_r sqrt(S_r / s),   s B0 A0 = U_r S_r V_rᵀ
    y = (W - s B0 A0) x + s B A x + b = y0 + s (B A x - B0 A0 x)                    (section 3)

    W: (d_out, d_in)    A, A0: (rank, d_in)    B, B0: (d_out, rank)    y0: the host's output
    s = alpha / rank, by default 1 as in the paper

A and B are initialized as A0 and B0, so the initial update is zero. The paper subtracts s B0 A0
from W; here W is unchanged, and s B0 A0 x is subtracted from the output. A0 and B0 are saved with
the adapter, since another decomposition of W may have other signs and rounding errors. The SVD
is randomized by default (Halko et al. 2011, https://arxiv.org/abs/0909.4061).

Parameters: rank (d_in + d_out) per site.

Meng et al. 2024, "PiSSA: Principal Singular Values and Singular Vectors Adaptation of Large
Language Models", section 3, https://arxiv.org/abs/2404.02948.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.methods._base import register_method
from adapterhub.methods._ops import cast, stack_low_rank
from adapterhub.methods._projections import require_components, weight_at
from adapterhub.methods._skip_init import init_is_skipped
from adapterhub.methods.lora import LoRA, LoRALayer

OVERSAMPLING = 10  # additional directions, for the accuracy of the last components


def principal(weight: Tensor, rank: int, iterations: int) -> tuple[Tensor, Tensor]:
    """Compute the principal components of a matrix.

    weight: (d_out, d_in). `iterations` are power iterations of the randomized SVD; 0: the exact
    SVD.

    Returns:
        U_r sqrt(S_r): (d_out, rank) and sqrt(S_r) V_rᵀ: (rank, d_in).
    """
    with torch.no_grad():
        if iterations:
            width = min(rank + OVERSAMPLING, *weight.shape)
            u, s, v = torch.svd_lowrank(weight, q=width, niter=iterations)
            vh = v.T
        else:
            u, s, vh = torch.linalg.svd(weight, full_matrices=False)
        root = s[:rank].sqrt()
        return u[:, :rank] * root, root[:, None] * vh[:rank]


def empty_factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return zeros in the shapes of `principal`, to be filled from a file."""
    return weight.new_zeros(weight.shape[0], rank), weight.new_zeros(rank, weight.shape[1])


class PiSSALayer(LoRALayer):
    """The map (x, y) -> y + s (B A x - B0 A0 x)."""

    stack = staticmethod(stack_low_rank)

    A0: Tensor
    B0: Tensor

    def __init__(
        self, weight: Tensor, rank: int, scale: float, dropout: float, iterations: int
    ) -> None:
        super().__init__(weight.shape[1], weight.shape[0], rank, scale, dropout)
        if init_is_skipped():
            factors = empty_factors(weight, rank)
        else:
            factors = principal(weight, rank, iterations)
        # In the same memory layout, both products round equally and cancel exactly at first.
        left, right = ((f / scale**0.5).contiguous() for f in factors)
        self.register_buffer("A0", right)
        self.register_buffer("B0", left)
        with torch.no_grad():
            self.A.copy_(right)
            self.B.copy_(left)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the new output. x: (..., d_in), y: (..., d_out) -> y' like y."""
        if self.training and self.dropout:
            x = F.dropout(x, self.dropout)
        current = F.linear(F.linear(x, cast(self.A, x)), cast(self.B, x))
        initial = F.linear(F.linear(x, cast(self.A0, x)), cast(self.B0, x))
        return y + self.scale * (current - initial).to(y.dtype)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return s [B, -B0]: (d_out, 2 rank) and [A; A0]: (2 rank, d_in)."""
        left = self.scale * torch.cat([self.B, -self.B0], dim=1)
        return left, torch.cat([self.A, self.A0])


@register_method
@dataclass(frozen=True)
class PiSSA(LoRA):
    """Low-rank updates, initialized with the principal components of the weight."""

    name = "pissa"
    training_options = ("dropout", "iterations")
    paper = "Meng et al. 2024, https://arxiv.org/abs/2404.02948"
    summary = "LoRA initialized with the principal components of the weight"
    learning_rate = 5e-4

    alpha: float = option(
        8.0, "numerator of the scale: updates are multiplied by alpha / rank", above=0
    )
    iterations: int = option(
        8, "power iterations of the randomized SVD; 0: exact SVD", least=0, most=100
    )

    kinds = ("linear",)

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> PiSSALayer:
        """Return the update of one site, whose weight has as many components as the rank."""
        require_components(self, site, rank)
        weight = weight_at(site, anatomy)
        return PiSSALayer(weight, rank, self.scale(rank), self.dropout, self.iterations)
