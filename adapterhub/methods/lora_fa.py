"""LoRA-FA: LoRA whose first factor stays as it was drawn.

    y = W x + s B A x,   s = alpha / rank                                      (section 3.1)

    x: (..., d_in)    A: (rank, d_in), Kaiming-uniform, fixed    B: (d_out, rank), zero

B is zero at first, so the initial update is zero. Only B trains: the backward pass of a site only
needs A x, with rank numbers for each token, instead of x. A is saved with the adapter.

Parameters: rank d_out per site.

Zhang et al. 2023, "LoRA-FA: Memory-efficient Low-rank Adaptation for Large Language Models
Fine-tuning", section 3, https://arxiv.org/abs/2308.03303.
"""

from __future__ import annotations

from dataclasses import dataclass

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.ops import stack_low_rank
from adapterhub.methods.lora import LoRA, LoRALayer


class FrozenFactorLayer(LoRALayer):
    """The map (x, y) -> y + s B A x, where A does not train."""

    stack = staticmethod(stack_low_rank)

    def __init__(self, d_in: int, d_out: int, rank: int, scale: float, dropout: float) -> None:
        super().__init__(d_in, d_out, rank, scale, dropout)
        drawn = self.A.detach()
        del self.A
        self.register_buffer("A", drawn)


@register_method
@dataclass(frozen=True)
class LoRAFA(LoRA):
    """Low-rank updates whose first factor does not train."""

    name = "lora-fa"
    paper = "Zhang et al. 2023, https://arxiv.org/abs/2308.03303"
    summary = "LoRA whose first factor is fixed: less memory for activations"
    learning_rate = 1e-3

    kinds = ("linear",)

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> FrozenFactorLayer:
        """Return the update of one site."""
        scale = self.scale(rank)
        return FrozenFactorLayer(site.d_in, site.d_out, rank, scale, self.dropout)

    def size(self, site: Site, rank: int) -> int:
        """Return rank d_out."""
        return rank * site.d_out
