"""DeLoRA: a low-rank update with normalized factors and a trained strength.

    y = W x + D x,   D = (l / rank) sum_i b_i a_i^T diag(w) / (||b_i|| ||a_i||)      (equation 6)

    x: (..., d_in)    a_i: the rows of A, (rank, d_in)    b_i: the columns of B, (d_out, rank), zero
    l: (1,), the strength    w: (d_in,), the norms of the columns of W

The size of the update is bounded by l, whatever the learning rate. Norms below 1e-4 count as 1e-4:
B is zero at first, so the initial update is zero. A is Kaiming-uniform. w is computed from W when
the adapter is attached, and saved with it. l starts at `strength`, up to 1e6: as a parameter it
must stay finite in fp32.

Parameters: rank (d_in + d_out) + 1 per site.

Bini et al. 2025, "DeLoRA: Decoupling Angles and Strength in Low-rank Adaptation", section 3,
https://arxiv.org/abs/2503.18225.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.ops import FactorModule, stack_low_rank
from adapterhub.methods.common.projections import RankMethod, weight_at

LEAST = 1e-4


class BoundedUpdate(FactorModule):
    """The map (x, y) -> y + D x, with normalized factors of D."""

    stack = staticmethod(stack_low_rank)
    norms: Tensor

    def __init__(self, weight: Tensor, rank: int, strength: float) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.empty(rank, weight.shape[1]))
        self.B = nn.Parameter(torch.zeros(weight.shape[0], rank))
        self.strength = nn.Parameter(torch.full((1,), strength))
        self.register_buffer("norms", weight.norm(dim=0))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return l / rank B / (||b|| ||a||): (d_out, rank) and A diag(w): (rank, d_in)."""
        sizes = self.A.norm(dim=1).clamp_min(LEAST) * self.B.norm(dim=0).clamp_min(LEAST)
        return self.strength / len(self.A) * self.B / sizes, self.A * self.norms


@register_method
@dataclass(frozen=True)
class DeLoRA(RankMethod):
    """Low-rank updates with normalized factors and a trained strength."""

    name = "delora"
    paper = "Bini et al. 2025, https://arxiv.org/abs/2503.18225"
    summary = "low-rank updates with normalized factors and a trained strength"
    learning_rate = 1e-3

    strength: float = option(15.0, "initial bound l of the update", above=0, most=1e6)

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> BoundedUpdate:
        """Return the update of one site."""
        return BoundedUpdate(weight_at(site, anatomy), rank, self.strength)

    def size(self, site: Site, rank: int) -> int:
        """Return rank (d_in + d_out) + 1."""
        return rank * (site.d_in + site.d_out) + 1
