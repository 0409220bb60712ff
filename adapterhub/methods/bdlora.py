"""BD-LoRA: LoRA with one block-diagonal factor, for servers that split the model.

    y = W x + s B A x,   s = alpha / rank
    A = diag(A_1, ..., A_n) at the projections in `rows`, else B = diag(B_1, ..., B_n)

    x: (..., d_in)    A_i: (rank / n, d_in / n)    B_i: (d_out / n, rank / n)    n: blocks

With n devices of tensor parallelism, each has its own block and its part of the other factor:
projections split by input features (attn.o, ffn.down) have a block-diagonal A, all others a
block-diagonal B, so the LoRA does not need communication. B is zero at first, so the initial update
is zero; A is Kaiming-uniform. It is a LoRA with zeros, and is exported as one.

Parameters: rank (d_in / n + d_out) per site in `rows`, rank (d_in + d_out / n) at others.

Wang et al. 2025, "Block-Diagonal LoRA for Eliminating Communication Overhead in Tensor Parallel
LoRA Serving", https://arxiv.org/abs/2510.23346.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site, matches
from adapterhub.config.options import option
from adapterhub.errors import SiteError
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.experts import AtExperts
from adapterhub.methods.common.ops import FactorModule, stack_low_rank
from adapterhub.methods.common.projections import RankMethod


def on_diagonal(stacked: Tensor, blocks: int) -> Tensor:
    """Put blocks, one below the other, on a diagonal: (rows, columns) -> (rows, n columns)."""
    rows, columns = stacked.shape
    split = stacked.view(blocks, rows // blocks, 1, columns)
    eye = torch.eye(blocks, device=stacked.device, dtype=stacked.dtype)
    return (split * eye[:, None, :, None]).reshape(rows, blocks * columns)


class BlockFactors(FactorModule):
    """The map (x, y) -> y + s B A x, where A or B is block-diagonal."""

    stack = staticmethod(stack_low_rank)

    def __init__(self, site: Site, rank: int, scale: float, blocks: int, rows: bool) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.empty(rank, site.d_in // (blocks if rows else 1)))
        self.B = nn.Parameter(torch.zeros(site.d_out, rank // (1 if rows else blocks)))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.scale, self.blocks, self.rows = scale, blocks, rows

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return s B: (d_out, rank) and A: (rank, d_in), with zeros outside the blocks."""
        if self.rows:
            return self.scale * self.B, on_diagonal(self.A, self.blocks)
        return self.scale * on_diagonal(self.B, self.blocks), self.A


@register_method
@dataclass(frozen=True)
class BDLoRA(AtExperts, RankMethod):
    """Low-rank updates with one block-diagonal factor."""

    name = "bdlora"
    paper = "Wang et al. 2025, https://arxiv.org/abs/2510.23346"
    summary = "LoRA with one block-diagonal factor, for tensor-parallel servers"
    learning_rate = 1e-3

    alpha: float = option(16.0, "numerator of the scale: updates are multiplied by alpha / rank")
    blocks: int = option(2, "number of blocks: the devices of a server", least=1)
    rows: tuple[str, ...] = option(
        ("attn.o", "cross.o", "ffn.down"), "projections whose A is block-diagonal, not B"
    )

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> BlockFactors:
        """Return the update of one site.

        Raises:
            SiteError: the blocks do not divide the rank and the size that they split.
        """
        size = site.d_in if self._by_rows(site) else site.d_out
        if rank % self.blocks or size % self.blocks:
            raise SiteError(
                f"bdlora splits the rank {rank} and {size} features at {site.id} into "
                f"{self.blocks} blocks",
                expected="multiples of the number of blocks",
                hint="bdlora(rank=8, blocks=2)",
            )
        return BlockFactors(site, rank, self.alpha / rank, self.blocks, self._by_rows(site))

    def size(self, site: Site, rank: int) -> int:
        """Return rank (d_in / n + d_out), or rank (d_in + d_out / n)."""
        d_in, d_out = site.d_in, site.d_out
        split, whole = (d_in, d_out) if self._by_rows(site) else (d_out, d_in)
        return rank * (split // self.blocks + whole)

    def _by_rows(self, site: Site) -> bool:
        return any(matches(pattern, site) for pattern in self.rows)
