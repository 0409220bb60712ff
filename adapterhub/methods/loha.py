"""LoHa: an update of a projection that is the elementwise product of two low-rank matrices.

    y = W x + s D x,   D = (B1 A1) * (B2 A2),   s = alpha / rank              (proposition 1)

    x: (..., d_in)    A1, A2: (rank, d_in)    B1, B2: (d_out, rank)    D: (d_out, d_in)

The rank of D is up to rank², with twice the parameters of LoRA. A2 is zero at first, so the
initial update is zero; the others are Kaiming-uniform. D is computed for each call in training, at
the cost of 2 rank tokens.

Parameters: 2 rank (d_in + d_out) per site.

Hyeon-Woo et al. 2022, "FedPara: Low-Rank Hadamard Product for Communication-Efficient Federated
Learning", https://arxiv.org/abs/2108.06098.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.experts import AtExperts
from adapterhub.methods.common.ops import DeltaModule
from adapterhub.methods.common.projections import RankMethod


class HadamardProduct(DeltaModule):
    """The map (x, y) -> y + s (B1 A1 * B2 A2) x."""

    def __init__(self, site: Site, rank: int, scale: float) -> None:
        super().__init__()
        self.A1, self.B1 = nn.Parameter(torch.empty(rank, site.d_in)), _left(site, rank)
        self.A2, self.B2 = nn.Parameter(torch.zeros(rank, site.d_in)), _left(site, rank)
        self.scale = scale
        for each in (self.A1, self.B1, self.B2):
            nn.init.kaiming_uniform_(each, a=math.sqrt(5))

    def delta(self) -> Tensor:
        """Return s (B1 A1 * B2 A2): (d_out, d_in)."""
        return self.scale * (self.B1 @ self.A1) * (self.B2 @ self.A2)


def _left(site: Site, rank: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(site.d_out, rank))


@register_method
@dataclass(frozen=True)
class LoHa(AtExperts, RankMethod):
    """Elementwise products of two low-rank updates of projections."""

    name = "loha"
    paper = "Hyeon-Woo et al. 2022, https://arxiv.org/abs/2108.06098"
    summary = "elementwise products of two low-rank updates of projections"
    learning_rate = 1e-3

    alpha: float = option(8.0, "numerator of the scale: updates are multiplied by alpha / rank")

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> HadamardProduct:
        """Return the update of one site."""
        return HadamardProduct(site, rank, self.alpha / rank)

    def size(self, site: Site, rank: int) -> int:
        """Return 2 rank (d_in + d_out)."""
        return 2 * rank * (site.d_in + site.d_out)
