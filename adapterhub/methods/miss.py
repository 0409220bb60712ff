"""MiSS: one small matrix, repeated over shards of the input, as the update of a projection.

    y = W x + D S x,   S x = x[0:r] + x[r:2r] + ...                          (section 3.2)

    x: (..., d_in)    D: (d_out, rank), zero    S: (rank, d_in), copies of the identity    r: rank

An input that the rank does not divide is padded with zeros. D is zero at first, so the initial
update is zero. It is a LoRA whose A is fixed, with half the parameters.

Parameters: rank d_out per site.

Kang & Yin 2024, "MiSS: Revisiting the Trade-off in LoRA with an Efficient Shard-Sharing Structure",
https://arxiv.org/abs/2409.15371.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.experts import AtExperts
from adapterhub.methods.common.ops import FactorModule, add_product, split_last, stack_low_rank
from adapterhub.methods.common.projections import RankMethod


class SharedShards(FactorModule):
    """The map (x, y) -> y + D S x."""

    stack = staticmethod(stack_low_rank)

    def __init__(self, site: Site, rank: int) -> None:
        super().__init__()
        self.D = nn.Parameter(torch.zeros(site.d_out, rank))
        self.d_in = site.d_in

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the new output. x: (..., d_in), y: (..., d_out) -> y' like y."""
        rank = self.D.shape[1]
        shards = split_last(F.pad(x, (0, -self.d_in % rank)), -1, rank)
        return add_product(y, shards.sum(-2), self.D, 1.0)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return D: (d_out, rank) and S: (rank, d_in)."""
        rank = self.D.shape[1]
        eye = torch.eye(rank, device=self.D.device, dtype=self.D.dtype)
        return self.D, eye.repeat(1, -(-self.d_in // rank))[:, : self.d_in]


@register_method
@dataclass(frozen=True)
class MiSS(AtExperts, RankMethod):
    """Low-rank updates of projections that sum shards of the input."""

    name = "miss"
    paper = "Kang & Yin 2024, https://arxiv.org/abs/2409.15371"
    summary = "low-rank updates of projections that sum shards of the input"
    learning_rate = 1e-3

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> SharedShards:
        """Return the update of one site."""
        return SharedShards(site, rank)

    def size(self, site: Site, rank: int) -> int:
        """Return rank d_out."""
        return rank * site.d_out
