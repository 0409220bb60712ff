"""Retrieval: ranked passages and their metrics, those of sentence-transformers and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import ndcg_score

from adapterhub.errors import DataError
from adapterhub.tasks._metrics import ranking_metrics
from adapterhub.tasks.embedding import nearest_passages


def vectors(count: int, seed: int, name: str) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {f"{name} {i}": random.normal(size=6).astype(np.float32) for i in range(count)}


def test_passages_are_ranked_by_cosine():
    queries, passages = vectors(300, 0, "q"), vectors(30, 1, "p")
    found = nearest_passages(queries, passages)
    assert found.keys() == queries.keys()
    for query in ("q 0", "q 299"):
        cosine = {
            name: vector @ queries[query] / np.linalg.norm(vector)
            for name, vector in passages.items()
        }
        assert found[query] == sorted(cosine, key=cosine.__getitem__, reverse=True)[:10]


def test_a_query_does_not_find_itself():
    passages = vectors(4, 0, "p")
    found = nearest_passages({"p 2": passages["p 2"]}, passages)["p 2"]
    assert sorted(found) == ["p 0", "p 1", "p 3"]


def test_the_metrics_are_those_of_sentence_transformers():
    pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.evaluation import (
        InformationRetrievalEvaluator,
    )

    random = np.random.default_rng(3)
    names = [f"p {i}" for i in range(40)]
    relevant = {f"q {i}": set(random.choice(names, 1 + i % 3, False).tolist()) for i in range(25)}
    queries, passages = vectors(25, 5, "q"), vectors(40, 6, "p")
    found = nearest_passages(queries, passages)
    metrics = ranking_metrics(
        [[float(p in relevant[q]) for p in found[q]] for q in relevant],
        [[1.0] * len(texts) for texts in relevant.values()],
    )
    texts = {name: name for name in (*queries, *passages)}
    peer = InformationRetrievalEvaluator(
        {q: texts[q] for q in queries}, {p: texts[p] for p in passages}, relevant,
        mrr_at_k=[10], ndcg_at_k=[10], precision_recall_at_k=[1, 10], accuracy_at_k=[1],
    )  # fmt: skip
    rows = [
        [{"corpus_id": name, "score": 1.0 - rank / 20} for rank, name in enumerate(found[q])]
        for q in queries
    ]
    expected = peer.compute_metrics(rows)
    assert metrics == pytest.approx(
        {
            "recall@1": expected["recall@k"][1],
            "recall@10": expected["recall@k"][10],
            "mrr@10": expected["mrr@k"][10],
            "ndcg@10": expected["ndcg@k"][10],
        }
    )


def test_graded_relevance_is_the_gain():
    gains = [[3.0, 0.0, 1.0, 2.0], [0.0, 1.0, 2.0, 0.0]]
    scores = [[4.0, 3.0, 2.0, 1.0]] * 2
    metrics = ranking_metrics(gains, gains)
    assert metrics["ndcg@10"] == pytest.approx(ndcg_score(gains, scores, k=10))
    assert metrics["mrr@10"] == pytest.approx((1 + 1 / 2) / 2)
    assert metrics["recall@1"] == pytest.approx((1 / 3 + 0) / 2)


@pytest.mark.parametrize("relevant", [[], [[1.0], [0.0]]])
def test_each_query_needs_a_relevant_passage(relevant):
    with pytest.raises(DataError, match="without a relevant passage"):
        ranking_metrics([[1.0] for _ in relevant], relevant)
