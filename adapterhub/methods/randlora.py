"""RandLoRA: a full-rank update of random, fixed bases with trained scales.

    y = W x + s D x,   D = B' A',   s = alpha / rank                               (equation 4)
    A'_k = l_ij g_j * A_i,   k = i n + j          B'_k = B_pq,   k = p rank + q

    x: (..., d_in)    A: (rank, d), B: (c, n, rank), fixed    A': (rank n, d)    B': (c, n rank)
    l: (rank, n), zero    g: (n, d), 1 / max(n, d)
    d: the smaller size of W    c: the larger one    n: d / rank, rounded up

If d_out is the smaller size, D is the transpose. l is zero at first, so the initial update is zero.
A and B have uniform numbers of deviation 1, are computed from the seed, and are shared by all
sites: of the largest sizes, and cut for each. With `stored` they are in the file: as for imports. D
has full rank, so each call costs up to two products with W: merge before serving.

Parameters: n (rank + d) per site.

Albert et al. 2025, "RandLoRA: Full-rank parameter-efficient fine-tuning of large models",
section 4, https://arxiv.org/abs/2502.00987.
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


def bases_of(site: Site, rank: int) -> tuple[int, int, int]:
    """Return n, d and c of a site."""
    small, large = sorted((site.d_in, site.d_out))
    return -(-small // rank), small, large


class ScaledBases(FactorModule):
    """The map (x, y) -> y + s D x."""

    stack = staticmethod(stack_low_rank)

    def __init__(self, site: Site, rank: int, scale: float, shared: FixedFactors) -> None:
        super().__init__()
        n, small, self.large = bases_of(site, rank)
        self.l = nn.Parameter(torch.zeros(rank, n))
        self.g = nn.Parameter(torch.full((n, small), 1 / max(n, small)))
        self.scale, self.wide = scale, site.d_in > site.d_out
        self.shared = [shared]  # in a list it is not a child module

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return s B': (d_out, rank n) and A': (rank n, d_in), or transposed."""
        (rank, n), device = self.l.shape, self.l.device
        fixed = self.shared[0].A[:rank, : self.g.shape[1]].to(device)
        rows = (self.l[:, :, None] * fixed[:, None] * self.g).flatten(0, 1)
        columns = self.shared[0].B[: self.large, :n, :rank].to(device).flatten(1)
        left, right = (rows.T, columns.T) if self.wide else (columns, rows)
        return self.scale * left, right


@register_method
@dataclass(frozen=True)
class RandLoRA(AtExperts, RankMethod):
    """Full-rank updates of fixed random bases with trained scales."""

    name = "randlora"
    paper = "Albert et al. 2025, https://arxiv.org/abs/2502.00987"
    summary = "full-rank updates of fixed random bases with trained scales"
    learning_rate = 1e-3

    rank: int = option(32, "rank of a basis: a lower one has more parameters", least=1)
    alpha: float = option(640.0, "numerator of the scale: updates are multiplied by alpha / rank")
    seed: int = option(0, "number that the bases are computed from")
    stored: bool = option(False, "the bases are in the file")

    @classmethod
    def example(cls) -> RandLoRA:
        """Return the method at a scale for narrow backbones."""
        return cls(rank=8, alpha=8.0)

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """Yield one update per selected projection, of the same bases."""
        ranks = self.ranks_by_site(anatomy)
        small, large = sorted((max(s.d_in for s in ranks), max(s.d_out for s in ranks)))
        n, rank = -(-small // min(ranks.values())), max(ranks.values())
        a, b = ((rank, small), 3**0.5), ((large, n, rank), 3**0.5)  # of deviation 1
        shared = FixedFactors("randlora", self.seed, a, b, self.stored)
        for number, (site, rank) in enumerate(ranks.items()):
            build = partial(ScaledBases, site, rank, self.alpha / rank, shared)
            module = self.of_experts(site, build)
            if number == 0:
                module.fixed = shared
            yield Placement(site, module)

    def size(self, site: Site, rank: int) -> int:
        """Return n (rank + d)."""
        n, small, _ = bases_of(site, rank)
        return n * (rank + small)
