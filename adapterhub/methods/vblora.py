"""VB-LoRA: low-rank updates composed of the vectors of one bank, which all sites share.

    y = W x + B A x,   each block of b numbers of A and B = sum_(j in top) w_j v_j
    w = softmax of the k largest logits of the block

    x: (..., d_in)    A: (rank, d_in)    B: (d_out, rank)    bank v: (vectors, b)
    logits of A: (rank, d_in / b, vectors)    of B: (d_out / b, rank, vectors)

The bank and the logits train. b is the largest size up to `block` that divides all of the sites.
The bank is uniform within 0.02 and the logits are normal with a deviation of 0.1, so the update is
small at first, not zero.

Parameters: vectors rank (d_in + d_out) / b per site, and vectors b in all.

Li et al. 2024, "VB-LoRA: Extreme Parameter Efficient Fine-Tuning with Vector Banks",
https://arxiv.org/abs/2405.15179.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.methods.common.base import Placement, register_method
from adapterhub.methods.common.ops import FactorModule, stack_low_rank
from adapterhub.methods.common.projections import RankMethod, divisor
from adapterhub.methods.common.site_module import SharedModule


class VectorBank(SharedModule):
    """The vectors that all sites share: (vectors, b)."""

    def __init__(self, vectors: int, block: int) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.empty(vectors, block))
        nn.init.uniform_(self.v, -0.02, 0.02)


class ComposedFactors(FactorModule):
    """The map (x, y) -> y + B A x, with A and B composed of vectors of a bank."""

    stack = staticmethod(stack_low_rank)

    def __init__(self, site: Site, rank: int, top: int, bank: VectorBank) -> None:
        super().__init__()
        vectors, block = bank.v.shape
        self.A = nn.Parameter(torch.empty(rank, site.d_in // block, vectors))
        self.B = nn.Parameter(torch.empty(site.d_out // block, rank, vectors))
        for logits in (self.A, self.B):
            nn.init.normal_(logits, std=0.1)
        self.top = top
        self.shared = [bank]  # in a list it is not a child module

    def _composed(self, logits: Tensor) -> Tensor:
        """Return the block of each row of logits: (..., b)."""
        best, chosen = logits.topk(self.top, dim=-1)
        vectors = self.shared[0].v.to(logits.device)[chosen]
        return (best.softmax(-1)[..., None] * vectors).sum(-2)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return B: (d_out, rank) and A: (rank, d_in)."""
        left, right = self._composed(self.B).mT.flatten(0, 1), self._composed(self.A).flatten(1)
        return left, right


@register_method
@dataclass(frozen=True)
class VBLoRA(RankMethod):
    """Low-rank updates composed of the vectors of one bank."""

    sized_by = "vectors"
    name = "vblora"
    paper = "Li et al. 2024, https://arxiv.org/abs/2405.15179"
    summary = "low-rank updates composed of the vectors of one bank"
    start = "near-identity"
    learning_rate = 1e-2

    rank: int = option(4, "rank r of the update", least=1)
    vectors: int = option(256, "vectors of the bank", least=1)
    block: int = option(256, "largest length b of a vector; a divisor of all sizes", least=1)
    top: int = option(2, "vectors that a block is composed of", least=1)

    @classmethod
    def example(cls) -> VBLoRA:
        """Return the method with a bank for narrow backbones."""
        return cls(vectors=16, block=8)

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """Yield one update per selected projection, of the same bank."""
        ranks = self.ranks_by_site(anatomy)
        bank = VectorBank(self.vectors, self._length(ranks))
        for number, (site, rank) in enumerate(ranks.items()):
            module = ComposedFactors(site, rank, min(self.top, self.vectors), bank)
            if number == 0:
                module.bank = bank
            yield Placement(site, module)

    def count(self, anatomy: Anatomy) -> int:
        """Sum vectors rank (d_in + d_out) / b over the sites, and add vectors b."""
        ranks = self.ranks_by_site(anatomy)
        block = self._length(ranks)
        blocks = sum(rank * (site.d_in + site.d_out) // block for site, rank in ranks.items())
        return self.vectors * (blocks + block)

    def _length(self, sites: Iterable[Site]) -> int:
        sizes = [size for site in sites for size in (site.d_in, site.d_out)]
        return divisor(math.gcd(*sizes), self.block)
