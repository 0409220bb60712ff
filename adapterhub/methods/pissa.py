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
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.ops import cast, stack_low_rank
from adapterhub.methods.common.projections import require_components, weight_at
from adapterhub.methods.common.site_module import init_is_skipped
from adapterhub.methods.lora import LoRA, LoRALayer

OVERSAMPLING = 10  # additional directions, for the accuracy of the last components
EXACT = 1024  # the size up to which the SVD of `leading` is exact


def largest_components(
    matrix: Tensor, count: int, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the largest singular values of a matrix and their vectors, of length 1.

    matrix: (m, n). `iterations` are power iterations of the randomized SVD, which reads the global
    random numbers; 0: the exact SVD.

    Returns:
        U: (m, count), S: (count,) and Vᵀ: (count, n).
    """
    with torch.no_grad():
        if iterations:
            width = min(count + OVERSAMPLING, *matrix.shape)
            u, s, v = torch.svd_lowrank(matrix, q=width, niter=iterations)
            vh = v.T
        else:
            u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        return u[:, :count], s[:count], vh[:count]


def principal(weight: Tensor, rank: int, iterations: int) -> tuple[Tensor, Tensor]:
    """Compute the principal components of a matrix, as `largest_components` does.

    Returns:
        U_r sqrt(S_r): (d_out, rank) and sqrt(S_r) V_rᵀ: (rank, d_in).
    """
    u, s, vh = largest_components(weight, rank, iterations)
    root = s.sqrt()
    return u * root, root[:, None] * vh


def leading(matrix: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `largest_components` so that they depend on the matrix alone.

    They are exact up to 1,024 rows or columns, and no global random number is read. The largest
    number of each right vector is positive.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        u, s, vh = largest_components(matrix, count, 8 if min(matrix.shape) > EXACT else 0)
    signs = vh.gather(1, vh.abs().argmax(1, keepdim=True)).sign()
    return u * signs.T, s, signs * vh


def empty_factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return zeros in the shapes of `principal`, to be filled from a file."""
    return weight.new_zeros(weight.shape[0], rank), weight.new_zeros(rank, weight.shape[1])


class PiSSALayer(LoRALayer):
    """The map (x, y) -> y + s (B A x - B0 A0 x)."""

    stack = staticmethod(stack_low_rank)

    A0: Tensor
    B0: Tensor

    def __init__(self, d_in: int, d_out: int, rank: int, scale: float, dropout: float) -> None:
        super().__init__(d_in, d_out, rank, scale, dropout)
        self.register_buffer("A0", self.A.detach().clone())
        self.register_buffer("B0", self.B.detach().clone())

    def begin(self, left: Tensor, right: Tensor) -> None:
        """Begin at B = B0 = `left`, (d_out, rank), and A = A0 = `right`, (rank, d_in).

        In the same memory layout, both products round equally and cancel exactly at first.
        """
        with torch.no_grad():
            for tensor, value in (
                (self.A0, right),
                (self.A, right),
                (self.B0, left),
                (self.B, left),
            ):
                tensor.copy_(value)

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
        scale = self.scale(rank)
        layer = PiSSALayer(site.d_in, site.d_out, rank, scale, self.dropout)
        if not init_is_skipped():
            left, right = principal(weight_at(site, anatomy), rank, self.iterations)
            layer.begin(left / scale**0.5, right / scale**0.5)
        return layer
