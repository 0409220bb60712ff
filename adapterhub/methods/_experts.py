"""Modules at the weights of routed experts: low-rank updates and scales.

    y = W_e x + s B_e A_e x        y = l_e * W_e x        y = W_e (l_e * x)

    e: the expert that a row x is computed by    W_e: (d_out, d_in)
    A: (experts, rank, d_in)    B: (experts, d_out, rank)    l: (experts, d)

With `shared`, one A and B, or one l, serve all experts: (rank, d_in), (d_out, rank), (d,).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.errors import SiteError
from adapterhub.methods._base import Method
from adapterhub.methods._expert_rows import ExpertRows
from adapterhub.methods._ops import add_product, cast
from adapterhub.methods._site_module import ExpertsInputModule, ExpertsModule, SiteModule

PerExpert: TypeAlias = Literal["each", "shared"]
PER_EXPERT = "updates of routed experts: one for each, or one shared by all of a layer"


def matrices_of(site: Site, experts: PerExpert) -> int:
    """Return how many updates a site gets: one for each of its experts, or one."""
    count = site.held.experts if site.held else None
    return count if count and experts == "each" else 1


def refuse_unused(method: str, experts: PerExpert, sites: tuple[Site, ...]) -> None:
    """Refuse an option for experts where no site has experts.

    Raises:
        SiteError: `shared`, and no site of experts.
    """
    if experts == "shared" and not any(site.held and site.held.experts for site in sites):
        raise SiteError(
            f"{method}(experts=shared), and none of its sites is a weight of experts",
            offenders=sorted({site.role for site in sites}),
            expected="sites of routed experts",
            hint='sites=["ffn.experts.*"], or leave out experts=shared',
        )


class ExpertsLoRALayer(ExpertsModule):
    """The map (x, y) -> y + s B_e A_e x."""

    affine = True

    def __init__(self, site: Site, rank: int, scale: float, dropout: float, each: bool) -> None:
        super().__init__()
        assert site.held is not None
        assert site.held.experts is not None
        experts = (site.held.experts,) if each else ()
        self.A = nn.Parameter(torch.empty(*experts, rank, site.d_in))
        self.B = nn.Parameter(torch.zeros(*experts, site.d_out, rank))
        self.scale = scale
        self.dropout = dropout
        bound = math.sqrt(1 / site.d_in)  # Kaiming-uniform with a = sqrt(5), as of one matrix
        nn.init.uniform_(self.A, -bound, bound)

    def forward(self, x: Tensor, y: Tensor, rows: ExpertRows) -> Tensor:
        """Compute the new output. x: (..., d_in), y: (..., d_out) -> y' like y."""
        if self.training and self.dropout:
            x = F.dropout(x, self.dropout)
        if self.A.ndim == 2:
            return add_product(y, F.linear(x, cast(self.A, x)), self.B, self.scale)
        inner = rows.product(x, self.A.to(x.dtype))
        return torch.add(
            y, rows.product(inner, self.B.to(inner.dtype)).to(y.dtype), alpha=self.scale
        )

    def extra_repr(self) -> str:
        """Return the settings that `print(model)` shows."""
        experts = f"experts={len(self.A)}, " if self.A.ndim == 3 else ""
        return f"{experts}rank={self.A.shape[-2]}, scale={self.scale:g}"


class ExpertsOutputScale(ExpertsModule):
    """The map (x, y) -> l_e * y, before the host adds its bias."""

    affine = True

    def __init__(self, experts: int, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(experts, size))

    def forward(self, x: Tensor, y: Tensor, rows: ExpertRows) -> Tensor:
        """Rescale the output. y: (..., size) -> y' like y."""
        return y * _of_rows(self.scale, rows).to(y.dtype)


class ExpertsInputScale(ExpertsInputModule):
    """The map x -> l_e * x."""

    affine = True

    def __init__(self, experts: int, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(experts, size))

    def forward(self, x: Tensor, rows: ExpertRows) -> Tensor:
        """Rescale the input. x: (..., size) -> x' like x."""
        return x * _of_rows(self.scale, rows).to(x.dtype)


def _of_rows(scale: Tensor, rows: ExpertRows) -> Tensor:
    return scale[0] if len(scale) == 1 else rows.select(scale)


@dataclass(frozen=True)
class AtExperts(Method):
    """A mixin: low-rank updates also of weights of experts, as in `class LoRA(AtExperts, LowRank)`.

    The sites that it adds are those that a user names.
    """

    experts: PerExpert = option("each", PER_EXPERT, omitted=True)

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> SiteModule:
        """Return the update of one site."""
        method: Any = super()
        if not (site.held and site.held.experts):
            return method.module(site, rank, anatomy)  # type: ignore[no-any-return]
        own: Any = self
        return ExpertsLoRALayer(
            site, rank, own.scale(rank), own.dropout, each=self.experts == "each"
        )

    def size(self, site: Site, rank: int) -> int:
        """Return the numbers of one site: those of a matrix, for each expert."""
        method: Any = super()
        return matrices_of(site, self.experts) * method.size(site, rank)  # type: ignore[no-any-return]

    def ranks_by_site(self, anatomy: Anatomy) -> dict[Site, int]:
        """Return the rank of each selected site.

        Raises:
            SiteError: `experts=shared`, and none is of experts.
        """
        method: Any = super()
        ranks: dict[Site, int] = method.ranks_by_site(anatomy)
        refuse_unused(self.name, self.experts, tuple(ranks))
        return ranks
