"""PEANuT: an update of a projection that a small network computes from the weight.

    y = W x + s (B h(W^T))^T x,   h(W^T) = f(W^T A^T)
    h_i = f(E_i h_(i-1)),   then h = f(D_i h) + h_(depth - i)                      (with `depth`)

    x: (..., d_in)    W^T: a row for each input    A: (rank, d_out), Kaiming-uniform
    B: (d_out, rank), zero    E, D: (depth, rank, rank)

B is zero at first, so the initial update is zero. The network is computed in each call, at the cost
of rank tokens and more: merge before serving.

Parameters: 2 rank d_out + 2 depth rank² per site.

Zhong et al. 2024, "PEANuT: Parameter-Efficient Adaptation with Weight-aware Neural Tweakers",
https://arxiv.org/abs/2410.01870.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.methods.common.base import activation_module, register_method
from adapterhub.methods.common.ops import WeightFactors, cast
from adapterhub.methods.common.projections import RankMethod, weight_at


class WeightNetwork(WeightFactors):
    """The map (x, y, W, b) -> y + s (B h(W^T))^T x."""

    def __init__(self, size: int, rank: int, depth: int, scale: float, activation: str) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.empty(rank, size))
        self.B = nn.Parameter(torch.zeros(size, rank))
        self.E, self.D = (
            nn.Parameter(torch.empty(depth, rank, rank)) if depth else None for _ in range(2)
        )
        stacks = [stack for stack in (self.E, self.D) if stack is not None]
        for each in (self.A, *(matrix for stack in stacks for matrix in stack)):
            nn.init.kaiming_uniform_(each, a=math.sqrt(5))
        self.scale, self.f = scale, activation_module(activation)

    def product(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return s B: (d_out, rank) and h^T: (rank, d_in)."""
        hidden = self.f(F.linear(cast(weight, self.A).T, self.A))
        below = []
        for matrix in self.E if self.E is not None else ():
            below.append(hidden)
            hidden = self.f(F.linear(hidden, matrix))
        for matrix in self.D if self.D is not None else ():
            hidden = self.f(F.linear(hidden, matrix)) + below.pop()
        return self.scale * self.B, hidden.T


@register_method
@dataclass(frozen=True)
class PEANuT(RankMethod):
    """Updates of projections that a small network computes from their weights."""

    name = "peanut"
    paper = "Zhong et al. 2024, https://arxiv.org/abs/2410.01870"
    summary = "updates of projections that small networks compute from the weights"
    learning_rate = 1e-3

    rank: int = option(32, "hidden width of the network", least=1)
    depth: int = option(0, "further layers, on either side of the middle", least=0, most=64)
    scale: float = option(1.0, "factor s of the update")
    activation: str = option("relu", "activation function, by its transformers name")

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> WeightNetwork:
        """Return the network of one site."""
        weight_at(site, anatomy)  # that each forward pass reads
        return WeightNetwork(site.d_out, rank, self.depth, self.scale, self.activation)

    def size(self, site: Site, rank: int) -> int:
        """Return 2 rank d_out + 2 depth rank²."""
        return 2 * rank * (site.d_out + self.depth * rank)
