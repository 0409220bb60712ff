"""LoKr: an update of a projection that is a Kronecker product with a low-rank factor.

    y = W x + s (C (x) (B A)) x,   s = alpha / rank                     (LyCORIS, section 3.3)

    x: (..., m n)    C: (j, m), zero    A: (rank, n)    B: (k, rank)    y: (..., j k)
    (x): the Kronecker product

Each size is the product of two whole numbers: m n = d_in and j k = d_out. The first is the largest
divisor up to `factor`, or with -1 the one that is nearest to the square root from below, and is
never more than the second. Where 2 rank is not less than k and n, one matrix G: (k, n) stands for
B A. C is zero at first, so the initial update is zero; the others are Kaiming-uniform. The product
with x is computed without the matrix.

Parameters: j m + rank (k + n) per site, or j m + k n.

Yeh et al. 2024, "Navigating Text-To-Image Customization: From LyCORIS Fine-Tuning to Model
Evaluation", section 3.3, https://arxiv.org/abs/2309.14859.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.errors import ConfigError
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.experts import AtExperts
from adapterhub.methods.common.ops import cast, split_last
from adapterhub.methods.common.projections import RankMethod, divisor
from adapterhub.methods.common.site_module import OutputModule


def two_factors(size: int, factor: int) -> tuple[int, int]:
    """Return two numbers whose product is a size, the smaller one first."""
    if factor > 0 and size % factor == 0:
        first = factor
    else:
        first = divisor(size, min(math.isqrt(size), factor if factor > 0 else size))
    return min(first, size // first), max(first, size // first)


class KroneckerUpdate(OutputModule):
    """The map (x, y) -> y + s (C (x) G) x, with G = B A where that is smaller."""

    affine = True
    A: Tensor
    B: Tensor
    G: Tensor

    def __init__(self, site: Site, rank: int, scale: float, factor: int) -> None:
        super().__init__()
        (m, n), (j, k) = two_factors(site.d_in, factor), two_factors(site.d_out, factor)
        self.C, self.scale = nn.Parameter(torch.zeros(j, m)), scale
        shapes = {"A": (rank, n), "B": (k, rank)} if 2 * rank < max(k, n) else {"G": (k, n)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.empty(shape)))
            nn.init.kaiming_uniform_(getattr(self, name), a=math.sqrt(5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the new output. x: (..., m n), y: (..., j k) -> y' like y."""
        last = self.G if hasattr(self, "G") else self.B @ self.A
        rows = split_last(x, self.C.shape[1], -1)
        product = cast(self.C, x) @ rows @ cast(last, x).T
        return y + self.scale * product.flatten(-2).to(y.dtype)


@register_method
@dataclass(frozen=True)
class LoKr(AtExperts, RankMethod):
    """Kronecker products with a low-rank factor, as updates of projections."""

    name = "lokr"
    paper = "Yeh et al. 2024, https://arxiv.org/abs/2309.14859"
    summary = "Kronecker products with a low-rank factor, as updates of projections"
    learning_rate = 1e-3

    alpha: float = option(8.0, "numerator of the scale: updates are multiplied by alpha / rank")
    factor: int = option(-1, "most rows and columns of C (-1: about the root of the size)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor < 1 and self.factor != -1:
            raise ConfigError(f"lokr(factor={self.factor})", expected="1 or more, or -1")

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> KroneckerUpdate:
        """Return the update of one site."""
        return KroneckerUpdate(site, rank, self.alpha / rank, self.factor)

    def size(self, site: Site, rank: int) -> int:
        """Return j m + rank (k + n), or j m + k n."""
        (m, n), (j, k) = (two_factors(d, self.factor) for d in (site.d_in, site.d_out))
        return j * m + (rank * (k + n) if 2 * rank < max(k, n) else k * n)
