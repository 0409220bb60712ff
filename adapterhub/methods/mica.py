"""MiCA: LoRA whose second factor is fixed: the directions that the weight uses least.

    W = U S V^T,   y = W x + s B A x,   B = U_(k-r+1..k),   s = alpha / rank

    x: (..., d_in)    A: (rank, d_in), zero    B: (d_out, rank), fixed    k = min(d_in, d_out)

Only A trains, from zero, so the initial update is zero. B is saved with the adapter, since another
decomposition of W may have other signs.

Parameters: rank d_in per site.

Rüdiger & Raschka 2026, "MiCA Learns More Knowledge Than LoRA and Full Fine-Tuning",
https://arxiv.org/abs/2604.01694.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.ops import stack_low_rank
from adapterhub.methods.common.projections import require_components, weight_at
from adapterhub.methods.common.site_module import init_is_skipped
from adapterhub.methods.lora import LoRA, LoRALayer
from adapterhub.methods.lora_xs import decomposed


class MinorComponents(LoRALayer):
    """The map (x, y) -> y + s B A x, where B does not train."""

    stack = staticmethod(stack_low_rank)

    def __init__(self, d_in: int, d_out: int, rank: int, scale: float, dropout: float) -> None:
        super().__init__(d_in, d_out, rank, scale, dropout)
        drawn = self.B.detach()
        del self.B
        self.register_buffer("B", drawn)
        torch.nn.init.zeros_(self.A)


@register_method
@dataclass(frozen=True)
class MiCA(LoRA):
    """Low-rank updates in the directions that the weight uses least."""

    name = "mica"
    paper = "Rüdiger & Raschka 2026, https://arxiv.org/abs/2604.01694"
    summary = "LoRA in the output directions that the weight uses least"
    learning_rate = 1e-3

    kinds = ("linear",)

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> MinorComponents:
        """Return the update of one site, whose weight has as many components as the rank."""
        require_components(self, site, rank)
        layer = MinorComponents(site.d_in, site.d_out, rank, self.scale(rank), self.dropout)
        if not init_is_skipped():
            weight = weight_at(site, anatomy)
            layer.B.copy_(decomposed(weight, min(weight.shape))[0][:, -rank:])
        return layer

    def size(self, site: Site, rank: int) -> int:
        """Return rank d_in."""
        return rank * site.d_in
