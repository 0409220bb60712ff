"""VeRA: a low-rank update whose matrices are random and fixed; two vectors train.

    y = W x + b * B (d * A x)                                                       (equation 2)

    x: (..., d_in)    A: (rank, d_in), B: (d_out, rank), fixed
    d: (rank,), 0.1    b: (d_out,), zero

b is zero at first, so the initial update is zero. A and B are uniform within sqrt(6 / d_in) and
sqrt(6 / rank). They are computed from the seed and the site, and are not in files. With `stored`,
one A and B for all sites are in the file, of the largest sizes of all sites and cut for each: as
for imports.

Parameters: rank + d_out per site.

Kopiczko et al. 2024, "VeRA: Vector-based Random Matrix Adaptation", section 3,
https://arxiv.org/abs/2310.11454.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.methods.common.base import Placement, register_method
from adapterhub.methods.common.experts import AtExperts
from adapterhub.methods.common.generated import FixedFactors
from adapterhub.methods.common.ops import FactorModule, stack_low_rank
from adapterhub.methods.common.projections import RankMethod


class ScaledFactors(FactorModule):
    """The map (x, y) -> y + b * B (d * A x)."""

    stack = staticmethod(stack_low_rank)

    def __init__(self, site: Site, rank: int, fixed: FixedFactors, owns: bool) -> None:
        super().__init__()
        self.d = nn.Parameter(torch.full((rank,), 0.1))
        self.b = nn.Parameter(torch.zeros(site.d_out))
        self.d_in = site.d_in
        self.shared = [fixed]  # in a list it is not a child module
        if owns:
            self.fixed = fixed

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return b * B * d: (d_out, rank) and A: (rank, d_in)."""
        rank, device = len(self.d), self.d.device
        left = self.shared[0].B[: len(self.b), :rank].to(device)
        return self.b[:, None] * left * self.d, self.shared[0].A[:rank, : self.d_in].to(device)


@register_method
@dataclass(frozen=True)
class VeRA(AtExperts, RankMethod):
    """Low-rank updates of random matrices with two trained vectors."""

    name = "vera"
    paper = "Kopiczko et al. 2024, https://arxiv.org/abs/2310.11454"
    summary = "low-rank updates of fixed random matrices with two trained vectors"
    learning_rate = 1e-2

    rank: int = option(256, "rank r of the random matrices", least=1)
    seed: int = option(0, "number that the matrices are computed from")
    stored: bool = option(False, "one pair of matrices for all sites, in the file")

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """Yield one update per selected projection, with separate matrices unless `stored`."""
        ranks = self.ranks_by_site(anatomy)
        sizes = max(ranks.values()), max(s.d_in for s in ranks), max(s.d_out for s in ranks)
        shared = self._fixed("vera", *sizes) if self.stored else None
        for number, (site, rank) in enumerate(ranks.items()):
            fixed = shared or self._fixed(f"vera.{site.id}", rank, site.d_in, site.d_out)
            owns = shared is None or number == 0
            build = partial(ScaledFactors, site, rank, fixed, owns)
            yield Placement(site, self.of_experts(site, build))

    def size(self, site: Site, rank: int) -> int:
        """Return rank + d_out."""
        return rank + site.d_out

    def _fixed(self, name: str, rank: int, d_in: int, d_out: int) -> FixedFactors:
        a, b = ((rank, d_in), (6 / d_in) ** 0.5), ((d_out, rank), (6 / rank) ** 0.5)
        return FixedFactors(name, self.seed, a, b, self.stored)
