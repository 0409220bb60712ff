"""rsLoRA, "rank-stabilized LoRA": LoRA whose scale does not shrink learning at a high rank.

    y = W x + s B A x,   s = alpha / sqrt(rank)                                   (theorem 3.2)

With LoRA's s = alpha / rank the size of gradients falls with the rank. Shapes, start and
parameters are those of lora: rank (d_in + d_out) a site.

Kalajdzievski 2023, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA",
https://arxiv.org/abs/2312.03732.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from adapterhub.config.options import option
from adapterhub.methods._base import register_method
from adapterhub.methods.lora import LoRA


@register_method
@dataclass(frozen=True)
class RsLoRA(LoRA):
    """Low-rank updates scaled by alpha / sqrt(rank)."""

    name = "rslora"
    paper = "Kalajdzievski 2023, https://arxiv.org/abs/2312.03732"
    summary = "lora with the scale alpha / sqrt(rank), for high ranks"

    rank: int = option(16, "rank r of the update")
    alpha: float = option(8.0, "scale numerator: the update is multiplied by alpha / sqrt(rank)")

    def scale(self, rank: int) -> float:
        """alpha / sqrt(rank)."""
        return self.alpha / math.sqrt(rank)
