"""LoRA+: LoRA with a higher learning rate for B than for A.

    y = W x + s B A x,   s = alpha / rank,   learning rate of B = ratio * learning rate of A

    x: (..., d_in)    A: (rank, d_in), Kaiming-uniform    B: (d_out, rank), zero    y: (..., d_out)

With the same learning rate for both, wide backbones learn features inefficiently.
`train.learning_rate` is the one of A. The paper recommends a ratio of 16.

Parameters: rank (d_in + d_out) per site, as for lora.

Hayou et al. 2024, "LoRA+: Efficient Low Rank Adaptation of Large Models",
https://arxiv.org/abs/2402.12354.
"""

from __future__ import annotations

from dataclasses import dataclass

from adapterhub.config.options import option
from adapterhub.methods.common.base import register_method
from adapterhub.methods.lora import LoRA


@register_method
@dataclass(frozen=True)
class LoRAPlus(LoRA):
    """Low-rank updates with a higher learning rate for B."""

    name = "lora-plus"
    training_options = ("dropout", "ratio")
    paper = "Hayou et al. 2024, https://arxiv.org/abs/2402.12354"
    summary = "LoRA with a higher learning rate for B than for A"
    learning_rate = 2e-4

    ratio: float = option(16.0, "learning rate of B, as a multiple of A's rate")

    def rate(self, name: str) -> float:
        """Return the ratio for B, and 1 for A."""
        return self.ratio if name.endswith(".B") else 1.0
