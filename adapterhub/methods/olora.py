"""OLoRA: LoRA that is initialized with the QR decomposition of the weight.

    W = Q R,   B0 = Q_r,   A0 = R_r
    y = (W - s B0 A0) x + s B A x + b = y0 + s (B A x - B0 A0 x),   s = alpha / rank

    W: (d_out, d_in)    A, A0: (rank, d_in)    B, B0: (d_out, rank)    y0: the host's output

A and B are initialized as A0 and B0, so the initial update is zero; the columns of B are
orthonormal. W is unchanged, and s B0 A0 x is subtracted from the output, as in PiSSA. A0 and B0 are
saved with the adapter.

Parameters: rank (d_in + d_out) per site.

Büyükakyüz 2024, "OLoRA: Orthonormal Low-Rank Adaptation of Large Language Models",
https://arxiv.org/abs/2406.01775.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.projections import require_components, weight_at
from adapterhub.methods.common.site_module import init_is_skipped
from adapterhub.methods.lora import LoRA
from adapterhub.methods.pissa import PiSSALayer


@register_method
@dataclass(frozen=True)
class OLoRA(LoRA):
    """Low-rank updates, initialized with the QR decomposition of the weight."""

    name = "olora"
    paper = "Büyükakyüz 2024, https://arxiv.org/abs/2406.01775"
    summary = "LoRA initialized with the QR decomposition of the weight"
    learning_rate = 5e-4

    alpha: float = option(
        8.0, "numerator of the scale: updates are multiplied by alpha / rank", above=0
    )

    kinds = ("linear",)

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> PiSSALayer:
        """Return the update of one site, whose weight has as many components as the rank."""
        require_components(self, site, rank)
        layer = PiSSALayer(site.d_in, site.d_out, rank, self.scale(rank), self.dropout)
        if not init_is_skipped():
            q, r = torch.linalg.qr(weight_at(site, anatomy))
            layer.begin(q[:, :rank], r[:rank])
        return layer
