"""LoRA-XS and TinyLoRA: a low-rank update between the principal components of the weight.

    W = U S V^T,   y = W x + B0 R A0 x,   B0 = U_r sqrt(S_r),   A0 = sqrt(S_r) V_r^T   (LoRA-XS)

    R = sum_i v_i P_i                                                            (TinyLoRA)

    x: (..., d_in)    A0: (rank, d_in), B0: (d_out, rank), fixed    R: (rank, rank)
    v: (numbers,), one for all sites    P: (numbers, rank, rank), fixed

LoRA-XS trains R, TinyLoRA a few numbers for the whole model, in the paper as few as 13, by
reinforcement learning. R and v are zero at first, so the initial update is zero. P
has normal numbers of deviation 1 / sqrt(rank), computed from the seed and the site. A0 and B0 are
saved with the adapter, since another decomposition of W may have other signs; with `stored: false`
they are not, and each loading decomposes W again, exactly and in fp64. The file then has only
trained values, and the backbone must be loaded in the same precision.

Parameters: rank² per site for LoRA-XS; `numbers` in all for TinyLoRA.

Bałazy et al. 2024, "LoRA-XS: Low-Rank Adaptation with Extremely Small Number of Parameters",
section 3, https://arxiv.org/abs/2405.17604; Morris et al. 2026, "Learning to Reason in 13
Parameters", https://arxiv.org/abs/2602.04118.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.methods.common.base import Placement, register_method
from adapterhub.methods.common.generated import normal
from adapterhub.methods.common.ops import FactorModule, cast, stack_low_rank
from adapterhub.methods.common.projections import RankMethod, require_components, weight_at
from adapterhub.methods.common.site_module import SharedModule, init_is_skipped
from adapterhub.methods.pissa import empty_factors, largest_components

Powers = tuple[float, float]


def decomposed(weight: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest components of W, with the largest entry of each column of U above 0.

    They are computed in fp64, so that each loading has the same; zeros for a tensor without values.

    Returns:
        U: (d_out, rank), S: (rank,) and V^T: (rank, d_in), in fp32.
    """
    if weight.is_meta:
        left, right = empty_factors(weight, rank)
        return left, weight.new_zeros(rank), right
    u, s, vh = largest_components(weight.double(), rank, 0)
    signs = u.gather(0, u.abs().argmax(0, keepdim=True)).sign()
    return (u * signs).float(), s.float(), (vh * signs.T).float()


def components(
    weight: Tensor, rank: int, needed: bool, powers: Powers = (0.5, 0.5)
) -> tuple[Tensor, Tensor]:
    """Return U_r S_r^p and S_r^q V_r^T of `decomposed`; `powers` are p and q.

    If they are not `needed`, since a file has them, zeros.
    """
    if not needed:
        return empty_factors(weight, rank)
    u, s, vh = decomposed(weight, rank)
    left, right = u * s ** powers[0], vh * (s ** powers[1])[:, None]
    return left.contiguous(), right.contiguous()


class CoreUpdate(FactorModule):
    """The map (x, y) -> y + B0 R A0 x, with fixed A0 and B0."""

    powers: ClassVar[Powers] = (0.5, 0.5)
    A0: Tensor
    B0: Tensor

    def __init__(self, weight: Tensor, rank: int, stored: bool) -> None:
        super().__init__()
        needed = not (stored and init_is_skipped())
        left, right = components(weight, rank, needed, self.powers)
        self.register_buffer("A0", right, persistent=stored)
        self.register_buffer("B0", left, persistent=stored)

    def core(self) -> Tensor:
        """Return R: (rank, rank)."""
        raise NotImplementedError

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return B0 R: (d_out, rank) and A0: (rank, d_in)."""
        return self.B0 @ cast(self.core(), self.B0), self.A0


class FreeCore(CoreUpdate):
    """The map (x, y) -> y + B0 R A0 x, of LoRA-XS."""

    stack = staticmethod(stack_low_rank)

    def __init__(self, weight: Tensor, rank: int, stored: bool) -> None:
        super().__init__(weight, rank, stored)
        self.R = nn.Parameter(torch.zeros(rank, rank))

    def core(self) -> Tensor:
        """Return R: (rank, rank)."""
        return self.R


class SharedNumbers(SharedModule):
    """The numbers v, shared by all sites."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.zeros(count))


class DrawnCore(CoreUpdate):
    """The map (x, y) -> y + B0 (sum_i v_i P_i) A0 x, of TinyLoRA."""

    stack = staticmethod(stack_low_rank)
    P: Tensor

    def __init__(
        self, weight: Tensor, rank: int, stored: bool, matrices: Tensor, shared: SharedNumbers
    ) -> None:
        super().__init__(weight, rank, stored)
        self.register_buffer("P", matrices, persistent=False)
        self.shared = [shared]  # in a list it is not a child module

    def core(self) -> Tensor:
        """Return the sum: (rank, rank)."""
        v = self.shared[0].v.to(self.P.device)
        core: Tensor = torch.tensordot(v, self.P, 1)
        return core


@dataclass(frozen=True)
class CoreMethod(RankMethod):
    """Updates between the principal components of weights."""

    stored: bool = option(True, "the components are in the file")

    def decomposes_again(self) -> bool:
        """Return whether the file lacks the components."""
        return not self.stored


@register_method
@dataclass(frozen=True)
class LoRAXS(CoreMethod):
    """Small square updates between the principal components of weights."""

    name = "lora-xs"
    paper = "Bałazy et al. 2024, https://arxiv.org/abs/2405.17604"
    summary = "small square updates between the principal components of weights"
    learning_rate = 1e-3

    rank: int = option(16, "number of components", least=1)

    @classmethod
    def example(cls) -> LoRAXS:
        """Return the method with few components, for narrow projections."""
        return cls(rank=4)

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> FreeCore:
        """Return the update of one site."""
        require_components(self, site, rank)
        return FreeCore(weight_at(site, anatomy), rank, self.stored)

    def size(self, site: Site, rank: int) -> int:
        """Return rank²."""
        return rank * rank


@register_method
@dataclass(frozen=True)
class TinyLoRA(CoreMethod):
    """A few numbers for the whole model, between the principal components of weights."""

    sized_by = "numbers"
    name = "tinylora"
    paper = "Morris et al. 2026, https://arxiv.org/abs/2602.04118"
    summary = "a few numbers for the whole model, between principal components"
    learning_rate = 1e-2

    rank: int = option(2, "number of components", least=1)
    numbers: int = option(13, "trained numbers, in all", least=1)
    seed: int = option(0, "number that P is computed from")

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """Yield one update per selected projection, with the same numbers."""
        shared = SharedNumbers(self.numbers)
        for number, (site, rank) in enumerate(self.ranks_by_site(anatomy).items()):
            require_components(self, site, rank)
            shape = (self.numbers, rank, rank)
            matrices = normal(f"tinylora.{site.id}", self.seed, shape, rank**-0.5)
            module = DrawnCore(weight_at(site, anatomy), rank, self.stored, matrices, shared)
            if number == 0:
                module.numbers = shared
            yield Placement(site, module)

    def count(self, anatomy: Anatomy) -> int:
        """Return the number of numbers."""
        self.ranks_by_site(anatomy)
        return self.numbers
