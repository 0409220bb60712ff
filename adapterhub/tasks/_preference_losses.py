"""Losses of comparisons: of the log probabilities of a chosen and of a rejected response.

Log probabilities are (batch, 2), the chosen response first: the sums over the tokens of a response.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from adapterhub.tasks._rows import IGNORED

if TYPE_CHECKING:
    from torch import Tensor


def response_log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log probability of the labels of each row, (rows,).

    Args:
        logits: (rows, tokens, vocabulary).
        labels: (rows, tokens), each predicted at the token before it.
    """
    import torch.nn.functional as F

    after, scores = labels[:, 1:], logits[:, :-1].transpose(1, 2).float()
    return -F.cross_entropy(scores, after, ignore_index=IGNORED, reduction="none").sum(-1)


def dpo_loss(policy: Tensor, reference: Tensor, beta: float, smoothing: float) -> Tensor:
    """Return the loss of direct preference optimization, of each comparison.

    Rafailov et al. 2023, equation 7, https://arxiv.org/abs/2305.18290, for labels that are wrong
    with a probability of `smoothing` (Mitchell 2023, equation 3,
    https://ericmitchell.ai/cdpo.pdf):

        z = beta ((log p_c - log r_c) - (log p_r - log r_r))
        -(1 - e) log sigmoid(z) - e log sigmoid(-z)

    Args:
        policy: (batch, 2).
        reference: (batch, 2).
        beta: how much a distance from the reference costs.
        smoothing: e.
    """
    import torch.nn.functional as F

    ratios = policy - reference
    z = beta * (ratios[:, 0] - ratios[:, 1])
    return -(1 - smoothing) * F.logsigmoid(z) - smoothing * F.logsigmoid(-z)


def ipo_loss(policy: Tensor, reference: Tensor, tokens: Tensor, beta: float) -> Tensor:
    """Return the loss of identity preference optimization, of each comparison.

    Azar et al. 2023, equation 17, https://arxiv.org/abs/2310.12036. As in trl, log probabilities
    are means over the tokens of a response, by which its authors computed their results.

    Args:
        policy: (batch, 2).
        reference: (batch, 2).
        tokens: the number of tokens of each response, (batch, 2).
        beta: the strength of the regularization, tau in the paper.
    """
    means = (policy - reference) / tokens
    squared: Tensor = (means[:, 0] - means[:, 1] - 1 / (2 * beta)) ** 2
    return squared


def orpo_loss(policy: Tensor, tokens: Tensor, beta: float) -> Tensor:
    """Return the loss of odds-ratio preference optimization, of each comparison.

    Hong et al. 2024, equations 4, 6 and 7, https://arxiv.org/abs/2403.07691; it has no reference:

        -log P(c) - beta log sigmoid(log(odds(c) / odds(r))), odds(y) = P(y) / (1 - P(y))

    where log P(y) is the mean over the tokens of y.

    Args:
        policy: (batch, 2).
        tokens: the number of tokens of each response, (batch, 2).
        beta: the weight of the odds ratio, lambda in the paper.
    """
    import torch
    import torch.nn.functional as F

    means = policy / tokens
    odds = means - torch.log(-torch.expm1(means.clamp(max=-1e-6)))
    return -means[:, 0] - beta * F.logsigmoid(odds[:, 0] - odds[:, 1])


def bradley_terry_loss(scores: Tensor) -> Tensor:
    """Return -log sigmoid(s_c - s_r) of each comparison.

    Bradley & Terry 1952; Ouyang et al. 2022, equation 1, https://arxiv.org/abs/2203.02155.

    Args:
        scores: (batch, 2).
    """
    import torch.nn.functional as F

    return -F.logsigmoid(scores[:, 0] - scores[:, 1])
