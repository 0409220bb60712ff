"""Retrieval: the passages that are most similar to a query, and metrics of ranked passages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from adapterhub.errors import DataError

if TYPE_CHECKING:
    from numpy import float32
    from numpy.typing import NDArray

    Vectors = NDArray[float32]

MOST = 10  # passages that are ranked
RANKING_METRICS = ("recall@1", "recall@10", "mrr@10", "ndcg@10")
_QUERIES = 256  # compared with all passages at once


def nearest_passages(
    queries: Mapping[str, Vectors], passages: Mapping[str, Vectors]
) -> dict[str, list[str]]:
    """Return the passages that are most similar to each query, the most similar one first.

    Similarity is the cosine. A query that is a passage itself does not find itself.

    The vectors, (d,), are by text.
    """
    import numpy as np

    names, texts = list(passages), list(queries)
    places = {name: number for number, name in enumerate(names)}
    matrix, found = _unit(np.stack([*passages.values()])), {}
    for start in range(0, len(texts), _QUERIES):
        some = texts[start : start + _QUERIES]
        scores = _unit(np.stack([queries[text] for text in some])) @ matrix.T
        for text, row in zip(some, scores, strict=True):
            if text in places:
                row[places[text]] = -np.inf
            best = np.argsort(-row, kind="stable")[:MOST]
            found[text] = [names[i] for i in best if row[i] > -np.inf]
    return found


def _unit(vectors: Any) -> Any:
    import numpy as np

    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def ranking_metrics(
    ranked: Sequence[Sequence[float]], relevant: Sequence[Sequence[float]]
) -> dict[str, float]:
    """Compute recall@1, recall@10, MRR@10 and nDCG@10, averaged over queries.

    Recall is the share of a query's relevant passages that are found. nDCG is Järvelin & Kekäläinen
    2002, https://doi.org/10.1145/582415.582418, with the relevance as the gain.

    `ranked` has for each query the relevance of the passages that were found, the first one first,
    and `relevant` that of all its relevant passages.

    Raises:
        DataError: there are no queries, or one has no relevant passage.
    """
    if not ranked or not all(any(gain > 0 for gain in gains) for gains in relevant):
        raise DataError("no query, or one without a relevant passage", expected="one for each")
    rows = [
        (_recall(found, gains, 1), _recall(found, gains, MOST), _first(found), _ndcg(found, gains))
        for found, gains in zip(ranked, relevant, strict=True)
    ]
    means = (math.fsum(column) / len(rows) for column in zip(*rows, strict=True))
    return dict(zip(RANKING_METRICS, means, strict=True))


def _recall(found: Sequence[float], gains: Sequence[float], most: int) -> float:
    return sum(gain > 0 for gain in found[:most]) / sum(gain > 0 for gain in gains)


def _first(found: Sequence[float]) -> float:
    return next((1 / rank for rank, gain in enumerate(found[:MOST], start=1) if gain > 0), 0.0)


def _ndcg(found: Sequence[float], gains: Sequence[float]) -> float:
    return _gain(found) / _gain(sorted(gains, reverse=True))


def _gain(gains: Sequence[float]) -> float:
    return math.fsum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains[:MOST], start=1))
