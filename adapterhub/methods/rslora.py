"""rsLoRA, "rank-stabilized LoRA": LoRA with a scale for high ranks.

    y = W x + s B A x,   s = alpha / sqrt(rank)                                   (theorem 3.2)

    x: (..., d_in)    A: (rank, d_in), Kaiming-uniform    B: (d_out, rank), zero    y: (..., d_out)

With LoRA's s = alpha / rank, gradients become smaller as the rank grows.

Parameters: rank (d_in + d_out) per site, as for lora.

Kalajdzievski 2023, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", theorem
3.2, https://arxiv.org/abs/2312.03732.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from adapterhub.config.options import option
from adapterhub.methods.common.base import register_method
from adapterhub.methods.lora import LoRA


@register_method
@dataclass(frozen=True)
class RsLoRA(LoRA):
    """Low-rank updates scaled by alpha / sqrt(rank)."""

    name = "rslora"
    paper = "Kalajdzievski 2023, https://arxiv.org/abs/2312.03732"
    summary = "LoRA with the scale alpha / sqrt(rank), for high ranks"

    rank: int = option(16, "rank r of the update", least=1)
    alpha: float = option(
        8.0, "numerator of the scale: updates are multiplied by alpha / sqrt(rank)"
    )

    def scale(self, rank: int) -> float:
        """Compute alpha / sqrt(rank)."""
        return self.alpha / math.sqrt(rank)
