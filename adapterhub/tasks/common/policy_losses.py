"""Losses of group relative policy optimization, on texts that the model generated for prompts.

    r = p(token) / p_old(token)          p: the model; p_old: the model that generated the texts
    A = (R - mean(R)) / (std(R) + 1e-4)  over the rewards R of the texts for one prompt
    L = -min(r A, clip(r, 1 - e, 1 + e') A) + beta r (q/p - log(q/p) - 1)

for each token of a text; q is the probability under the model with the adapter off, and the last
term estimates the divergence KL(p || q) without bias (Schulman 2020,
http://joschu.net/blog/kl-approx.html). Shao et al. 2024, equations 3 and 4,
https://arxiv.org/abs/2402.03300, without the factor r of the divergence (`kl_ratio=false`), which
makes the gradient unbiased, too (DeepSeek-AI 2025, https://arxiv.org/abs/2512.02556). The losses
differ in their mean over tokens:

    grpo      over the tokens of each text, then over texts
    bnpo      over the tokens of all texts of a batch
    dapo      over the tokens of all texts of a step (Yu et al. 2025, equation 8,
              https://arxiv.org/abs/2503.14476)
    dr_grpo   the sum over tokens, divided by the texts times `new_tokens`: neither short nor long
              texts have larger gradients (Liu et al. 2025, section 3,
              https://arxiv.org/abs/2503.20783)

With `importance=sequence`, r is one number for each text, the geometric mean over its tokens (Zheng
et al. 2025, equation 7, https://arxiv.org/abs/2507.18071).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from adapterhub.config.options import option
from adapterhub.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

LossType = Literal["dapo", "grpo", "bnpo", "dr_grpo"]
Scale = Literal["group", "batch", "none"]
STD_FLOOR = 1e-4  # added to the standard deviation of rewards, as in trl


@dataclass(frozen=True)
class PolicyOptions:
    """The options of the loss."""

    loss_type: LossType = option("dapo", "the mean over tokens")
    beta: float = option(0.0, "how much the divergence from the model with the adapter off costs")
    kl_ratio: bool = option(True, "multiply the divergence by the ratio of probabilities")
    epsilon: float = option(0.2, "how far the ratio of probabilities may fall below 1")
    epsilon_high: float | None = option(
        None, "how far the ratio may rise above 1 (null: by epsilon)"
    )
    scale_rewards: Scale = option(
        "group", "divide by the deviation of the rewards of a group, of the batch, or not"
    )
    importance: Literal["token", "sequence"] = option("token", "ratios of tokens or whole texts")
    iterations: int = option(1, "optimizer steps on each batch of texts")
    mask_truncated: bool = option(False, "ignore texts that reached new_tokens without an end")

    def check_loss(self) -> None:
        """Check the ranges of the options.

        Raises:
            ConfigError: an option is out of range.
        """
        numbers = (self.beta, self.epsilon, self.upper)
        if not all(math.isfinite(n) and n >= 0 for n in numbers) or not 0 < self.epsilon < 1:
            raise ConfigError(
                f"beta is {self.beta}, epsilon is {self.epsilon}, epsilon_high is {self.upper}",
                expected="beta of 0 or more, epsilon between 0 and 1, epsilon_high of 0 or more",
            )
        if not 1 <= self.iterations <= 1000:
            raise ConfigError(f"iterations is {self.iterations}", expected="1 to 1000")

    @property
    def upper(self) -> float:
        """How far the ratio may rise above 1."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


@dataclass(frozen=True)
class Sampled:
    """The generated texts of a batch: log probabilities of their tokens, (texts, tokens).

    policy, old, reference: under the model, the model that generated them, and the model with the
    adapter off; `old` is None if it is the model, and `reference` None without beta. advantages:
    (texts,). mask: 1 at tokens of the texts, 0 elsewhere, (texts, tokens).
    """

    policy: Tensor
    advantages: Tensor
    mask: Tensor
    old: Tensor | None = None
    reference: Tensor | None = None


@dataclass(frozen=True)
class PolicyLoss:
    """The loss, the mean divergence from the reference, and the share of clipped tokens."""

    loss: Tensor
    divergence: Tensor | None
    clipped: Tensor


def advantages_of(rewards: Tensor, scale: Scale) -> Tensor:
    """Return the advantages of texts over the others for the same prompt, (prompts, texts).

    rewards: (prompts, texts), NaN for texts that were not scored; their advantage is 0.
    """
    advantages = _centered(rewards)
    if scale != "none":
        compared = advantages if scale == "group" else _centered(rewards.reshape(1, -1))
        advantages = advantages / (_deviation(compared) + STD_FLOOR)
    return advantages.nan_to_num(nan=0.0)


def deviations_of(rewards: Tensor) -> Tensor:
    """Return the standard deviation of the rewards for each prompt, (prompts,).

    rewards: (prompts, texts), NaN for texts that were not scored.
    """
    return _deviation(_centered(rewards)).squeeze(1)


def _centered(values: Tensor) -> Tensor:
    """Return the values minus the mean of their row without NaN; exactly 0 where all are equal."""
    import torch

    known = values.isfinite()
    first = values.gather(1, known.int().argmax(1, keepdim=True))
    values = values - torch.where(known.any(1, keepdim=True), first, 0)
    return values - values.nanmean(1, keepdim=True)


def _deviation(centered: Tensor) -> Tensor:
    """Return the unbiased standard deviation of each row of centered values, (rows, 1)."""
    count = centered.isfinite().sum(1, keepdim=True)
    squares = centered.nan_to_num(nan=0.0) ** 2
    return (squares.sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()


def policy_loss(sampled: Sampled, options: PolicyOptions, longest: int) -> PolicyLoss:
    """Return the loss of a batch; `longest` is the length that texts may reach, in tokens.

    With `dapo` it is a mean over the tokens of the batch, which the engine weights by their number.
    """
    import torch

    policy, mask = sampled.policy, sampled.mask
    old = policy.detach() if sampled.old is None else sampled.old
    ratio = policy - old
    if options.importance == "sequence":
        ratio = ((ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1))[:, None]
    ratio, advantages = ratio.exp(), sampled.advantages[:, None]
    bounded = ratio.clamp(1 - options.epsilon, 1 + options.upper)
    losses = -torch.min(ratio * advantages, bounded * advantages)
    divergence = None
    if options.beta and sampled.reference is not None:
        distance = sampled.reference - policy
        divergences = distance.exp() - distance - 1
        losses = losses + options.beta * divergences * (ratio if options.kl_ratio else 1)
        divergence = _mean(divergences.detach(), mask)
    with torch.no_grad():
        below = (ratio < 1 - options.epsilon) & (advantages < 0)
        above = (ratio > 1 + options.upper) & (advantages > 0)
        clipped = _mean((below | above).float().expand_as(mask), mask)
    return PolicyLoss(_reduced(losses * mask, mask, options, longest), divergence, clipped)


def _reduced(losses: Tensor, mask: Tensor, options: PolicyOptions, longest: int) -> Tensor:
    """Return the mean of the losses of tokens, (texts, tokens), by the type of the loss."""
    if options.loss_type == "grpo":
        return (losses.sum(-1) / mask.sum(-1).clamp(min=1)).mean()
    if options.loss_type == "dr_grpo":
        return losses.sum() / (len(losses) * longest)
    return losses.sum() / mask.sum().clamp(min=1)


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1)
