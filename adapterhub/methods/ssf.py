"""SSF: the output features of projections are scaled and shifted.

    y' = a * y + c                                                                  (equation 3)

    y, y': (..., d_out)    a: (d_out,), one    c: (d_out,), zero

At first, nothing changes. The shift is omitted where the projection lacks a bias, so that the
adapter can always be merged into weight and bias. The cost is two vectors, even in a batch of many
adapters.

Parameters: 2 d_out per site with a bias, d_out per other site.

Lian et al. 2022, "Scaling & Shifting Your Features: A New Baseline for Efficient Model Tuning",
section 3, https://arxiv.org/abs/2210.08823.
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


def _stack_lines(modules: Sequence[SiteModule | None]) -> RowStack:
    """Stack scales and shifts: (modules, 1, size) each."""
    some: Any = next(module for module in modules if module is not None)
    ones, zeros = torch.ones_like(some.scale), torch.zeros_like(some.scale)
    scales = [m.scale if isinstance(m, ScaleShift) else ones for m in modules]
    shifts = [
        m.shift if isinstance(m, ScaleShift) and m.shift is not None else zeros for m in modules
    ]
    return RowStack((torch.stack(scales)[:, None], torch.stack(shifts)[:, None]), _line)


def _line(x: Tensor, y: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return y * scale + shift


class ScaleShift(OutputModule):
    """The map (x, y) -> a * y + c."""

    affine = True
    stack = staticmethod(_stack_lines)

    def __init__(self, size: int, shifts: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))
        self.shift = nn.Parameter(torch.zeros(size)) if shifts else None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scale and shift the output. y: (..., size) -> y' like y."""
        scaled = y * self.scale.to(y.dtype)
        return scaled if self.shift is None else scaled + self.shift.to(y.dtype)


@register_method
@dataclass(frozen=True)
class SSF(ProjectionMethod):
    """Scales and shifts of output features."""

    name = "ssf"
    paper = "Lian et al. 2022, https://arxiv.org/abs/2210.08823"
    summary = "scales and shifts of the output features of projections"
    learning_rate = 5e-3

    sites: tuple[str, ...] = option(
        ("attn.q", "attn.k", "attn.v", "attn.o", "ffn.gate", "ffn.up", "ffn.down"),
        "projections to adapt",
    )

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> ScaleShift:
        """Return the scale of one site, with a shift where it has a bias."""
        return ScaleShift(site.d_out, has_bias(site, anatomy))

    def count(self, anatomy: Anatomy) -> int:
        """Sum d_out over the sites, twice where there is a bias."""
        sites = self.ranks_by_site(anatomy)
        return sum(site.d_out * (1 + has_bias(site, anatomy)) for site in sites)
