"""OFT: the input of a projection is rotated, block by block.

    y = W R x + b,   R = diag(R_1, ..., R_n),   R_i^T = (I + Q_i) (I - Q_i)^-1       (section 3.2)

    x: (..., d_in)    R_i: (size, size), orthogonal    Q_i: (size, size), skew-symmetric
    Q: (n, size (size - 1) / 2), the entries above the diagonals, zero    n = d_in / size

Q is zero at first, so nothing changes. Rotations keep the angles between the weights of output
features. By default the inverse is the first `terms` of its series (OFTv2), exact for `terms: 0`;
the series is orthogonal while Q is small. Blocks are of the largest size up to `block` that divides
d_in. With `share`, all blocks of a site have one rotation.

Parameters: n size (size - 1) / 2 per site; with `share`, size (size - 1) / 2.

Qiu et al. 2023, "Controlling Text-to-Image Diffusion by Orthogonal Finetuning", section 3,
https://arxiv.org/abs/2306.07280; Qiu et al. 2025, "Orthogonal Finetuning Made Scalable",
https://arxiv.org/abs/2506.19847.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.ops import cayley, in_blocks, skew
from adapterhub.methods.common.projections import ProjectionMethod, divisor
from adapterhub.methods.common.site_module import InputModule


class CayleyRotation(InputModule):
    """The map x -> x R, with blocks of R by Cayley's formula."""

    affine = True

    def __init__(self, blocks: int, size: int, terms: int) -> None:
        super().__init__()
        self.Q = nn.Parameter(torch.zeros(blocks, size * (size - 1) // 2))
        self.block, self.terms = size, terms

    def forward(self, x: Tensor) -> Tensor:
        """Compute the new input. x: (..., d_in) -> x' like x."""
        return in_blocks(x, cayley(skew(self.Q, self.block), self.terms))


@register_method
@dataclass(frozen=True)
class OFT(ProjectionMethod):
    """Rotations of the inputs of projections, block by block."""

    sized_by = "block"
    name = "oft"
    paper = "Qiu et al. 2023, https://arxiv.org/abs/2306.07280"
    summary = "rotations of the inputs of projections, block by block"
    learning_rate = 1e-3

    block: int = option(32, "largest size of a block; its divisor of the input's size", least=2)
    terms: int = option(5, "terms of the series of Cayley's formula; 0: exact", least=0, most=32)
    share: bool = option(False, "one rotation for all blocks of a site")

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> CayleyRotation:
        """Return the rotation of one site."""
        size = divisor(site.d_in, self.block)
        return CayleyRotation(1 if self.share else site.d_in // size, size, self.terms)

    def size(self, site: Site, rank: int) -> int:
        """Return d_in (size - 1) / 2, or size (size - 1) / 2 with `share`."""
        size = divisor(site.d_in, self.block)
        return (1 if self.share else site.d_in // size) * (size * (size - 1) // 2)
