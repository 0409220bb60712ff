"""PSOFT: a rotation between the principal components of the weight.

    W = U S V^T,   y = W x + B0 (R - I) A0 x,   B0 = U_r S_r,   A0 = V_r^T
    R = diag(b) (I + Q) (I - Q)^-1 diag(a)

    x: (..., d_in)    A0: (rank, d_in), B0: (d_out, rank), fixed    Q: (rank, rank), skew-symmetric
    a, b: (rank,), one

Q is zero at first, so nothing changes. A rotation of the r largest components keeps the angles
between the weights of output features there; a and b relax it. The inverse is exact for
`terms: 0`, or the first `terms` of its series. As in LoRA-XS, A0 and B0 are saved with the adapter
unless `stored` is false.

Parameters: rank (rank - 1) / 2 + 2 rank per site.

Wu et al. 2025, "Efficient Orthogonal Fine-Tuning with Principal Subspace Adaptation",
https://arxiv.org/abs/2505.11235.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.ops import cayley, skew, stack_low_rank
from adapterhub.methods.common.projections import require_components, weight_at
from adapterhub.methods.lora_xs import CoreMethod, CoreUpdate


class RotatedCore(CoreUpdate):
    """The map (x, y) -> y + B0 (diag(b) R diag(a) - I) A0 x."""

    stack = staticmethod(stack_low_rank)
    powers = (1.0, 0.0)

    def __init__(self, weight: Tensor, rank: int, stored: bool, terms: int) -> None:
        super().__init__(weight, rank, stored)
        self.Q = nn.Parameter(torch.zeros(rank * (rank - 1) // 2))
        self.a, self.b = nn.Parameter(torch.ones(rank)), nn.Parameter(torch.ones(rank))
        self.terms = terms

    def core(self) -> Tensor:
        """Return diag(b) R diag(a) - I: (rank, rank)."""
        (rotation,) = cayley(skew(self.Q[None], len(self.a)), self.terms)
        relaxed: Tensor = self.b[:, None] * rotation * self.a
        return relaxed - torch.eye(len(self.a), device=relaxed.device, dtype=relaxed.dtype)


@register_method
@dataclass(frozen=True)
class PSOFT(CoreMethod):
    """Rotations between the principal components of weights."""

    name = "psoft"
    paper = "Wu et al. 2025, https://arxiv.org/abs/2505.11235"
    summary = "rotations between the principal components of weights"
    learning_rate = 1e-3

    rank: int = option(16, "number of components", least=2)
    terms: int = option(0, "terms of the series of Cayley's formula; 0: exact", least=0, most=32)

    @classmethod
    def example(cls) -> PSOFT:
        """Return the method with few components, for narrow projections."""
        return cls(rank=4)

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> RotatedCore:
        """Return the update of one site."""
        require_components(self, site, rank)
        return RotatedCore(weight_at(site, anatomy), rank, self.stored, self.terms)

    def size(self, site: Site, rank: int) -> int:
        """Return rank (rank - 1) / 2 + 2 rank."""
        return rank * (rank - 1) // 2 + 2 * rank
