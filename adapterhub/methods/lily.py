"""Lily: low-rank updates with factors shared by layers, and second factors weighted by each token.

    y = W x + s sum_e p_e B_e A x,   p = softmax(G A x)

    x: (..., d_in)    A: (rank, d_in), one for `layers_of_a` layers    G: (heads, rank), per site
    B_e: (d_out, rank), zero, one set for all layers

Factors are shared by the sites of one role and size, in one stack. All B are zero at first, so
the initial update is zero; A and G are Kaiming-uniform. Each token has its own p; the authors' code
takes its mean over a batch, so that a row depends on the others. With one head, both are the same.

Parameters: heads rank per site, rank d_in for each A, heads rank d_out for each set of B.

Zhong et al. 2024, "Low-Rank Interconnected Adaptation across Layers",
https://arxiv.org/abs/2407.09946.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.methods.common.base import Placement, register_method
from adapterhub.methods.common.ops import cast
from adapterhub.methods.common.projections import RankMethod
from adapterhub.methods.common.site_module import OutputModule, SharedModule
from adapterhub.methods.hydralora import add_weighed


class SharedFactor(SharedModule):
    """A factor of several sites."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value)


class SharedHeads(OutputModule):
    """The map (x, y) -> y + s sum_e p_e B_e A x, with shared A and B."""

    def __init__(self, rank: int, scale: float, first: SharedFactor, heads: SharedFactor) -> None:
        super().__init__()
        self.G = nn.Parameter(torch.empty(len(heads.value), rank))
        nn.init.kaiming_uniform_(self.G, a=math.sqrt(5))
        self.scale = scale
        self.shared = [first, heads]  # in a list they are not child modules

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the new output. x: (..., d_in), y: (..., d_out) -> y' like y."""
        first, heads = (each.value.to(x.device) for each in self.shared)
        hidden = F.linear(x, cast(first, x))
        return add_weighed(y, hidden, F.linear(hidden, cast(self.G, hidden)), heads, self.scale)


_Group = tuple[str, str, int, int, int]


def _group(site: Site, rank: int) -> _Group:
    return site.stack, site.role, site.d_in, site.d_out, rank


@register_method
@dataclass(frozen=True)
class Lily(RankMethod):
    """Low-rank updates with factors shared by layers, and second factors weighted by each token."""

    name = "lily"
    paper = "Zhong et al. 2024, https://arxiv.org/abs/2407.09946"
    summary = "low-rank updates whose factors layers share, and tokens weigh"
    learning_rate = 1e-3

    rank: int = option(32, "rank r of the updates; one for all sites that share", least=1)
    heads: int = option(2, "number of second factors B", least=1)
    layers_of_a: int = option(1, "consecutive layers that share one A", least=1)
    scale: float = option(1.0, "factor s of the update")

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """Yield one update per selected projection."""
        factors: dict[_Group, SharedFactor] = {}
        heads: dict[_Group, SharedFactor] = {}
        for site, rank, number in self._numbered(anatomy):
            group = _group(site, rank)
            if number % self.layers_of_a == 0:
                drawn = torch.empty(rank, site.d_in)
                nn.init.kaiming_uniform_(drawn, a=math.sqrt(5))
                factors[group] = SharedFactor(drawn)
            if number == 0:
                heads[group] = SharedFactor(torch.zeros(self.heads, rank, site.d_out))
            module = SharedHeads(rank, self.scale, factors[group], heads[group])
            if number % self.layers_of_a == 0:
                module.A = factors[group]
            if number == 0:
                module.B = heads[group]
            yield Placement(site, module)

    def count(self, anatomy: Anatomy) -> int:
        """Sum heads rank, and the sizes of shared factors at their first sites."""
        total = 0
        for site, rank, number in self._numbered(anatomy):
            total += self.heads * rank
            total += rank * site.d_in if number % self.layers_of_a == 0 else 0
            total += self.heads * rank * site.d_out if number == 0 else 0
        return total

    def _numbered(self, anatomy: Anatomy) -> Iterator[tuple[Site, int, int]]:
        """Yield each site, its rank, and its number among those that share factors."""
        numbers: Counter[_Group] = Counter()
        for site, rank in self.ranks_by_site(anatomy).items():
            group = _group(site, rank)
            yield site, rank, numbers[group]
            numbers[group] += 1
