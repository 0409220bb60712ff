"""RoAd: pairs of output features are rotated and scaled.

    [y'_i]   [a_i cos t_i  -c_i sin u_i] [y_i]
    [y'_j] = [c_j sin u_j   a_j cos t_j] [y_j],   j = i + g / 2                      (equation 4)

    y, y': (..., d_out)    t, u: angles, zero    a, c: scales, one    g: the size of a group

Features are in groups of `group`, and feature i of a group's first half is paired with the same one
of its second half. One angle and one scale are used for each pair (`variant: 1`), for each feature
(2), or for each entry of the 2 x 2 matrix (4). At first, nothing changes. The cost is a few
vectors, also in a batch of many adapters.

Parameters: d_out per site; 2 d_out with variant 2, 4 d_out with variant 4.

Liao et al. 2024, "3-in-1: 2D Rotary Adaptation for Efficient Finetuning, Efficient Batching and
Composability", https://arxiv.org/abs/2409.00119.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.errors import SiteError
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.ops import RowStack, split_last
from adapterhub.methods.common.projections import ProjectionMethod, divisor
from adapterhub.methods.common.site_module import OutputModule, SiteModule


def _stack_rotations(modules: Sequence[SiteModule | None]) -> RowStack | None:
    """Stack the entries of the matrices: (modules, 1, groups, 2, group / 2) each."""
    present: list[Any] = [module for module in modules if module is not None]
    if len({module.group for module in present}) > 1:
        return None
    same = present[0].entries()
    nothing = torch.ones_like(same[0]), torch.zeros_like(same[1])
    chosen: list[Any] = [nothing if m is None else m.entries() for m in modules]  # type: ignore[operator]
    kept, crossed = (torch.stack([each[n] for each in chosen])[:, None] for n in (0, 1))
    return RowStack((kept, crossed), lambda x, y, *entries: _rotated(y, *entries))


def _rotated(y: Tensor, kept: Tensor, crossed: Tensor) -> Tensor:
    """Rotate each pair. kept, crossed: (..., groups, 2, group / 2)."""
    halves = split_last(y, *kept.shape[-3:])
    first, second = halves.unbind(-2)
    turned = torch.stack([-second, first], -2)
    rotated: Tensor = kept.to(y.dtype) * halves + crossed.to(y.dtype) * turned
    return rotated.flatten(-3)


class PairRotation(OutputModule):
    """The map (x, y) -> y with its pairs of features rotated and scaled."""

    affine = True
    stack = staticmethod(_stack_rotations)

    def __init__(self, size: int, group: int, variant: int) -> None:
        super().__init__()
        # (groups, angles and scales of cos and of sin, halves, pairs)
        shape = (size // group, 2 if variant == 4 else 1, 1 if variant == 1 else 2, group // 2)
        self.angle = nn.Parameter(torch.zeros(shape))
        self.scale = nn.Parameter(torch.ones(shape))
        self.group = group

    def entries(self) -> tuple[Tensor, Tensor]:
        """Return the factors of each feature and of its partner: (groups, 2, group / 2)."""
        cos, sin = self.angle[:, 0].cos(), self.angle[:, -1].sin()
        size = (-1, 2, -1)
        return (self.scale[:, 0] * cos).expand(size), (self.scale[:, -1] * sin).expand(size)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Rotate and scale each pair. y: (..., size) -> y' like y."""
        return _rotated(y, *self.entries())


@register_method
@dataclass(frozen=True)
class RoAd(ProjectionMethod):
    """Rotations and scales of pairs of output features."""

    name = "road"
    paper = "Liao et al. 2024, https://arxiv.org/abs/2409.00119"
    summary = "rotations and scales of pairs of output features"
    learning_rate = 5e-3

    group: int = option(
        64, "largest size of a group; its even divisor of the output's size", least=2
    )
    variant: Literal[1, 2, 4] = option(
        1, "angles and scales: of a pair (1), a feature (2), all (4)"
    )

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> PairRotation:
        """Return the rotations of one site.

        Raises:
            SiteError: a projection with an odd number of features.
        """
        if site.d_out % 2:
            raise SiteError(f"road pairs {site.d_out} features at {site.id}", expected="even sizes")
        return PairRotation(site.d_out, 2 * divisor(site.d_out // 2, self.group // 2), self.variant)

    def size(self, site: Site, rank: int) -> int:
        """Return d_out, 2 d_out or 4 d_out."""
        return self.variant * site.d_out
