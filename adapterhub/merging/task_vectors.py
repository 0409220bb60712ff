"""Task vectors: the changes that training made to parameters, and rules to combine them.

A task vector is tau_i = theta_i - theta_0. The functions here combine the task vectors of one
backbone parameter, tensors of its shape; w_i are weights, k is the density.

    linear      tau = sum_i w_i tau_i                         Ilharco et al. 2023, section 2
    ties        trim:   tau_i keeps its k largest magnitudes, the rest is 0
                elect:  g = sign(sum_i tau_i), elementwise
                merge:  tau = mean over {i: sign(tau_i) = g} of w_i tau_i
                                                              Yadav et al. 2023, algorithm 1
    dare        tau_i = m * tau_i / k,  m ~ Bernoulli(k);  then linear
    dare-ties   the same drop and rescale; then elect and merge    Yu et al. 2024, section 3

With linear, weights (1, 1) add two tasks, and (-1) forgets one. Each parameter is trimmed
separately, as in peft and mergekit; the paper trims the whole model's task vector.

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
    """Set all entries to 0 but the share `density` with the largest magnitudes."""
    count = int(density * tau.numel())
    mask = torch.zeros_like(tau).flatten()
    mask[tau.abs().flatten().topk(count).indices] = 1
    return tau * mask.view_as(tau)


def drop(tau: Tensor, density: float, generator: torch.Generator) -> Tensor:
    """Set entries to 0 with probability 1 - density, and rescale the others.

    The expected value does not change.

    `density` is the probability that an entry is kept.
    """
    mask = torch.rand(tau.shape, generator=generator) < density
    return tau * mask.to(tau.device) / density


def weighted_sum(taus: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Compute sum_i w_i tau_i."""
    return sum((w * tau for w, tau in zip(weights, taus, strict=True)), torch.zeros_like(taus[0]))


def elect_and_merge(taus: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Compute the mean of the weighted entries that have the same sign as the sum of all.

    A sum of 0 counts as positive; entries of 0 have no sign.
    """
    positive = sum(taus, torch.zeros_like(taus[0])) >= 0
    agree = [torch.where(positive, tau > 0, tau < 0) for tau in taus]
    total = weighted_sum([tau * mask for tau, mask in zip(taus, agree, strict=True)], weights)
    return total / torch.stack(agree).sum(0).clamp(min=1)


def linear_combination(
    taus: Sequence[Tensor], weights: Sequence[float], density: float, generator: torch.Generator
) -> Tensor:
    """Combine by task arithmetic."""
    return weighted_sum(taus, weights)


def ties(
    taus: Sequence[Tensor], weights: Sequence[float], density: float, generator: torch.Generator
) -> Tensor:
    """Combine by TIES: trim, elect, merge.

    `density` is the share of entries to keep.
    """
    return elect_and_merge([trim(tau, density) for tau in taus], weights)


def dare(
    taus: Sequence[Tensor], weights: Sequence[float], density: float, generator: torch.Generator
) -> Tensor:
    """Combine by DARE: drop and rescale, then task arithmetic.

    `density` is the probability that an entry is kept.
    """
    return weighted_sum([drop(tau, density, generator) for tau in taus], weights)


def dare_ties(
    taus: Sequence[Tensor], weights: Sequence[float], density: float, generator: torch.Generator
) -> Tensor:
    """Combine by DARE and TIES: drop and rescale, then elect and merge.

    `density` is the probability that an entry is kept.
    """
    return elect_and_merge([drop(tau, density, generator) for tau in taus], weights)


COMBINE: Mapping[str, Combine] = {
    "linear": linear_combination,
    "ties": ties,
    "dare": dare,
    "dare-ties": dare_ties,
}


def low_rank(delta: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Approximate a matrix by the nearest one of a rank, as a product (d_out, rank) (rank, d_in).

    These are the first singular components (Eckart & Young 1936); each factor gets the square root
    of the singular values.
    """
    u, s, vh = torch.linalg.svd(delta, full_matrices=False)
    root = s[:rank].sqrt()
    return u[:, :rank] * root, root[:, None] * vh[:rank]
