"""HiRA: an update of a projection that is its weight times a low-rank matrix, elementwise.

    y = W x + (W * (B A)) x                                                       (equation 5)

    x: (..., d_in)    W: (d_out, d_in), frozen    A: (rank, d_in)    B: (d_out, rank), zero

The update has the rank of W at the parameters of LoRA. B is zero at first, so the initial update is
zero; A is Kaiming-uniform. W is read in each call: merge before serving.

Parameters: rank (d_in + d_out) per site.

Huang et al. 2025, "HiRA: Parameter-Efficient Hadamard High-Rank Adaptation for Large Language
Models", section 3, https://openreview.net/forum?id=TwJrTz9cRS.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.ops import cast
from adapterhub.methods.common.projections import RankMethod, weight_at
from adapterhub.methods.common.site_module import OutputModule


class HadamardWeight(OutputModule):
    """The map (x, y, W, b) -> y + (W * (B A)) x."""

    affine = True
    reads_weight = True

    def __init__(self, site: Site, rank: int) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.empty(rank, site.d_in))
        self.B = nn.Parameter(torch.zeros(site.d_out, rank))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))

    def forward(  # type: ignore[override]
        self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Compute the new output, like y.

        x: (..., d_in), y: (..., d_out), weight: (d_out, d_in), bias: (d_out,) or None.
        """
        return y + F.linear(x, cast(weight * (self.B @ self.A), x)).to(y.dtype)


@register_method
@dataclass(frozen=True)
class HiRA(RankMethod):
    """Products of weights with low-rank matrices, elementwise."""

    name = "hira"
    paper = "Huang et al. 2025, https://openreview.net/forum?id=TwJrTz9cRS"
    summary = "elementwise products of weights with low-rank matrices, as updates"
    learning_rate = 5e-3

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> HadamardWeight:
        """Return the update of one site."""
        weight_at(site, anatomy)  # that each forward pass reads
        return HadamardWeight(site, rank)

    def size(self, site: Site, rank: int) -> int:
        """Return rank (d_in + d_out)."""
        return rank * (site.d_in + site.d_out)
