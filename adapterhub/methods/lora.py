"""LoRA: a low-rank update of a frozen projection.

    y = W x + s B A x,   s = alpha / rank                                         (equation 3)

    x: (..., d_in)    A: (rank, d_in), Kaiming-uniform    B: (d_out, rank), zero    y: (..., d_out)

B is zero at first, so the initial update is zero. Ranks may differ between sites:
`ranks: {attn.q: 4, encoder.0.attn.v: 16}`. The paper adapts the query and value projections
(section 7.1).

Weights of routed experts (`ffn.experts.gate_up`, `ffn.experts.down`) get an A and B for each
expert, or with `experts: shared` one for all experts of a layer.

Parameters: rank (d_in + d_out) per site, and per expert.

Hu et al. 2022, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1,
https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Kind, Site
from adapterhub.config.options import option
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.experts import AtExperts
from adapterhub.methods.common.ops import add_product, cast, stack_low_rank
from adapterhub.methods.common.projections import WITH_OUTPUT, RankMethod, RankOption
from adapterhub.methods.common.site_module import OutputModule, SiteModule


class LoRALayer(OutputModule):
    """The map (x, y) -> y + s B A x."""

    affine = True
    stack = staticmethod(stack_low_rank)

    def __init__(self, d_in: int, d_out: int, rank: int, scale: float, dropout: float) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.empty(rank, d_in))
        self.B = nn.Parameter(torch.zeros(d_out, rank))
        self.scale = scale
        self.dropout = dropout
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the new output. x: (..., d_in), y: (..., d_out) -> y' like y."""
        if self.training and self.dropout:
            x = F.dropout(x, self.dropout)
        return add_product(y, F.linear(x, cast(self.A, x)), self.B, self.scale)

    def factors(self) -> tuple[Tensor, Tensor] | None:
        """Return s B: (d_out, rank) and A: (rank, d_in)."""
        return self.scale * self.B, self.A

    def extra_repr(self) -> str:
        """Return the settings that `print(model)` shows."""
        return f"rank={self.A.shape[0]}, scale={self.scale:g}"


@dataclass(frozen=True)
class _Scaled(RankOption):
    alpha: float = option(16.0, "numerator of the scale: updates are multiplied by alpha / rank")
    dropout: float = option(0.0, "dropout probability on the input of A", least=0, most=1)


@dataclass(frozen=True)
class LowRank(RankMethod, _Scaled):
    """Low-rank updates of projections, and of weights that have one matrix."""

    training_options: ClassVar[tuple[str, ...]] = ("dropout",)
    kinds: ClassVar[tuple[Kind, ...]] = (*WITH_OUTPUT, "weight")

    def scale(self, rank: int) -> float:
        """Compute alpha / rank."""
        return self.alpha / rank

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> SiteModule:
        """Return the update of one site."""
        return LoRALayer(site.d_in, site.d_out, rank, self.scale(rank), self.dropout)

    def size(self, site: Site, rank: int) -> int:
        """Return rank (d_in + d_out)."""
        return rank * (site.d_in + site.d_out)


@register_method
@dataclass(frozen=True)
class LoRA(AtExperts, LowRank):
    """Low-rank updates of projections."""

    name = "lora"
    paper = "Hu et al. 2022, https://arxiv.org/abs/2106.09685"
    summary = "low-rank updates of projections"
    learning_rate = 1e-3
    kinds = LowRank.kinds
