"""DEFT: a subspace of the outputs of a projection is removed and replaced.

    y = (I - P f(P)^T) W x + s P R x + b

    x: (..., d_in)    P: (d_out, rank)    R: (rank, d_in)    f: relu    s: 1, or alpha / rank

With `basis: qr` the columns of P are made orthonormal and f is the identity. R is f(P)^T W / s at
first, so the initial update is zero; P is normal with a deviation of 0.02. With
`writes: false`, R is omitted: the subspace is only removed, as in PaRa, even initially. f(P)^T W is
computed in each call, at the cost of rank tokens: merge before serving.

Parameters: rank (d_in + d_out) per site; without R, rank d_out.

Kumar et al. 2025, "DEFT: Decompositional Efficient Fine-Tuning for Text-to-Image Models",
https://arxiv.org/abs/2509.22793; Chen et al. 2024, "PaRa: Personalizing Text-to-Image Diffusion via
Parameter Rank Reduction", https://arxiv.org/abs/2406.05641.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.ops import WeightFactors, cast, no_autocast, wide
from adapterhub.methods.common.projections import RankMethod, require_components, weight_at
from adapterhub.methods.common.site_module import init_is_skipped


class ReplacedSubspace(WeightFactors):
    """The map (x, y, W, b) -> y + P (s R - f(P)^T W) x."""

    R: Tensor | None

    def __init__(
        self, site: Site, rank: int, scale: float, orthonormal: bool, writes: bool
    ) -> None:
        super().__init__()
        self.P = nn.Parameter(torch.empty(site.d_out, rank))
        nn.init.normal_(self.P, std=0.02)
        self.R = nn.Parameter(torch.zeros(rank, site.d_in)) if writes else None
        self.scale, self.orthonormal = scale, orthonormal

    def removed(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return P: (d_out, rank) and f(P)^T W: (rank, d_in)."""
        with no_autocast(weight):
            left = torch.linalg.qr(wide(self.P)).Q if self.orthonormal else self.P
            right = left if self.orthonormal else left.relu()
            return left, right.T @ cast(weight, right)

    def product(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return P: (d_out, rank) and s R - f(P)^T W: (rank, d_in)."""
        left, removed = self.removed(weight)
        return left, -removed if self.R is None else self.scale * self.R - removed


@register_method
@dataclass(frozen=True)
class DEFT(RankMethod):
    """Subspaces of the outputs of projections, removed and replaced."""

    name = "deft"
    paper = "Kumar et al. 2025, https://arxiv.org/abs/2509.22793"
    summary = "subspaces of the outputs of projections, removed and written again"
    learning_rate = 1e-3

    alpha: float = option(0.0, "numerator of the scale alpha / rank; 0: a scale of 1", least=0)
    basis: Literal["relu", "qr"] = option("relu", "f: relu, or an orthonormal basis of P (qr)")
    writes: bool = option(True, "write the subspace again by R; false: PaRa")

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> ReplacedSubspace:
        """Return the update of one site."""
        require_components(self, site, rank)
        scale = self.alpha / rank if self.alpha else 1.0
        module = ReplacedSubspace(site, rank, scale, self.basis == "qr", self.writes)
        if not (module.R is None or module.R.is_meta or init_is_skipped()):
            weight = weight_at(site, anatomy)
            module.to(weight.device)  # P is drawn on the CPU
            with torch.no_grad():
                module.R.copy_(module.removed(weight)[1] / scale)
        return module

    def size(self, site: Site, rank: int) -> int:
        """Return rank (d_in + d_out), or rank d_out."""
        return rank * (site.d_out + site.d_in * self.writes)
