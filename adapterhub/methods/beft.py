"""BEFT: a bias at the value projections, also where the backbone has none.

    y = W x + b0 + b

    x: (..., d_in)    y, b: (..., d_out)    b0: the bias of the projection, if there is one

b is zero at first, so nothing changes. Where the projection has a bias, b is merged into it;
otherwise merging is refused. It costs nothing, even in a batch of many adapters. bitfit trains the
biases that a backbone has, all or some.

Parameters: d_out per site.

Huang et al. 2025, "BEFT: Bias-Efficient Fine-Tuning of Language Models in Low-Data Regimes",
https://arxiv.org/abs/2509.15974.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.ops import RowStack
from adapterhub.methods.common.projections import ProjectionMethod, has_bias
from adapterhub.methods.common.site_module import OutputModule, SiteModule


def _stack_biases(modules: Sequence[SiteModule | None]) -> RowStack:
    """Stack biases: (modules, 1, size)."""
    some: Any = next(module for module in modules if module is not None)
    nothing = torch.zeros_like(some.b)
    biases = [m.b if isinstance(m, AddedBias) else nothing for m in modules]
    return RowStack((torch.stack(biases)[:, None],), lambda x, y, bias: y + bias)


class AddedBias(OutputModule):
    """The map (x, y) -> y + b."""

    affine = True
    stack = staticmethod(_stack_biases)

    def __init__(self, size: int) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the bias. y: (..., size) -> y' like y."""
        return y + self.b.to(y.dtype)


class LoneBias(AddedBias):
    """The same, at a projection without a bias that it could be merged into."""

    affine = False
    stack = staticmethod(_stack_biases)


@register_method
@dataclass(frozen=True)
class BEFT(ProjectionMethod):
    """Biases of the value projections, also where the backbone has none."""

    name = "beft"
    paper = "Huang et al. 2025, https://arxiv.org/abs/2509.15974"
    summary = "biases of the value projections, also where the backbone has none"
    learning_rate = 5e-3

    sites: tuple[str, ...] = option(("attn.v", "cross.v"), "projections to adapt")

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> AddedBias:
        """Return the bias of one site."""
        return (AddedBias if has_bias(site, anatomy) else LoneBias)(site.d_out)

    def size(self, site: Site, rank: int) -> int:
        """Return d_out."""
        return site.d_out
