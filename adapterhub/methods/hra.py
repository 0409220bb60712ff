"""HRA: the input of a projection is reflected several times.

    y = W H_1 ... H_r x + b,   H_i = I - 2 u_i u_i^T / ||u_i||^2                     (equation 4)

    x: (..., d_in)    U: (r, d_in), with the rows u_i    r: rank, even

Pairs of reflections are equal at first, so they cancel but for rounding. Their product is a
rotation whose change of W has rank r.

Parameters: rank d_in per site.

Yuan et al. 2024, "Bridging The Gap between Low-rank and Orthogonal Adaptation via Householder
Reflection Adaptation", section 3, https://arxiv.org/abs/2405.17484.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.errors import SiteError
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.ops import cast
from adapterhub.methods.common.projections import RankMethod
from adapterhub.methods.common.site_module import InputModule


class Reflections(InputModule):
    """The map x -> H_1 ... H_r x."""

    affine = True

    def __init__(self, d_in: int, rank: int) -> None:
        super().__init__()
        half = torch.empty(rank // 2, d_in)
        nn.init.kaiming_uniform_(half, a=math.sqrt(5))
        self.U = nn.Parameter(half.repeat_interleave(2, 0))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the new input, the last reflection first. x: (..., d_in) -> x' like x."""
        units = cast(self.U / self.U.norm(dim=1, keepdim=True), x)
        for unit in reversed(units.unbind()):
            x = x - 2 * (x @ unit).unsqueeze(-1).to(x.dtype) * unit.to(x.dtype)
        return x


@register_method
@dataclass(frozen=True)
class HRA(RankMethod):
    """Reflections of the inputs of projections."""

    name = "hra"
    paper = "Yuan et al. 2024, https://arxiv.org/abs/2405.17484"
    summary = "reflections of the inputs of projections"
    start = "near-identity"
    learning_rate = 1e-3

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> Reflections:
        """Return the reflections of one site.

        Raises:
            SiteError: an odd rank, whose reflections do not cancel at first.
        """
        if rank % 2:
            raise SiteError(f"hra has the odd rank {rank} at {site.id}", expected="an even rank")
        return Reflections(site.d_in, rank)

    def size(self, site: Site, rank: int) -> int:
        """Return rank d_in."""
        return rank * site.d_in
