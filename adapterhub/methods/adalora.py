"""AdaLoRA: low-rank updates in the form of an SVD, which share a budget of rank.

    y = W x + s B (E * A) x,   s = alpha / (rank + 1e-5)                            (equation 3)

    x: (..., d_in)    A: (rank, d_in)    E: (rank,), zero    B: (d_out, rank)

E is zero at first, so the initial update is zero; A and B are normal with a deviation of 0.02. The
importance of component i, from running means of |w dL/dw| and of their deviation from that mean:

    I_i = S(E_i) + mean_j S(A_ij) + mean_j S(B_ji),   S = mean * deviation      (equations 7 to 11)

After each step the components of all sites with the largest I stay, and E of the others is zero.
How many falls from `rank` to `target` for each site on average, as the cube of the remaining share
of the time between the first `warmup` of a run and its last `final`, where they no longer change.
The penalty that keeps A and B orthogonal is the mean of ||A Aᵀ - I|| and ||Bᵀ B - I|| over the
sites, times `orthogonality`, as in the authors' code. Files have all components, including zeros,
and no `target`: a loaded adapter keeps its components.

Parameters: rank (d_in + d_out + 1) per site.

Zhang et al. 2023, "AdaLoRA: Adaptive Budget Allocation for Parameter-Efficient Fine-Tuning",
section 3, https://arxiv.org/abs/2303.10512.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.errors import ConfigError
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.ops import FactorModule, orthogonality_loss, stack_low_rank
from adapterhub.methods.common.projections import RankMethod

_ROUNDING = 1e-9  # of a share such as 1 - 0.9


class SingularUpdate(FactorModule):
    """The map (x, y) -> y + s B (E * A) x, and the importance of its components."""

    stack = staticmethod(stack_low_rank)

    def __init__(self, site: Site, rank: int, scale: float, allocated: bool) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.empty(rank, site.d_in))
        self.E = nn.Parameter(torch.zeros(rank))
        self.B = nn.Parameter(torch.empty(site.d_out, rank))
        for factor in (self.A, self.B):
            nn.init.normal_(factor, std=0.02)
        self.scale = scale
        for name, parameter in [*self.named_parameters()] if allocated else ():
            for kind in ("mean", "deviation"):
                self.register_buffer(f"{name}_{kind}", torch.zeros_like(parameter))

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return s B: (d_out, rank) and E * A: (rank, d_in)."""
        return self.scale * self.B, self.E[:, None] * self.A

    def remember(self, beta1: float, beta2: float) -> None:
        """Update the running means from the gradients of a step."""
        for name, parameter in self.named_parameters():
            mean, deviation = self.get_buffer(f"{name}_mean"), self.get_buffer(f"{name}_deviation")
            if parameter.grad is not None:
                sensitivity = (parameter * parameter.grad).abs()
                mean.lerp_(sensitivity, 1 - beta1)
                deviation.lerp_((sensitivity - mean).abs(), 1 - beta2)

    def importance(self) -> Tensor:
        """Return the importance of each component: (rank,)."""
        own = dict(self.named_buffers())
        a, e, b = (own[f"{name}_mean"] * own[f"{name}_deviation"] for name in ("A", "E", "B"))
        return e + a.mean(1) + b.mean(0)

    def inference_form(self) -> SingularUpdate:
        """Return the module without the running means."""
        plain = copy.copy(self)
        plain._buffers = {}
        return plain


@register_method
@dataclass(frozen=True)
class AdaLoRA(RankMethod):
    """Low-rank updates that share a budget of rank, given to the most important components."""

    name = "adalora"
    paper = "Zhang et al. 2023, https://arxiv.org/abs/2303.10512"
    summary = "low-rank updates that share a budget of rank by importance"
    learning_rate = 1e-3
    training_options = ("target", "warmup", "final", "orthogonality", "beta1", "beta2")

    rank: int = option(12, "rank of each update at first", least=1)
    alpha: float = option(16.0, "numerator of the scale: updates are multiplied by alpha / rank")
    target: int | None = option(
        8, "average rank at the end (null: the components stay as they are)", least=1
    )
    warmup: float = option(0.1, "share of the run before the ranks fall", least=0, most=1)
    final: float = option(0.5, "share of the run after they have fallen", least=0, most=1)
    orthogonality: float = option(0.5, "weight of the penalty on A and B", least=0)
    beta1: float = option(0.85, "decay rate of the mean of |w dL/dw|", least=0, most=1)
    beta2: float = option(0.85, "decay rate of its deviation", least=0, most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup + self.final >= 1:
            raise ConfigError(
                f"adalora has no time to lower the ranks: warmup is {self.warmup:g} and final "
                f"{self.final:g} of the run",
                expected="a sum below 1",
                hint="adalora(warmup=0.1, final=0.5)",
            )

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> SingularUpdate:
        """Return the update of one site; all have the scale of the first rank."""
        scale = self.alpha / (self.rank + 1e-5)
        return SingularUpdate(site, rank, scale, allocated=self.target is not None)

    def size(self, site: Site, rank: int) -> int:
        """Return rank (d_in + d_out + 1)."""
        return rank * (site.d_in + site.d_out + 1)

    def penalty(self, modules: Sequence[SingularUpdate]) -> Tensor:
        """Return the mean of ||A Aᵀ - I|| and ||Bᵀ B - I||, times `orthogonality`."""
        return self.orthogonality * orthogonality_loss((m.A, m.B) for m in modules)

    def stepped(self, modules: Sequence[SingularUpdate], done: float) -> None:
        """Update the importance, and set E of the components without budget to zero."""
        if self.target is None:
            return
        if done <= 1 - self.final + _ROUNDING:
            for module in modules:
                module.remember(self.beta1, self.beta2)
        if done <= self.warmup:
            return
        ranks = [len(module.E) for module in modules]
        importance = torch.cat([module.importance() for module in modules])
        best = importance.topk(self.budget(sum(ranks), len(modules), done)).indices
        kept = torch.zeros_like(importance).index_fill_(0, best, 1)
        for module, own in zip(modules, torch.split(kept, ranks), strict=True):
            module.E.mul_(own)

    def budget(self, first: int, sites: int, done: float) -> int:
        """Return the number of the `first` components kept at a share of the run."""
        last = min((self.target or 0) * sites, first)
        left = max(0.0, 1 - (done - self.warmup) / (1 - self.final - self.warmup))
        return int(last + (first - last) * left**3 + _ROUNDING)

    def ready(self, done: float) -> bool:
        """Return whether the ranks have fallen."""
        return self.target is None or done >= 1 - self.final - _ROUNDING

    def inference_form(self) -> AdaLoRA:
        """Return the method without a budget."""
        return replace(self, target=None)
