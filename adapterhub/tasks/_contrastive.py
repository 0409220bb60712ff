"""Losses of vectors: texts that belong together get similar vectors, and others do not.

The vectors of a batch are (batch, columns, d): of the anchor, of its positive and of its negatives.
`texts` (batch, columns) has a number for each text, equal for equal texts, and 0 where a row has
fewer negatives. All similarities are cosines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

PairLoss = Callable[["Tensor", "Tensor", "Tensor | None"], "Tensor"]
"""Computes a loss of vectors, the numbers of their texts and the scores of pairs."""


def multiple_negatives_loss(vectors: Tensor, texts: Tensor, temperature: float) -> Tensor:
    """Return the cross-entropy of each anchor's positive among all candidates of the batch.

    InfoNCE with in-batch negatives: Henderson et al. 2017, section 4.4,
    https://arxiv.org/abs/1705.00652; van den Oord et al. 2018, equation 4,
    https://arxiv.org/abs/1807.03748:

        -log(exp(cos(a_i, p_i) / t) / sum over candidates c of exp(cos(a_i, c) / t))

    The candidates are the positives and negatives of all rows. One that has the text of the anchor,
    or of a positive of it in any row, is no negative: it is left out.

    Args:
        vectors: (batch, columns, d).
        texts: (batch, columns).
        temperature: t.
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

    Args:
        vectors: (batch, columns, d).
        texts: (batch, columns).
        margin: by how much the positive should be more similar than a negative.
    """
    import torch.nn.functional as F

    cosines = F.cosine_similarity(vectors[:, :1], vectors[:, 1:], dim=-1)
    losses = F.relu(cosines[:, 1:] - cosines[:, :1] + margin)
    return losses[texts[:, 2:] != 0].mean()


def cosent_loss(vectors: Tensor, scores: Tensor, temperature: float) -> Tensor:
    """Return log(1 + sum of exp((cos_j - cos_i) / t) over pairs i with a higher score than j).

    CoSENT: Su 2022, https://kexue.fm/archives/8847. Only the order of the scores counts.

    Args:
        vectors: (batch, 2, d).
        scores: (batch,).
        temperature: t.
    """
    import torch
    import torch.nn.functional as F

    cosines = F.cosine_similarity(vectors[:, 0], vectors[:, 1], dim=-1) / temperature
    differences = (cosines[None] - cosines[:, None])[scores[:, None] > scores[None]]
    return torch.cat([cosines.new_zeros(1), differences]).logsumexp(0)


def cosine_loss(vectors: Tensor, scores: Tensor) -> Tensor:
    """Return the mean squared difference of cosines and scores.

    Reimers & Gurevych 2019, section 3, https://arxiv.org/abs/1908.10084.

    Args:
        vectors: (batch, 2, d).
        scores: (batch,), from -1 to 1.
    """
    import torch.nn.functional as F

    return F.mse_loss(F.cosine_similarity(vectors[:, 0], vectors[:, 1], dim=-1), scores)
