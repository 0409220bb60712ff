"""PiSSA: LoRA that starts as the principal singular components of the weight and trains these.

    W = U S Vᵀ,   A0 = sqrt(S_r / s) V_rᵀ,   B0 = U_r sqrt(S_r / s),   s B0 A0 = U_r S_r V_rᵀ
    y = (W - s B0 A0) x + s B A x + b = y0 + s (B A x - B0 A0 x)                    (section 3)

    W: (d_out, d_in)    A, A0: (rank, d_in)    B, B0: (d_out, rank)    y0: the host's output
    s = alpha / rank, by default 1 as in the paper

A and B start as A0 and B0, so that the adapted backbone starts as the backbone. The paper takes
B0 A0 off W; here W keeps its bytes and B0 A0 x is subtracted from the output. A0 and B0 are saved
with the adapter: another decomposition of W may have other signs, and rounds differently.
Parameters: rank (d_in + d_out) a site.

Meng et al. 2024, "PiSSA: Principal Singular Values and Singular Vectors Adaptation of Large
Language Models", https://arxiv.org/abs/2404.02948. The decomposition is a randomized one, of Halko
et al. 2011, https://arxiv.org/abs/0909.4061, unless the exact one is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from adapterhub.anatomy.sites import Anatomy
from adapterhub.backbones.weights import read_weight
from adapterhub.config.options import option
from adapterhub.errors import SiteError
from adapterhub.methods._base import Placement, register_method
from adapterhub.methods._ops import cast, skips_init
from adapterhub.methods._options import require_between, require_positive
from adapterhub.methods.lora import LoRA, LoRALayer

OVERSAMPLED = 10  # more directions than wanted, for the accuracy of the last ones


def principal(weight: Tensor, rank: int, iterations: int) -> tuple[Tensor, Tensor]:
    """The factors U_r sqrt(S_r): (d_out, rank) and sqrt(S_r) V_rᵀ: (rank, d_in) of a matrix.

    `iterations` are those of the randomized decomposition; with 0 it is the exact one.
    """
    with torch.no_grad():
        if iterations:
            width = min(rank + OVERSAMPLED, *weight.shape)
            u, s, v = torch.svd_lowrank(weight, q=width, niter=iterations)
            vh = v.T
        else:
            u, s, vh = torch.linalg.svd(weight, full_matrices=False)
        root = s[:rank].sqrt()
        return u[:, :rank] * root, root[:, None] * vh[:rank]


def empty_factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors of these shapes, to be filled from a file."""
    return weight.new_zeros(weight.shape[0], rank), weight.new_zeros(rank, weight.shape[1])


class Principal(LoRALayer):
    """The map (x, y) -> y + s (B A x - B0 A0 x)."""

    A0: Tensor
    B0: Tensor

    def __init__(
        self, weight: Tensor, rank: int, scale: float, dropout: float, iterations: int
    ) -> None:
        super().__init__(weight.shape[1], weight.shape[0], rank, scale, dropout)
        factors = (
            empty_factors(weight, rank) if skips_init() else principal(weight, rank, iterations)
        )
        # In one memory layout, so that both products round alike and cancel exactly at the start.
        left, right = ((f / scale**0.5).contiguous() for f in factors)
        self.register_buffer("A0", right)
        self.register_buffer("B0", left)
        with torch.no_grad():
            self.A.copy_(right)
            self.B.copy_(left)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: (..., d_in), y: (..., d_out) -> y' like y."""
        if self.training and self.dropout:
            x = F.dropout(x, self.dropout)
        now = F.linear(F.linear(x, cast(self.A, x)), cast(self.B, x))
        start = F.linear(F.linear(x, cast(self.A0, x)), cast(self.B0, x))
        return y + self.scale * (now - start).to(y.dtype)

    def factors(self) -> tuple[Tensor, Tensor] | None:
        """s [B, -B0]: (d_out, 2 rank) and [A; A0]: (2 rank, d_in)."""
        left = self.scale * torch.cat([self.B, -self.B0], dim=1)
        return left, torch.cat([self.A, self.A0])


@register_method
@dataclass(frozen=True)
class PiSSA(LoRA):
    """Low-rank updates that start as the principal components of the weight."""

    name = "pissa"
    paper = "Meng et al. 2024, https://arxiv.org/abs/2404.02948"
    summary = "lora that starts as the principal components of the weight"
    learning_rate = 5e-4

    alpha: float = option(8.0, "scale numerator: the update is multiplied by alpha / rank")
    iterations: int = option(8, "power iterations of the decomposition; 0: the exact one")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "alpha")
        require_between(self, 0, 100, "iterations")

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """One update a chosen projection.

        Raises:
            SiteError: a site that is no projection, whose weight cannot be read, or that has fewer
                components than the rank.
        """
        for site, rank in self.ranked(anatomy, "linear"):
            if rank > min(site.d_in, site.d_out):
                raise SiteError(
                    f"{self.name} cannot take {rank} components of the weight at {site.id}",
                    expected=f"a rank of at most {min(site.d_in, site.d_out)}",
                    hint=f"{self.name}(rank={min(site.d_in, site.d_out)})",
                )
            weight = read_weight(anatomy.model.get_submodule(site.host), site.part)
            module = Principal(weight, rank, self.scale(rank), self.dropout, self.iterations)
            yield Placement(site, module)
