"""Uni-LoRA: low-rank updates whose numbers are all taken from one short vector.

    y = W x + B A x,   each number of all A and B = v_j / sqrt(n_j)

    x: (..., d_in)    A: (rank, d_in)    B: (d_out, rank)    v: (numbers,)
    n_j: how often v_j is taken

The choice of the number of v is fixed: each equally often, in an order that is computed from the
seed. With `stored` the file has it: as for imports. v is uniform within 0.02, so the update
is small at first, not zero.

Parameters: `numbers` in all.

Li et al. 2025, "Uni-LoRA: One Vector is All You Need", https://arxiv.org/abs/2506.00799.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.methods.common.base import Placement, register_method
from adapterhub.methods.common.generated import shares
from adapterhub.methods.common.ops import FactorModule, stack_low_rank
from adapterhub.methods.common.projections import RankMethod
from adapterhub.methods.common.site_module import SharedModule


class SharedVector(SharedModule):
    """The vector v, and how often its numbers are taken by all sites."""

    times: Tensor

    def __init__(self, numbers: int, total: int, stored: bool) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.empty(numbers))
        nn.init.uniform_(self.v, -0.02, 0.02)
        times = torch.full((numbers,), float(total // numbers))
        times[: total % numbers] += 1
        self.register_buffer("times", times, persistent=stored)


class TakenFactors(FactorModule):
    """The map (x, y) -> y + B A x, with A and B taken from a vector."""

    stack = staticmethod(stack_low_rank)
    places: Tensor

    def __init__(
        self, site: Site, rank: int, places: Tensor, shared: SharedVector, stored: bool
    ) -> None:
        super().__init__()
        self.register_buffer("places", places, persistent=stored)
        self.rank, self.d_in = rank, site.d_in
        self.shared = [shared]  # in a list it is not a child module

    @property
    def limit(self) -> int:
        """The upper bound of all places."""
        return len(self.shared[0].v)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return B: (d_out, rank) and A: (rank, d_in)."""
        shared = self.shared[0]
        taken = (shared.v * shared.times.rsqrt()).to(self.places.device)[self.places]
        first = self.rank * self.d_in
        right, left = torch.split(taken, [first, len(taken) - first])
        return left.view(-1, self.rank), right.view(self.rank, self.d_in)


@register_method
@dataclass(frozen=True)
class UniLoRA(RankMethod):
    """Low-rank updates whose numbers are all taken from one vector."""

    sized_by = "numbers"
    name = "unilora"
    paper = "Li et al. 2025, https://arxiv.org/abs/2506.00799"
    summary = "low-rank updates whose numbers are all taken from one vector"
    start = "near-identity"
    learning_rate = 1e-2

    rank: int = option(4, "rank r of the updates", least=1)
    numbers: int = option(256, "trained numbers, in all", least=1)
    seed: int = option(0, "number that the order is computed from")
    stored: bool = option(False, "the order is in the file")

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """Yield one update per selected projection, of the same vector."""
        ranks = self.ranks_by_site(anatomy)
        sizes = [rank * (site.d_in + site.d_out) for site, rank in ranks.items()]
        drawn = shares("unilora", self.seed, sum(sizes), self.numbers)
        places = torch.split(drawn, sizes)
        shared = SharedVector(self.numbers, sum(sizes), self.stored)
        for (site, rank), own in zip(ranks.items(), places, strict=True):
            module = TakenFactors(site, rank, own.clone(), shared, self.stored)
            if own is places[0]:
                module.vector = shared
            yield Placement(site, module)

    def count(self, anatomy: Anatomy) -> int:
        """Return the number of numbers."""
        self.ranks_by_site(anatomy)
        return self.numbers
