"""reranking: the loss and metrics of sentence-transformers, and what is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from adapterhub.data.examples import Example
from adapterhub.data.options import DataOptions
from adapterhub.tasks import parse_task
from adapterhub.tasks.classification import Number
from adapterhub.tasks.common.batches import relevance_loss
from tests.kit.data import read_error

RANKED = {"q": [(0.9, 0.0), (0.8, 1.0), (0.1, 0.5)], "r": [(0.2, 1.0), (0.1, 0.0)], "s": [(1, 0.0)]}


def test_the_loss_is_the_binary_cross_entropy():
    """That of sentence-transformers' BinaryCrossEntropyLoss, which is torch's with logits."""
    logits, labels = torch.tensor([[2.0], [-1.0], [0.3]]), torch.tensor([1.0, 0.0, 0.5])
    probabilities = torch.sigmoid(logits[:, 0])
    expected = -(labels * probabilities.log() + (1 - labels) * (1 - probabilities).log()).mean()
    found = relevance_loss(SimpleNamespace(logits=logits), {"labels": labels})
    assert torch.allclose(found, expected)


def test_the_metrics_rank_the_passages_of_each_query():
    examples = [Example(q, "p", label) for q, rows in RANKED.items() for _, label in rows]
    predictions = [Number(value) for rows in RANKED.values() for value, _ in rows]
    metrics = parse_task("reranking").metrics(examples, predictions)
    assert metrics["mrr@10"] == pytest.approx((1 / 2 + 1) / 2)
    assert metrics["recall@1"] == pytest.approx((0 + 1) / 2)
    gain = 1 / 1.584962500721156 + 0.5 / 2
    best = 1 + 0.5 / 1.584962500721156
    assert metrics["ndcg@10"] == pytest.approx((gain / best + 1) / 2)


def test_columns_and_what_is_refused(tmp_path):
    row = {"query": "q", "passage": "p", "score": 0.5}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    source = str(tmp_path / "a.jsonl")
    (example,) = parse_task("reranking").read(source, DataOptions(), "train")
    assert example == Example("q", "p", 0.5)
    assert "not probabilities, such as 3.0" in read_error(
        "reranking", tmp_path / "b.jsonl", json.dumps(row | {"score": 3})
    )
