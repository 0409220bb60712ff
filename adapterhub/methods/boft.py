"""BOFT: the input of a projection is rotated by several block rotations, between permutations.

    y = s * (W R x) + b,   R^T = B_m ... B_1                                      (section 3)

    x: (..., d_in)    s: (d_out,), one    B_i: blocks of `block`, rotations of permuted features
    Q: (m, d_in / size, size (size - 1) / 2), the entries above the diagonals, zero

In factor i, a block has features that are 2^(i-1) half blocks apart, so that with m factors any
feature can reach 2^m others, as in a butterfly network. Blocks of B_i are (I + Q) (I - Q)^-1. Q is
zero and s one at first, so nothing changes. Blocks have the largest size up to `block` that divides
d_in, 2^(m-1) times. The output is computed as s * (y - b + W (R x - x)) + b, so W is read in each
call.

Parameters: m d_in (size - 1) / 2 + d_out per site.

Liu et al. 2024, "Parameter-Efficient Orthogonal Finetuning via Butterfly Factorization", section 4,
https://arxiv.org/abs/2311.06243.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.errors import SiteError
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.ops import cast, cayley, in_blocks, skew
from adapterhub.methods.common.projections import ProjectionMethod, divisor, weight_at
from adapterhub.methods.common.site_module import OutputModule


def butterfly(size: int, block: int, factor: int, device: torch.device) -> Tensor:
    """Return the order of the features in the blocks of a factor, from 0: (size,)."""
    halves = torch.arange(size, device=device).view(-1, 2 << factor, block // 2)
    return torch.cat([halves[:, ::2], halves[:, 1::2]], 1).flatten()


class ButterflyRotation(OutputModule):
    """The map (x, y, W, b) -> s (W R x) + b."""

    affine = True
    reads_weight = True

    def __init__(self, site: Site, block: int, factors: int) -> None:
        super().__init__()
        self.block = block
        shape = (factors, site.d_in // block, block * (block - 1) // 2)
        self.Q, self.s = nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.ones(site.d_out))

    def rotate(self, x: Tensor) -> Tensor:
        """Return R x, like x. x: (..., d_in)."""
        for factor in reversed(range(len(self.Q))):
            blocks = cayley(skew(self.Q[factor], self.block))
            if factor == 0:
                x = in_blocks(x, blocks)
                continue
            order = butterfly(x.shape[-1], self.block, factor, x.device)
            x = in_blocks(x[..., order], blocks)[..., order.argsort()]
        return x

    def forward(  # type: ignore[override]
        self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Compute the new output, like y.

        x: (..., d_in), y: (..., d_out), weight: (d_out, d_in), bias: (d_out,) or None.
        """
        product = y if bias is None else y - bias.to(y.dtype)
        change = F.linear(self.rotate(x) - x, cast(weight, x)).to(y.dtype)
        return y + (self.s - 1).to(y.dtype) * product + self.s.to(y.dtype) * change


@register_method
@dataclass(frozen=True)
class BOFT(ProjectionMethod):
    """Rotations of the inputs of projections by butterfly factors."""

    sized_by = "factors"
    name = "boft"
    paper = "Liu et al. 2024, https://arxiv.org/abs/2311.06243"
    summary = "rotations of the inputs of projections by butterfly factors"
    learning_rate = 1e-3

    block: int = option(8, "largest size of a block; a divisor of the input's size", least=2)
    factors: int = option(2, "factors; 2^factors must divide the input", least=1, most=16)

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> ButterflyRotation:
        """Return the rotations of one site."""
        weight_at(site, anatomy)  # read in each forward pass
        return ButterflyRotation(site, self._block(site), self.factors)

    def size(self, site: Site, rank: int) -> int:
        """Return m d_in (size - 1) / 2 + d_out."""
        size = self._block(site)
        return self.factors * (site.d_in // size) * (size * (size - 1) // 2) + site.d_out

    def _block(self, site: Site) -> int:
        """Return the size of a block; half blocks are permuted where there are several factors.

        Raises:
            SiteError: 2^factors does not divide the size of the input.
        """
        if self.factors == 1:
            return divisor(site.d_in, self.block)
        halves, rest = divmod(site.d_in, 1 << self.factors)
        if rest:
            raise SiteError(
                f"boft has {self.factors} factors of {site.d_in} features at {site.id}",
                expected="factors with a power of two that divides the size of the input",
            )
        return 2 * divisor(halves, self.block // 2)
