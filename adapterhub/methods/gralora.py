"""GraLoRA: a low-rank update for each block of a projection's weight.

    y_j = W_j x + s sum_n B_jn A_nj x_n,   s = alpha / (rank + hybrid)         (section 3.2)

    x_n: (..., d_in / k)    y_j: (..., d_out / k)    n, j = 1..k    k: pieces
    A: (k, rank, d_in / k)    A_nj: rows j of A_n, (rank / k, d_in / k)
    B: (k, d_out / k, rank), zero    B_jn: columns n of B_j, (d_out / k, rank / k)

With `hybrid`, a LoRA of that rank is added over the whole weight: A0: (hybrid, d_in) and B0:
(d_out, hybrid). B and B0 are zero at first, so the initial update is zero; the others are
Kaiming-uniform. The rank of the update is up to k rank, with the parameters of LoRA.

Parameters: (rank + hybrid) (d_in + d_out) per site.

Jung et al. 2025, "GraLoRA: Granular Low-Rank Adaptation for Parameter-Efficient Fine-Tuning",
section 3, https://arxiv.org/abs/2505.20355.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.errors import SiteError
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.experts import AtExperts
from adapterhub.methods.common.ops import FactorModule, stack_low_rank
from adapterhub.methods.common.projections import RankMethod


class BlockUpdates(FactorModule):
    """The map (x, y) -> y + s sum_n B_jn A_nj x_n, and a LoRA over all blocks."""

    stack = staticmethod(stack_low_rank)

    def __init__(self, site: Site, rank: int, alpha: float, pieces: int, hybrid: int) -> None:
        super().__init__()
        self.scale = alpha / (rank + hybrid)
        self.A = nn.Parameter(torch.empty(pieces, rank, site.d_in // pieces))
        self.B = nn.Parameter(torch.zeros(pieces, site.d_out // pieces, rank))
        bound = math.sqrt(pieces / site.d_in)  # Kaiming-uniform with a = sqrt(5), as of one piece
        nn.init.uniform_(self.A, -bound, bound)
        if hybrid:
            self.A0 = nn.Parameter(torch.empty(hybrid, site.d_in))
            self.B0 = nn.Parameter(torch.zeros(site.d_out, hybrid))
            nn.init.kaiming_uniform_(self.A0, a=math.sqrt(5))

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return the blocks at their places: (d_out, k rank + hybrid), (k rank + hybrid, d_in)."""
        k, _, width = self.A.shape
        diagonal: Any = torch.block_diag
        parts = self.A.reshape(k, k, -1, width).unbind(1)  # of row j of blocks: (n, rank / k, ...)
        left, right = diagonal(*self.B), torch.cat([diagonal(*part) for part in parts])
        if hasattr(self, "A0"):
            left, right = torch.cat([left, self.B0], 1), torch.cat([right, self.A0])
        return self.scale * left, right


@register_method
@dataclass(frozen=True)
class GraLoRA(AtExperts, RankMethod):
    """Low-rank updates of the blocks of projections."""

    name = "gralora"
    paper = "Jung et al. 2025, https://arxiv.org/abs/2505.20355"
    summary = "a low-rank update for each block of a projection's weight"
    learning_rate = 1e-3

    alpha: float = option(16.0, "numerator of the scale, alpha / (rank + hybrid)")
    pieces: int = option(2, "blocks along each side; must divide the rank and both sizes", least=1)
    hybrid: int = option(
        0, "rank of a LoRA over the whole weight, in addition to the blocks", least=0
    )

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> BlockUpdates:
        """Return the update of one site.

        Raises:
            SiteError: the pieces do not divide the rank or a size of the projection.
        """
        sizes = {"rank": rank, "d_in": site.d_in, "d_out": site.d_out}
        if uneven := [f"{name}: {size}" for name, size in sizes.items() if size % self.pieces]:
            raise SiteError(
                f"gralora(pieces={self.pieces}) does not divide the sizes at {site.id}",
                offenders=uneven,
                expected="pieces that divide the rank and both sizes",
            )
        return BlockUpdates(site, rank, self.alpha, self.pieces, self.hybrid)

    def size(self, site: Site, rank: int) -> int:
        """Return (rank + hybrid) (d_in + d_out)."""
        return (rank + self.hybrid) * (site.d_in + site.d_out)
