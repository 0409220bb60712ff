"""SVFT: sparse updates of the singular values of the weight, and of entries next to them.

    W = U S V^T,   y = W x + U M V^T x

    x: (..., d_in)    U: (d_out, k), V: (d_in, k), fixed    M: (k, k), zero outside of its band
    k = min(d_in, d_out)

M has its diagonal and `band` diagonals on either side of it, and is zero at first, so the initial
update is zero. U and V are decomposed again on each loading, exactly and in fp64, with the same
signs, so the backbone must be loaded in the same precision. With `stored` they are in the file,
which is then larger than the weights. Each call costs up to two products with W: merge before
serving.

Parameters: k + band (2 k - band - 1) per site.

Lingam et al. 2024, "SVFT: Parameter-Efficient Fine-Tuning with Singular Vectors",
https://arxiv.org/abs/2405.19597.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.ops import stack_low_rank
from adapterhub.methods.common.projections import ProjectionMethod, select_sites, weight_at
from adapterhub.methods.lora_xs import CoreUpdate


class BandedCore(CoreUpdate):
    """The map (x, y) -> y + U M V^T x."""

    stack = staticmethod(stack_low_rank)
    powers = (0.0, 0.0)
    places: Tensor

    def __init__(self, weight: Tensor, rank: int, stored: bool, band: int) -> None:
        super().__init__(weight, rank, stored)
        order = np.arange(rank)
        inside = np.flatnonzero(abs(order[:, None] - order) <= band)
        self.register_buffer("places", torch.from_numpy(inside), persistent=False)
        self.M = nn.Parameter(torch.zeros(len(self.places)))

    @property
    def limit(self) -> int:
        """The upper bound of all places."""
        return len(self.A0) ** 2

    def core(self) -> Tensor:
        """Return M: (k, k)."""
        rank = len(self.A0)
        return self.M.new_zeros(rank * rank).index_add(0, self.places, self.M).view(rank, rank)


@register_method
@dataclass(frozen=True)
class SVFT(ProjectionMethod):
    """Sparse updates between the singular vectors of weights."""

    sized_by = "band"
    name = "svft"
    paper = "Lingam et al. 2024, https://arxiv.org/abs/2405.19597"
    summary = "sparse updates between the singular vectors of weights"
    learning_rate = 1e-2

    band: int = option(0, "diagonals of M on either side of the main one", least=0)
    stored: bool = option(False, "the singular vectors are in the file")

    def decomposes_again(self) -> bool:
        """Return whether the file lacks the components."""
        return not self.stored

    def ranks_by_site(self, anatomy: Anatomy) -> Mapping[Site, int]:
        """Return the number of singular values of each selected site."""
        return {s: min(s.d_in, s.d_out) for s in select_sites(self, anatomy, *self.kinds)}

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> BandedCore:
        """Return the update of one site."""
        return BandedCore(weight_at(site, anatomy), rank, self.stored, self.band)

    def size(self, site: Site, rank: int) -> int:
        """Return k + band (2 k - band - 1), at most k²."""
        band = min(self.band, rank - 1)
        return rank + band * (2 * rank - band - 1)
