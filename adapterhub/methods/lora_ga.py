"""LoRA-GA: LoRA that is initialized with the singular vectors of the first gradient.

    dL/dW = U S Vᵀ,   A0 = c V_(1..r)ᵀ,   B0 = c U_(r+1..2r),   c = d_out^(1/4) / 4  (theorem 3.2)
    y = (W - s B0 A0) x + s B A x + b = y0 + s (B A x - B0 A0 x),   s = alpha / rank

    W: (d_out, d_in)    A, A0: (rank, d_in)    B, B0: (d_out, rank)    y0: the host's output

A and B are initialized as A0 and B0, so the initial update is zero. The first step then changes W
as closely to full fine-tuning as a product of this rank can. s is 1 by default, as in peft; the
paper has alpha / sqrt(rank) with alpha = 16. If a gradient has fewer than 2 r components, B gets
the last r of them. The paper subtracts s B0 A0 from W; here W is unchanged, and s B0 A0 x is
subtracted from the output, as in PiSSA. A0 and B0 are saved with the adapter.

The gradient is computed on the first training rows: by `adapterhub train` before the first step
(`train.init`), or by `ah.calibrate` in Python. Without it, A0 and B0 are initialized as in LoRA,
and B0 is zero.

Parameters: rank (d_in + d_out) per site.

Wang et al. 2024, "LoRA-GA: Low-Rank Adaptation with Gradient Approximation", section 3,
https://arxiv.org/abs/2407.05000.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.projections import require_components
from adapterhub.methods.lora import LoRA
from adapterhub.methods.pissa import PiSSALayer, leading

_STABLE = 16.0  # gamma of theorem 3.2, as in the paper's experiments


def begin_at_gradient(module: PiSSALayer, gradient: Tensor) -> float:
    """Begin at the singular vectors of dL/dW: (d_out, d_in).

    Returns:
        The share of its squared norm in the directions of A and B.
    """
    rank, size = len(module.A), (len(module.B) ** 0.5 / _STABLE) ** 0.5
    u, s, vh = leading(gradient, 2 * rank)
    module.begin(size * u[:, -rank:], size * vh[:rank])
    return float(s.square().sum() / gradient.square().sum())


@register_method
@dataclass(frozen=True)
class LoRAGA(LoRA):
    """Low-rank updates, initialized with the singular vectors of the first gradient."""

    name = "lora-ga"
    paper = "Wang et al. 2024, https://arxiv.org/abs/2407.05000"
    summary = "LoRA initialized with the singular vectors of the first gradient"
    learning_rate = 5e-4
    data_start = "lora-ga"

    alpha: float = option(
        8.0, "numerator of the scale: updates are multiplied by alpha / rank", above=0
    )

    kinds = ("linear",)

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> PiSSALayer:
        """Return the update of one site, whose weight has as many components as the rank."""
        require_components(self, site, rank)
        return PiSSALayer(site.d_in, site.d_out, rank, self.scale(rank), self.dropout)
