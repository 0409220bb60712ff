"""Task vectors: what training changed, and how several such changes become one.

A task vector is tau_i = theta_i - theta_0, parameter by parameter. Here each is one tensor, that of
one parameter of the backbone; w_i are weights, k the density.

    linear      tau = sum_i w_i tau_i                         Ilharco et al. 2023, section 2
    ties        trim:   tau_i keeps its k largest magnitudes, the rest is 0
                elect:  g = sign(sum_i tau_i), elementwise
                merge:  tau = sum over {i: sign(tau_i) = g} of w_i tau_i, over their number
                                                              Yadav et al. 2023, algorithm 1
    dare        tau_i = m * tau_i / k,  m ~ Bernoulli(k);  then linear
    dare-ties   the same drop and rescale; then elect and merge    Yu et al. 2024, section 3

With linear, weights (1, 1) add two tasks, and (-1) forgets one. Trimming is by parameter, as peft
and mergekit do it; the paper trims a task vector as a whole.

Ilharco et al., "Editing Models with Task Arithmetic", https://arxiv.org/abs/2212.04089.
Yadav et al., "TIES-Merging: Resolving Interference When Merging Models",
https://arxiv.org/abs/2306.01708. Yu et al., "Language Models are Super Mario: Absorbing Abilities
from Homologous Models as a Free Lunch", https://arxiv.org/abs/2311.03099.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Combine = Callable[[Sequence[Tensor], Sequence[float], float, torch.Generator], Tensor]


def trim(tau: Tensor, density: float) -> Tensor:
    """The share `density` of entries of the largest magnitude; the others are 0."""
    kept = int(density * tau.numel())
    mask = torch.zeros_like(tau).flatten()
    mask[tau.abs().flatten().topk(kept).indices] = 1
    return tau * mask.view_as(tau)


def drop(tau: Tensor, density: float, generator: torch.Generator) -> Tensor:
    """Each entry with probability `density`, over it, else 0: the expected value stays."""
    mask = torch.rand(tau.shape, generator=generator) < density
    return tau * mask.to(tau.device) / density


def weighted_sum(taus: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum_i w_i tau_i."""
    return sum((w * tau for w, tau in zip(weights, taus, strict=True)), torch.zeros_like(taus[0]))


def elect_and_merge(taus: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The mean of the weighted entries whose sign is that of the sum of all. A sum of 0 counts as
    positive, an entry of 0 has no sign."""
    positive = sum(taus, torch.zeros_like(taus[0])) >= 0
    agree = [torch.where(positive, tau > 0, tau < 0) for tau in taus]
    total = weighted_sum([tau * yes for tau, yes in zip(taus, agree, strict=True)], weights)
    return total / torch.stack(agree).sum(0).clamp(min=1)


def linear_combination(
    taus: Sequence[Tensor], weights: Sequence[float], density: float, generator: torch.Generator
) -> Tensor:
    """Task arithmetic; the density plays no part."""
    return weighted_sum(taus, weights)


def ties(
    taus: Sequence[Tensor], weights: Sequence[float], density: float, generator: torch.Generator
) -> Tensor:
    """Trim, elect, merge."""
    return elect_and_merge([trim(tau, density) for tau in taus], weights)


def dare(
    taus: Sequence[Tensor], weights: Sequence[float], density: float, generator: torch.Generator
) -> Tensor:
    """Drop and rescale, then task arithmetic."""
    return weighted_sum([drop(tau, density, generator) for tau in taus], weights)


def dare_ties(
    taus: Sequence[Tensor], weights: Sequence[float], density: float, generator: torch.Generator
) -> Tensor:
    """Drop and rescale, then elect and merge."""
    return elect_and_merge([drop(tau, density, generator) for tau in taus], weights)


COMBINE: Mapping[str, Combine] = {
    "linear": linear_combination,
    "ties": ties,
    "dare": dare,
    "dare-ties": dare_ties,
}


def low_rank(delta: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The nearest matrix of this rank, as a product: (d_out, rank) and (rank, d_in).

    Eckart & Young 1936: the first singular components, here with their root in either factor.
    """
    u, s, vh = torch.linalg.svd(delta, full_matrices=False)
    root = s[:rank].sqrt()
    return u[:, :rank] * root, root[:, None] * vh[:rank]
