"""HydraLoRA: a low-rank update with several second factors, weighted by each token.

    y = W x + s sum_e p_e B_e A x,   p = softmax(G x),   s = alpha / rank

    x: (..., d_in)    A: (rank, d_in)    B_e: (d_out, rank), zero    G: (heads, d_in)

All B are zero at first, so the initial update is zero; A and G are Kaiming-uniform. The weights
depend on the input, so it cannot be merged.

Parameters: rank d_in + heads (rank d_out + d_in) per site.

Tian et al. 2024, "HydraLoRA: An Asymmetric LoRA Architecture for Efficient Fine-Tuning",
https://arxiv.org/abs/2404.19245.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.ops import add_product, cast
from adapterhub.methods.common.projections import RankMethod
from adapterhub.methods.common.site_module import OutputModule


def add_weighed(y: Tensor, hidden: Tensor, logits: Tensor, heads: Tensor, scale: float) -> Tensor:
    """Compute y + scale * sum_e softmax(logits)_e heads_eᵀ hidden, like y.

    y: (..., d_out), hidden: (..., rank), logits: (..., e), heads: (e, rank, d_out).
    """
    weighed = logits.softmax(-1)[..., None].to(hidden.dtype) * hidden[..., None, :]
    return add_product(y, weighed.flatten(-2), heads.flatten(0, 1).T, scale)


class WeighedHeads(OutputModule):
    """The map (x, y) -> y + s sum_e p_e B_e A x."""

    def __init__(self, site: Site, rank: int, heads: int, scale: float) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.empty(rank, site.d_in))
        self.G = nn.Parameter(torch.empty(heads, site.d_in))
        self.B = nn.Parameter(torch.zeros(heads, rank, site.d_out))
        self.scale = scale
        for each in (self.A, self.G):
            nn.init.kaiming_uniform_(each, a=math.sqrt(5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the new output. x: (..., d_in), y: (..., d_out) -> y' like y."""
        hidden, logits = F.linear(x, cast(self.A, x)), F.linear(x, cast(self.G, x))
        return add_weighed(y, hidden, logits, self.B, self.scale)


@register_method
@dataclass(frozen=True)
class HydraLoRA(RankMethod):
    """Low-rank updates with several second factors, weighted by each token."""

    name = "hydralora"
    paper = "Tian et al. 2024, https://arxiv.org/abs/2404.19245"
    summary = "low-rank updates with several second factors, which each token weighs"
    learning_rate = 1e-3

    alpha: float = option(16.0, "numerator of the scale: updates are multiplied by alpha / rank")
    heads: int = option(3, "number of second factors B", least=1)

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> WeighedHeads:
        """Return the update of one site."""
        return WeighedHeads(site, rank, self.heads, self.alpha / rank)

    def size(self, site: Site, rank: int) -> int:
        """Return rank d_in + heads (rank d_out + d_in)."""
        return rank * site.d_in + self.heads * (rank * site.d_out + site.d_in)
