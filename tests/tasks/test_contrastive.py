"""Losses of vectors: those of sentence-transformers, and what is no negative."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from adapterhub.tasks.common.batches import (
    cosent_loss,
    cosine_loss,
    multiple_negatives_loss,
    triplet_loss,
)

ROWS, WIDTH = 5, 7


def vectors_of(columns: int, seed: int = 0) -> Tensor:
    """Draw vectors, (rows, columns, width)."""
    return torch.randn(ROWS, columns, WIDTH, generator=torch.Generator().manual_seed(seed))


def different(columns: int) -> Tensor:
    """Return the numbers of texts that are all different."""
    return torch.arange(1, ROWS * columns + 1).view(ROWS, columns)


class Columns(nn.Module):
    """Stands for a model of sentence-transformers: its features are vectors already."""

    similarity_fn_name = "cosine"

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features["vectors"]}


def loss_of_peer(name: str, vectors: Tensor, labels: Tensor | None = None, **options: object):
    """Compute a loss of sentence-transformers on the same vectors."""
    losses = pytest.importorskip("sentence_transformers").sentence_transformer.losses
    loss = getattr(losses, name)(Columns(), **options)
    features = [{"vectors": vectors[:, column]} for column in range(vectors.shape[1])]
    return loss(features, labels)


@pytest.mark.parametrize("columns", [2, 3, 4])
@pytest.mark.parametrize("temperature", [0.05, 0.2])
def test_multiple_negatives_is_that_of_sentence_transformers(
    columns: int, temperature: float
) -> None:
    vectors = vectors_of(columns)
    found = multiple_negatives_loss(vectors, different(columns), temperature)
    expected = loss_of_peer("MultipleNegativesRankingLoss", vectors, scale=1 / temperature)
    assert torch.allclose(found, expected, rtol=1e-5)


def test_triplet_is_that_of_sentence_transformers() -> None:
    vectors = vectors_of(3)
    losses = pytest.importorskip("sentence_transformers").sentence_transformer.losses
    cosine = losses.TripletDistanceMetric.COSINE
    expected = loss_of_peer("TripletLoss", vectors, distance_metric=cosine, triplet_margin=0.3)
    assert torch.allclose(triplet_loss(vectors, different(3), 0.3), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "peer", "options"),
    [("cosent", "CoSENTLoss", {"scale": 5.0}), ("cosine", "CosineSimilarityLoss", {})],
)
def test_losses_of_scores_are_those_of_sentence_transformers(
    name: str, peer: str, options: dict[str, float]
) -> None:
    vectors, scores = vectors_of(2), torch.tensor([0.1, 0.9, 0.5, 0.5, -0.3])
    own: dict[str, Callable[[], Tensor]] = {
        "cosent": lambda: cosent_loss(vectors, scores, 0.2),
        "cosine": lambda: cosine_loss(vectors, scores),
    }
    assert torch.allclose(own[name](), loss_of_peer(peer, vectors, scores, **options), rtol=1e-5)


def alone(anchor: Tensor, positive: Tensor, negatives: list[Tensor], temperature: float) -> float:
    """Compute the loss of one anchor from its definition."""
    cosines = [float(nn.functional.cosine_similarity(anchor, c, 0)) for c in (positive, *negatives)]
    weights = [math.exp(cosine / temperature) for cosine in cosines]
    return -math.log(weights[0] / sum(weights))


def test_a_false_negative_is_left_out() -> None:
    """Row 1 has row 0's positive, row 2 its anchor; the second text of row 3 is row 0's anchor."""
    vectors, texts = vectors_of(2), different(2)
    texts[1, 1], texts[2, 0], texts[3, 1] = texts[0, 1], texts[0, 0], texts[0, 0]
    vectors[1, 1], vectors[2, 0], vectors[3, 1] = vectors[0, 1], vectors[0, 0], vectors[0, 0]
    left = {0: [4], 1: [2, 3, 4], 2: [4], 3: [0, 1, 2, 4], 4: [0, 1, 2, 3]}
    expected = [
        alone(vectors[row, 0], vectors[row, 1], [vectors[c, 1] for c in others], 0.1)
        for row, others in left.items()
    ]
    found = multiple_negatives_loss(vectors, texts, 0.1)
    assert float(found) == pytest.approx(sum(expected) / ROWS, rel=1e-4)


def test_rows_may_have_fewer_negatives() -> None:
    """What stands where a text is missing changes nothing."""
    vectors, texts = vectors_of(4), different(4)
    texts[0, 3] = texts[2, 2] = texts[2, 3] = 0
    other = vectors.clone()
    other[texts == 0] = 3.0
    for loss in (
        lambda v: multiple_negatives_loss(v, texts, 0.1),
        lambda v: triplet_loss(v, texts, 0.5),
    ):
        assert torch.equal(loss(vectors), loss(other))
        assert torch.isfinite(loss(vectors))
    fewer = multiple_negatives_loss(vectors, texts, 0.1)
    assert fewer < multiple_negatives_loss(vectors, different(4), 0.1)


def test_equal_scores_order_nothing() -> None:
    vectors = vectors_of(2).requires_grad_()
    loss = cosent_loss(vectors, torch.ones(ROWS), 0.05)
    loss.backward()
    assert loss.item() == 0
    assert vectors.grad is not None
