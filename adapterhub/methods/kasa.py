"""KaSA: the smallest components of the weight are replaced by an update in the form of an SVD.

    W = U S V^T,   y = W x - B0 A0 x + s B (E * A) x,   s = alpha / rank
    B0 A0 = (U S V^T)_(k-r+1..k),   k = min(d_in, d_out)

    x: (..., d_in)    A, A0: (rank, d_in)    E: (rank,)    B, B0: (d_out, rank)

B is zero at first, so the outputs equal W without its r smallest components, which are saved with
the adapter; A is Kaiming-uniform and E normal. The term beta sum E² + gamma (||A A^T - I|| + ||B^T
B - I||), as a mean over the sites, is added to the loss (equations 9 to 11).

Parameters: rank (d_in + d_out + 1) per site.

Wang et al. 2024, "KaSA: Knowledge-Aware Singular-Value Adaptation of Large Language Models",
https://arxiv.org/abs/2412.06071.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.ops import FactorModule, orthogonality_loss, stack_low_rank
from adapterhub.methods.common.projections import RankMethod, require_components, weight_at
from adapterhub.methods.common.site_module import init_is_skipped
from adapterhub.methods.lora_xs import decomposed


def smallest_components(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the r smallest components of W as (U S)_r: (d_out, r) and V_r^T: (r, d_in)."""
    u, s, vh = decomposed(weight, min(weight.shape))
    return u[:, -rank:] * s[-rank:], vh[-rank:]


class ReplacedComponents(FactorModule):
    """The map (x, y) -> y - B0 A0 x + s B (E * A) x."""

    stack = staticmethod(stack_low_rank)
    A0: Tensor
    B0: Tensor

    def __init__(self, site: Site, rank: int, scale: float) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.empty(rank, site.d_in))
        self.E = nn.Parameter(torch.randn(rank))
        self.B = nn.Parameter(torch.zeros(site.d_out, rank))
        self.scale = scale
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.register_buffer("A0", torch.zeros(rank, site.d_in))
        self.register_buffer("B0", torch.zeros(site.d_out, rank))

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return [s B * E, -B0]: (d_out, 2 rank) and [A; A0]: (2 rank, d_in)."""
        left = torch.cat([self.scale * self.B * self.E, -self.B0], 1)
        return left, torch.cat([self.A, self.A0])


@register_method
@dataclass(frozen=True)
class KaSA(RankMethod):
    """Updates in the form of an SVD that replace the smallest components of the weight."""

    name = "kasa"
    paper = "Wang et al. 2024, https://arxiv.org/abs/2412.06071"
    summary = "updates in the form of an SVD, instead of the weight's smallest components"
    start = "paper"
    learning_rate = 1e-3
    training_options = ("beta", "gamma")

    alpha: float = option(8.0, "numerator of the scale: updates are multiplied by alpha / rank")
    beta: float = option(1e-4, "weight of the penalty on E", least=0)
    gamma: float = option(1e-3, "weight of the penalty on A and B", least=0)

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> ReplacedComponents:
        """Return the update of one site, whose weight has as many components as the rank."""
        require_components(self, site, rank)
        module = ReplacedComponents(site, rank, self.alpha / rank)
        if not init_is_skipped():
            left, right = smallest_components(weight_at(site, anatomy), rank)
            module.B0.copy_(left)
            module.A0.copy_(right)
        return module

    def size(self, site: Site, rank: int) -> int:
        """Return rank (d_in + d_out + 1)."""
        return rank * (site.d_in + site.d_out + 1)

    def penalty(self, modules: Sequence[ReplacedComponents]) -> Tensor:
        """Return beta sum E² + gamma (||A Aᵀ - I|| + ||Bᵀ B - I||), the mean over the sites."""
        sizes = torch.stack([m.E.square().sum() for m in modules]).mean()
        return self.beta * sizes + 2 * self.gamma * orthogonality_loss((m.A, m.B) for m in modules)
