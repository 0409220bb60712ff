"""Reranking: score how well a passage answers a query, with a model that reads both.

    example      a query, a passage, and the relevance of the passage, from 0 to 1
    row          the tokens of both, joined by the tokenizer; `labels`: the relevance
    prediction   the probability that the passage is relevant
    metrics      recall, MRR and nDCG over the passages of each query

A cross-encoder with one output, trained with the binary cross-entropy (Nogueira & Cho 2019,
section 3, https://arxiv.org/abs/1901.04085).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from adapterhub.data.columns import WANTS, choose_columns
from adapterhub.data.examples import Example
from adapterhub.data.options import DataOptions
from adapterhub.errors import DataError
from adapterhub.tasks.classification import Number, Regression
from adapterhub.tasks.common.base import Encoded, Prediction, register_task
from adapterhub.tasks.common.batches import Loss, Passed, relevance_loss
from adapterhub.tasks.common.metrics import RANKING_METRICS, ranked_gains, ranking_metrics
from adapterhub.tasks.embedding import text_number

_MOST = 1e3  # bound of an output with a probability of 0 or 1


@register_task
@dataclass(frozen=True)
class Reranking(Regression):
    """The relevance of a passage to a query: a model reads both together.

    Rows of `train.jsonl`:

        {"query": "capital of France", "passage": "Paris is its capital.", "label": 1}
        {"query": "capital of France", "passage": "France borders Spain.", "label": 0}

    One row per passage. Labels are numbers from 0 to 1; the passages with the same query are ranked
    together in an evaluation, and queries without a relevant passage are left out.

    `predict` prints the probability that a passage is relevant:

        0.981
        {"value": 0.981}
    """

    name = "reranking"
    summary = "how relevant a passage is to a query"
    head = "regression"
    main_metric = "ndcg@10"
    measures = RANKING_METRICS
    lower_is_better = frozenset()
    columns = WANTS["scored pairs"]
    groups = "queries"
    ranks_groups = True

    # Examples

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Any]:
        """Read queries and passages, with their relevance."""
        choice = choose_columns(source, options, split, self.columns, labelled=labelled)
        examples = super().read(source, choice.options, split, labelled=labelled)
        if far := [e for e in examples if labelled and not 0 <= float(e.label) <= 1]:
            raise DataError(
                f"{source} has {len(far):,} relevances that are not probabilities, such as "
                f"{far[0].label}",
                expected="numbers from 0 (not relevant) to 1 (relevant)",
                hint="divide grades by the highest one",
            )
        return examples

    # Rows

    def loss(self, train: Encoded) -> Loss | None:
        """Return the binary cross-entropy of the output and the relevance."""
        return relevance_loss

    # Predictions

    def read_output(self, data: Encoded, passed: Passed) -> Iterator[Prediction]:
        """Return the sigmoid of the single output."""
        for value in passed.output.logits.float().squeeze(-1).tolist():
            yield Number((1 + math.tanh(value / 2)) / 2)

    def outcome(self, example: Example, prediction: Prediction) -> dict[str, Any]:
        """Return the relevance, the probability, and the output that ranks the passages."""
        columns = super().outcome(example, prediction)
        output = _logit(float(columns["prediction"]))
        limited = min(max(output, -_MOST), _MOST)
        return columns | {"query": text_number(example.text), "output": limited}

    # Metrics

    def metrics(
        self, examples: Sequence[Example], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """Rank the passages of each query by their prediction; the relevance is the gain.

        Raises:
            DataError: no query has a relevant passage.
        """
        values = [p.value for p in predictions if isinstance(p, Number)]
        queries = [
            (values, gains) for values, gains in _by_query(examples, values) if max(gains) > 0
        ]
        ranked = [ranked_gains(*each) for each in queries]
        return ranking_metrics(ranked, [gains for _, gains in queries])


def _logit(value: float) -> float:
    """Return the logit of a probability, which distinguishes values near 0 or 1."""
    with contextlib.suppress(ValueError):
        return math.log(value) - math.log1p(-value)
    return math.inf if value > 0 else -math.inf


def _by_query(
    examples: Sequence[Example], values: Sequence[float]
) -> Iterable[tuple[list[float], list[float]]]:
    """Return the predictions and the relevances of the passages of each query."""
    queries: dict[str, tuple[list[float], list[float]]] = {}
    for example, value in zip(examples, values, strict=True):
        predicted, relevance = queries.setdefault(example.text, ([], []))
        predicted.append(_logit(value))
        relevance.append(float(example.label or 0.0))
    return queries.values()
