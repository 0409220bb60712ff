"""C3A: the update of a projection consists of circulant blocks.

    y = W x + D x,   D_ij = circ(k_ij) / d_in                                       (section 3.3)

    x: (..., d_in)    k: (d_out / b, d_in / b, b), zero    D_ij: (b, b), each row the one above,
    shifted by one    b: the size of a block

b is the largest size up to `block` that divides d_in and d_out. k is zero at first, so the initial
update is zero. A circulant block has b parameters and up to full rank; the paper trains it at a
high learning rate.

Parameters: d_in d_out / b per site.

Chen et al. 2024, "Parameter-Efficient Fine-Tuning via Circular Convolution", section 3,
https://arxiv.org/abs/2407.19342.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.experts import AtExperts
from adapterhub.methods.common.ops import DeltaModule
from adapterhub.methods.common.projections import divisor


class CirculantUpdate(DeltaModule):
    """The map (x, y) -> y + D x, with circulant blocks of D."""

    def __init__(self, site: Site, block: int) -> None:
        super().__init__()
        self.k = nn.Parameter(torch.zeros(site.d_out // block, site.d_in // block, block))

    def delta(self) -> Tensor:
        """Return D: (d_out, d_in)."""
        _, columns, size = self.k.shape
        step = torch.arange(size, device=self.k.device)
        shifts = (step[None] - step[:, None]) % size
        blocks = self.k[..., shifts] / (columns * size)  # (rows, columns, b, b)
        return blocks.transpose(1, 2).flatten(2).flatten(0, 1)


@register_method
@dataclass(frozen=True)
class C3A(AtExperts):
    """Circulant blocks as updates of projections."""

    sized_by = "block"
    name = "c3a"
    paper = "Chen et al. 2024, https://arxiv.org/abs/2407.19342"
    summary = "circulant blocks as updates of projections"
    learning_rate = 3e-1

    block: int = option(128, "largest size of a block; a common divisor of both sizes", least=1)

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> CirculantUpdate:
        """Return the update of one site."""
        return CirculantUpdate(site, self._block(site))

    def size(self, site: Site, rank: int) -> int:
        """Return d_in d_out / b."""
        return site.d_in * site.d_out // self._block(site)

    def _block(self, site: Site) -> int:
        return divisor(math.gcd(site.d_in, site.d_out), self.block)
