"""Losses of a batch: replacements for the model's own, losses of vectors and of comparisons.

The vectors of a batch are (batch, columns, d): the anchor, its positive and its negatives.
`texts` (batch, columns) has a number for each text, equal for equal texts, and 0 where a row has
fewer negatives. All similarities are cosines.

The log probabilities of comparisons are (batch, 2), the chosen response first; each is summed over
the tokens of a response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from adapterhub.backbones.end_tokens import learned_tokens
from adapterhub.tasks.common.encoding import IGNORED

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


Loss = Callable[[Any, Mapping[str, "Tensor"]], "Tensor | None"]
"""Computes the loss of a batch from the model's output and the batch."""

Items = Callable[[Mapping[str, "Tensor"]], float]
"""Counts the items of a batch over which its loss is a mean."""


OF_LOSS = "loss."
"""The prefix of batch entries that only the loss reads; the model does not receive them."""


def model_inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the part of a batch that is passed to the model."""
    return {name: tensor for name, tensor in batch.items() if not name.startswith(OF_LOSS)}


def learned(batch: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """Return a context that marks the learned tokens of a batch for a model."""
    labels = batch.get("labels", batch.get(f"{OF_LOSS}labels"))
    return learned_tokens(labels)


def batch_rows(batch: Mapping[str, Tensor]) -> float:
    """Count the rows of a batch."""
    return len(next(iter(batch.values())))


def batch_labels(batch: Mapping[str, Tensor], *, shifted: bool = False) -> float:
    """Count the labels of a batch; without labels of classes or tokens, its rows.

    `shifted`: each label is predicted at the token before it, except the first.
    """
    labels = batch.get("labels")
    if labels is None or labels.is_floating_point():
        return batch_rows(batch)
    return int(((labels[:, 1:] if shifted else labels) != IGNORED).sum())


def next_token_loss(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of the labels, each predicted at the token before it."""
    import torch.nn.functional as F

    # As in transformers, the labels are shifted: slicing the logits would copy them.
    labels = F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
    logits = output.logits.float().flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)


def relevance_loss(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean binary cross-entropy of one output for each row."""
    import torch.nn.functional as F

    logits = output.logits.squeeze(-1).float()
    return F.binary_cross_entropy_with_logits(logits, batch["labels"].float())


def span_loss(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean of the cross-entropies of the first and the last token of the answer.

    Padding is excluded, since no answer begins or ends in it. Models count padding as candidates,
    so the loss of a text would depend on the lengths of the others in its batch.
    """
    import torch.nn.functional as F

    padding, tokens = batch["attention_mask"] == 0, output.start_logits.shape[1]
    losses = [
        F.cross_entropy(
            logits.masked_fill(padding, float("-inf")),
            batch[f"{end}_positions"].clamp(0, tokens),
            ignore_index=tokens,
        )
        for end, logits in (("start", output.start_logits), ("end", output.end_logits))
    ]
    return (losses[0] + losses[1]) / 2


def corrected_loss(model: PreTrainedModel, kind: str) -> Loss | None:
    """Return the loss that replaces the model's own; None if the model's own is right.

    `kind` is the `head` of a task.
    """
    from adapterhub.backbones.probe import shifts_labels  # imports torch

    if kind != "causal-lm" or shifts_labels(model):
        return None
    return next_token_loss


PairLoss = Callable[["Tensor", "Tensor", "Tensor | None"], "Tensor"]
"""Computes a loss of vectors, the numbers of their texts and the scores of pairs."""


def multiple_negatives_loss(vectors: Tensor, texts: Tensor, temperature: float) -> Tensor:
    """Return the cross-entropy of each anchor's positive among all candidates of the batch.

    InfoNCE with in-batch negatives: Henderson et al. 2017, section 4.4,
    https://arxiv.org/abs/1705.00652; van den Oord et al. 2018, equation 4,
    https://arxiv.org/abs/1807.03748:

        -log(exp(cos(a_i, p_i) / t) / sum over candidates c of exp(cos(a_i, c) / t))

    The candidates are the positives and negatives of all rows. A candidate with the text of the
    anchor, or of one of its positives in any row, is not a negative and is left out.

    vectors: (batch, columns, d), texts: (batch, columns), temperature: t.
    """
    import torch
    import torch.nn.functional as F

    rows = len(vectors)
    vectors = F.normalize(vectors, dim=-1)
    candidates = vectors[:, 1:].transpose(0, 1).flatten(0, 1)  # all positives come first
    numbers = texts[:, 1:].T.flatten()
    scores = vectors[:, 0] @ candidates.T / temperature
    same_anchor, same_text = texts[:, :1] == texts[:, 0], texts[:, 1:2] == numbers
    positive = (same_anchor.float() @ same_text.float()) > 0
    left_out = (numbers == 0) | (numbers == texts[:, :1]) | positive
    own = torch.arange(rows, device=texts.device)
    left_out[own, own] = False
    return F.cross_entropy(scores.masked_fill(left_out, -torch.inf), own)


def triplet_loss(vectors: Tensor, texts: Tensor, margin: float) -> Tensor:
    """Return the mean of max(0, cos(a, n) - cos(a, p) + margin) over all negatives of the rows.

    Schroff et al. 2015, equation 3, https://arxiv.org/abs/1503.03832, whose squared distance of
    vectors of length 1 is 2 - 2 cos.

    vectors: (batch, columns, d), texts: (batch, columns).
    """
    import torch.nn.functional as F

    cosines = F.cosine_similarity(vectors[:, :1], vectors[:, 1:], dim=-1)
    losses = F.relu(cosines[:, 1:] - cosines[:, :1] + margin)
    return losses[texts[:, 2:] != 0].mean()


def cosent_loss(vectors: Tensor, scores: Tensor, temperature: float) -> Tensor:
    """Return log(1 + sum of exp((cos_j - cos_i) / t) over pairs i with a higher score than j).

    CoSENT: Su 2022, https://kexue.fm/archives/8847. Only the order of the scores counts.

    vectors: (batch, 2, d), scores: (batch,), temperature: t.
    """
    import torch
    import torch.nn.functional as F

    cosines = F.cosine_similarity(vectors[:, 0], vectors[:, 1], dim=-1) / temperature
    differences = (cosines[None] - cosines[:, None])[scores[:, None] > scores[None]]
    return torch.cat([cosines.new_zeros(1), differences]).logsumexp(0)


def cosine_loss(vectors: Tensor, scores: Tensor) -> Tensor:
    """Return the mean squared difference of cosines and scores.

    Reimers & Gurevych 2019, section 3, https://arxiv.org/abs/1908.10084.

    vectors: (batch, 2, d), scores: (batch,), from -1 to 1.
    """
    import torch.nn.functional as F

    return F.mse_loss(F.cosine_similarity(vectors[:, 0], vectors[:, 1], dim=-1), scores)


def response_log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log probability of the labels of each row, (rows,).

    logits: (rows, tokens, vocabulary); labels: (rows, tokens), each predicted at the token before
    it.
    """
    import torch.nn.functional as F

    after, scores = labels[:, 1:], logits[:, :-1].transpose(1, 2).float()
    return -F.cross_entropy(scores, after, ignore_index=IGNORED, reduction="none").sum(-1)


def dpo_loss(policy: Tensor, reference: Tensor, beta: float, smoothing: float) -> Tensor:
    """Return the loss of direct preference optimization for each comparison.

    Rafailov et al. 2023, equation 7, https://arxiv.org/abs/2305.18290, for labels that are wrong
    with a probability of `smoothing` (Mitchell 2023, equation 3,
    https://ericmitchell.ai/cdpo.pdf):

        z = beta ((log p_c - log r_c) - (log p_r - log r_r))
        -(1 - e) log sigmoid(z) - e log sigmoid(-z)

    policy, reference: (batch, 2), smoothing: e.
    """
    import torch.nn.functional as F

    ratios = policy - reference
    z = beta * (ratios[:, 0] - ratios[:, 1])
    return -(1 - smoothing) * F.logsigmoid(z) - smoothing * F.logsigmoid(-z)


def ipo_loss(policy: Tensor, reference: Tensor, tokens: Tensor, beta: float) -> Tensor:
    """Return the loss of identity preference optimization for each comparison.

    Azar et al. 2023, equation 17, https://arxiv.org/abs/2310.12036. As in trl, log probabilities
    are means over the tokens of a response; its authors computed their results this way.

    policy, reference, tokens (of each response): (batch, 2). beta is tau in the paper, the strength
    of the regularization.
    """
    means = (policy - reference) / tokens
    squared: Tensor = (means[:, 0] - means[:, 1] - 1 / (2 * beta)) ** 2
    return squared


def orpo_loss(policy: Tensor, tokens: Tensor, beta: float) -> Tensor:
    """Return the loss of odds-ratio preference optimization for each comparison.

    Hong et al. 2024, equations 4, 6 and 7, https://arxiv.org/abs/2403.07691, without a reference:

        -log P(c) - beta log sigmoid(log(odds(c) / odds(r))), odds(y) = P(y) / (1 - P(y))

    where log P(y) is the mean over the tokens of y.

    policy, tokens (of each response): (batch, 2). beta is lambda in the paper, the weight of the
    odds ratio.
    """
    import torch
    import torch.nn.functional as F

    means = policy / tokens
    odds = means - torch.log(-torch.expm1(means.clamp(max=-1e-6)))
    return -means[:, 0] - beta * F.logsigmoid(odds[:, 0] - odds[:, 1])


def bradley_terry_loss(scores: Tensor) -> Tensor:
    """Return -log sigmoid(s_c - s_r) for each comparison.

    Bradley & Terry 1952; Ouyang et al. 2022, equation 1, https://arxiv.org/abs/2203.02155.

    scores: (batch, 2).
    """
    import torch.nn.functional as F

    return -F.logsigmoid(scores[:, 0] - scores[:, 1])
