"""Losses of preference tuning, by the names of trl; a new loss is one function in this file.

Symbols in the equations, for each row of a batch:

    log p_c, log p_r    log probabilities of the chosen and of the rejected response
    c, r                log p_c - log q_c and log p_r - log q_r, where q is the reference
    z                   beta (c - r)
    |c|, |r|            the numbers of tokens of the responses
    e                   `label_smoothing`, the probability that a label is wrong
    s, S                the logistic function, and its logarithm

Losses of *rated* responses read rows with one response and a mark: liked or disliked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from adapterhub.config.options import option
from adapterhub.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

LossType = Literal[
    "dpo", "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard",
    "aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sigmoid_norm", "sft",
    "orpo", "cpo", "simpo", "kto", "apo_zero_unpaired",
]  # fmt: skip

DISCOPOP_TEMPERATURE = 0.05  # Lu et al. 2024, section 4


@dataclass(frozen=True)
class Responses:
    """The responses of a batch.

    policy, reference: log probabilities under the model and under the reference, (batch, 2), for
    the chosen and the rejected response. Of rated responses the second column has the prompt with
    the response of another row. tokens: their lengths, (batch, 2). liked: booleans, (batch,).
    """

    policy: Tensor
    reference: Tensor
    tokens: Tensor
    liked: Tensor | None = None

    @property
    def ratios(self) -> Tensor:
        """Return the log probabilities minus those of the reference: (batch, 2)."""
        return self.policy - self.reference


@dataclass(frozen=True)
class LossOptions:
    """The options of preference tuning that losses read."""

    loss_type: LossType = option(
        "dpo", "the loss, by its name in trl; kto and apo_zero_unpaired read rated responses"
    )
    beta: float = option(0.1, "how much the distance from the reference costs (orpo: lambda)")
    label_smoothing: float = option(0.0, "the probability that a label is wrong")
    gamma: float = option(0.5, "the margin between both rewards (simpo)")
    sft_weight: float | None = option(
        None, "add this much of the chosen responses' next-token loss; by default 1 for cpo, else 0"
    )
    desirable_weight: float = option(1.0, "the weight of liked responses (rated responses)")
    undesirable_weight: float = option(1.0, "the weight of disliked responses (rated responses)")

    def check_loss(self) -> None:
        """Check that the options fit the loss.

        Raises:
            ConfigError: a number is out of range, or the loss does not read an option.
        """
        if not self.beta > 0 or not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                f"beta is {self.beta}, label_smoothing is {self.label_smoothing}",
                expected="beta above 0, and label_smoothing from 0 to less than 0.5",
            )
        weights = (self.sft_weight or 0.0, self.desirable_weight, self.undesirable_weight)
        if not all(math.isfinite(w) and w >= 0 for w in weights):
            raise ConfigError(
                "sft_weight, desirable_weight and undesirable_weight are "
                f"{self.sft_weight}, {self.desirable_weight} and {self.undesirable_weight}",
                expected="weights of 0 or more",
            )
        if self.label_smoothing and not self.kind.smoothing:
            raise ConfigError(
                f"the loss {self.loss_type} does not read label_smoothing",
                expected="label_smoothing=0, or one of "
                + ", ".join(name for name, each in LOSSES.items() if each.smoothing),
            )
        if self.loss_type == "exo_pair" and not self.label_smoothing:
            raise ConfigError(
                "the loss exo_pair is infinite without label_smoothing",
                expected="a label_smoothing above 0, such as 0.001",
            )
        if self.sft_weight and self.rated:
            raise ConfigError(
                f"sft_weight is {self.sft_weight}, and {self.loss_type} reads rated responses",
                expected="no sft_weight, or a loss of pairs",
            )

    @property
    def kind(self) -> PreferenceLoss:
        """The loss and what it reads."""
        return LOSSES[self.loss_type]

    @property
    def rated(self) -> bool:
        """Whether rows are rated responses."""
        return self.kind.rated


@dataclass(frozen=True)
class PreferenceLoss:
    """A loss of each row, and what it reads.

    compute: maps responses and options to losses, (batch,). reference: it compares with the
    reference. rated: it reads rated responses. smoothing: it reads `label_smoothing`. per_token:
    rewards without a reference are means over tokens. sft_weight: the default weight of the
    next-token loss of the chosen responses.
    """

    compute: Callable[[Responses, LossOptions], Tensor]
    reference: bool = True
    rated: bool = False
    smoothing: bool = False
    per_token: bool = False
    sft_weight: float = 0.0


def _delta(responses: Responses) -> Tensor:
    """Return c - r."""
    ratios = responses.ratios
    return ratios[:, 0] - ratios[:, 1]


def _smoothed(z: Tensor, smoothing: float) -> Tensor:
    """Return -(1 - e) S(z) - e S(-z).

    Mitchell 2023, equation 3, https://ericmitchell.ai/cdpo.pdf.
    """
    import torch.nn.functional as F

    return -(1 - smoothing) * F.logsigmoid(z) - smoothing * F.logsigmoid(-z)


def dpo(responses: Responses, options: LossOptions) -> Tensor:
    """Return the loss of direct preference optimization, -(1 - e) S(z) - e S(-z).

    Rafailov et al. 2023, equation 7, https://arxiv.org/abs/2305.18290.
    """
    return _smoothed(options.beta * _delta(responses), options.label_smoothing)


def hinge(responses: Responses, options: LossOptions) -> Tensor:
    """Return max(0, 1 - z).

    Zhao et al. 2023, https://arxiv.org/abs/2305.10425, with the reference of DPO.
    """
    return (1 - options.beta * _delta(responses)).relu()


def ipo(responses: Responses, options: LossOptions) -> Tensor:
    """Return the loss of identity preference optimization, (c/|c| - r/|r| - 1/(2 beta))^2.

    Azar et al. 2023, equation 17, https://arxiv.org/abs/2310.12036. As in trl, log probabilities
    are means over the tokens of a response; its authors computed their results this way. beta is
    tau in the paper, the strength of the regularization.
    """
    means = responses.ratios / responses.tokens
    squared: Tensor = (means[:, 0] - means[:, 1] - 1 / (2 * options.beta)) ** 2
    return squared


def exo_pair(responses: Responses, options: LossOptions) -> Tensor:
    """Return the reverse divergence of the labels, KL((s(z), s(-z)) || (1 - e, e)).

    Ji et al. 2024, equation 16, https://arxiv.org/abs/2402.00856. It requires e > 0.
    """
    import torch.nn.functional as F

    z, e = options.beta * _delta(responses), options.label_smoothing
    right = z.sigmoid() * (F.logsigmoid(z) - math.log1p(-e))
    return right + (-z).sigmoid() * (F.logsigmoid(-z) - math.log(e))


def nca_pair(responses: Responses, options: LossOptions) -> Tensor:
    """Return the loss of noise contrastive alignment, -S(beta c) - (S(-beta c) + S(-beta r)) / 2.

    Chen et al. 2024, equation 13, https://arxiv.org/abs/2402.05369.
    """
    import torch.nn.functional as F

    rewards = options.beta * responses.ratios
    return -F.logsigmoid(rewards[:, 0]) - F.logsigmoid(-rewards).mean(-1)


def robust(responses: Responses, options: LossOptions) -> Tensor:
    """Return the loss that is unbiased for wrong labels, (-(1 - e) S(z) + e S(-z)) / (1 - 2 e).

    Chowdhury et al. 2024, equation 11, https://arxiv.org/abs/2403.00409.
    """
    import torch.nn.functional as F

    z, e = options.beta * _delta(responses), options.label_smoothing
    return (-(1 - e) * F.logsigmoid(z) + e * F.logsigmoid(-z)) / (1 - 2 * e)


def bco_pair(responses: Responses, options: LossOptions) -> Tensor:
    """Return the loss of a binary classifier of responses, -S(beta c) - S(-beta r).

    Jung et al. 2024, https://arxiv.org/abs/2404.04656, without the shift of rewards, as in trl.
    """
    import torch.nn.functional as F

    rewards = options.beta * responses.ratios
    return -F.logsigmoid(rewards[:, 0]) - F.logsigmoid(-rewards[:, 1])


def sppo_hard(responses: Responses, options: LossOptions) -> Tensor:
    """Return the loss of self-play with certain labels, (c - 1/(2 beta))^2 + (r + 1/(2 beta))^2.

    Wu et al. 2024, equation 4.7, https://arxiv.org/abs/2405.00675.
    """
    ratios, aim = responses.ratios, 0.5 / options.beta
    squares: Tensor = (ratios[:, 0] - aim) ** 2 + (ratios[:, 1] + aim) ** 2
    return squares


def aot(responses: Responses, options: LossOptions) -> Tensor:
    """Return the loss of sorted differences: those of the model dominate those of the reference.

        z = beta (sort(log p_c - log p_r) - sort(log q_c - log q_r)), over the rows of the batch

    Melnyk et al. 2024, https://arxiv.org/abs/2406.05882.
    """
    ours = (responses.policy[:, 0] - responses.policy[:, 1]).sort().values
    theirs = (responses.reference[:, 0] - responses.reference[:, 1]).sort().values
    return _smoothed(options.beta * (ours - theirs), options.label_smoothing)


def aot_unpaired(responses: Responses, options: LossOptions) -> Tensor:
    """Return the loss of sorted ratios: chosen responses dominate rejected ones, whatever the pair.

        z = beta (sort(c) - sort(r)), over the rows of the batch

    Melnyk et al. 2024, https://arxiv.org/abs/2406.05882.
    """
    ratios = responses.ratios.sort(dim=0).values
    return _smoothed(options.beta * (ratios[:, 0] - ratios[:, 1]), options.label_smoothing)


def apo_zero(responses: Responses, options: LossOptions) -> Tensor:
    """Return s(-beta c) + s(beta r), for chosen responses that are better than the model's.

    D'Oosterlinck et al. 2024, equation 7, https://arxiv.org/abs/2408.06266.
    """
    rewards = options.beta * responses.ratios
    return (-rewards[:, 0]).sigmoid() + rewards[:, 1].sigmoid()


def apo_down(responses: Responses, options: LossOptions) -> Tensor:
    """Return s(beta c) + s(-z), for chosen responses that are worse than the model's.

    D'Oosterlinck et al. 2024, equation 8, https://arxiv.org/abs/2408.06266.
    """
    rewards = options.beta * responses.ratios
    return rewards[:, 0].sigmoid() + (rewards[:, 1] - rewards[:, 0]).sigmoid()


def discopop(responses: Responses, options: LossOptions) -> Tensor:
    """Return the discovered mixture of a logistic and an exponential loss.

        -(1 - m) S(z) + m exp(-z), m = sigmoid(z / 0.05)

    Lu et al. 2024, equation 5, https://arxiv.org/abs/2406.08414.
    """
    import torch.nn.functional as F

    z = options.beta * _delta(responses)
    mixed = (z / DISCOPOP_TEMPERATURE).sigmoid()
    return -(1 - mixed) * F.logsigmoid(z) + mixed * (-z).exp()


def sigmoid_norm(responses: Responses, options: LossOptions) -> Tensor:
    """Return the loss of DPO with means over tokens, -S(beta (c/|c| - r/|r|)).

    Lambert et al. 2024, section 5.1, https://arxiv.org/abs/2411.15124.
    """
    import torch.nn.functional as F

    means = responses.ratios / responses.tokens
    return -F.logsigmoid(options.beta * (means[:, 0] - means[:, 1]))


def sft(responses: Responses, options: LossOptions) -> Tensor:
    """Return the next-token loss of the chosen responses of a batch, for each row.

    The mean is over all their tokens.
    """
    return next_token(responses).expand(len(responses.policy))


def next_token(responses: Responses) -> Tensor:
    """Return the mean next-token loss of the chosen responses, a scalar."""
    return -responses.policy[:, 0].sum() / responses.tokens[:, 0].sum()


def orpo(responses: Responses, options: LossOptions) -> Tensor:
    """Return the loss of odds-ratio preference optimization.

        -log P(c) - beta S(log(odds(c) / odds(r))), odds(y) = P(y) / (1 - P(y))

    where log P(y) is the mean over the tokens of y. Hong et al. 2024, equations 4, 6 and 7,
    https://arxiv.org/abs/2403.07691. beta is lambda in the paper, the weight of the odds ratio.
    """
    import torch
    import torch.nn.functional as F

    means = responses.policy / responses.tokens
    odds = means - torch.log(-torch.expm1(means.clamp(max=-1e-6)))
    return -means[:, 0] - options.beta * F.logsigmoid(odds[:, 0] - odds[:, 1])


def cpo(responses: Responses, options: LossOptions) -> Tensor:
    """Return the loss of contrastive preference optimization, -S(beta (log p_c - log p_r)).

    The next-token loss of the chosen responses is added by `sft_weight`. Xu et al. 2024, equation
    3, https://arxiv.org/abs/2401.08417.
    """
    z = options.beta * (responses.policy[:, 0] - responses.policy[:, 1])
    return _smoothed(z, options.label_smoothing)


def simpo(responses: Responses, options: LossOptions) -> Tensor:
    """Return the loss of simple preference optimization.

        -S(beta (log p_c / |c| - log p_r / |r|) - gamma)

    Meng et al. 2024, equation 6, https://arxiv.org/abs/2405.14734.
    """
    means = responses.policy / responses.tokens
    z = options.beta * (means[:, 0] - means[:, 1]) - options.gamma
    return _smoothed(z, options.label_smoothing)


def _rated(responses: Responses, options: LossOptions, baseline: Tensor | float) -> Tensor:
    """Return w s(beta (k - c)) for liked responses and w s(beta (c - k)) for disliked ones."""
    import torch

    liked = responses.liked
    assert liked is not None
    above = options.beta * (responses.ratios[:, 0] - baseline)
    weights = (options.desirable_weight, options.undesirable_weight)
    return torch.where(liked, weights[0] * (-above).sigmoid(), weights[1] * above.sigmoid())


def kto(responses: Responses, options: LossOptions) -> Tensor:
    """Return the loss of Kahneman-Tversky optimization.

        liked: w s(beta (k - c)); disliked: w s(beta (c - k)); k = max(0, mean of mismatched ratios)

    k estimates how far the model is from the reference. It has no gradient, and is the mean over
    the batch of c for prompts with the response of another row. Ethayarajh et al. 2024, equation 7,
    https://arxiv.org/abs/2402.01306.
    """
    distance = responses.ratios[:, 1].mean().detach().clamp(min=0)
    return _rated(responses, options, distance)


def apo_zero_unpaired(responses: Responses, options: LossOptions) -> Tensor:
    """Return the anchored loss of rated responses: `kto` with k = 0.

    D'Oosterlinck et al. 2024, equation 7, https://arxiv.org/abs/2408.06266.
    """
    return _rated(responses, options, 0.0)


_SMOOTHED_DPO = PreferenceLoss(dpo, smoothing=True)
LOSSES: dict[str, PreferenceLoss] = {
    "dpo": _SMOOTHED_DPO,
    "sigmoid": _SMOOTHED_DPO,
    "hinge": PreferenceLoss(hinge),
    "ipo": PreferenceLoss(ipo),
    "exo_pair": PreferenceLoss(exo_pair, smoothing=True),
    "nca_pair": PreferenceLoss(nca_pair),
    "robust": PreferenceLoss(robust, smoothing=True),
    "bco_pair": PreferenceLoss(bco_pair),
    "sppo_hard": PreferenceLoss(sppo_hard),
    "aot": PreferenceLoss(aot, smoothing=True),
    "aot_unpaired": PreferenceLoss(aot_unpaired, smoothing=True),
    "apo_zero": PreferenceLoss(apo_zero),
    "apo_down": PreferenceLoss(apo_down),
    "discopop": PreferenceLoss(discopop),
    "sigmoid_norm": PreferenceLoss(sigmoid_norm),
    "sft": PreferenceLoss(sft, reference=False, per_token=True),
    "orpo": PreferenceLoss(orpo, reference=False, per_token=True),
    "cpo": PreferenceLoss(cpo, reference=False, smoothing=True, sft_weight=1.0),
    "simpo": PreferenceLoss(simpo, reference=False, smoothing=True, per_token=True),
    "kto": PreferenceLoss(kto, rated=True),
    "apo_zero_unpaired": PreferenceLoss(apo_zero_unpaired, rated=True),
}
"""Every loss by its name."""
