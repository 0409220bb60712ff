"""Evaluate encoded rows with the errors of the scores, also with the adapter switched off.

A run does this for its test rows and for the rows that it should retain, and `adapterhub eval` for
any rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from adapterhub.adapters.route import only_foundations
from adapterhub.files.shown_table import ScoreError
from adapterhub.pages.row_scores import EvaluatedRows, PredictionFile, outcomes_of, score_errors
from adapterhub.status import doing
from adapterhub.tasks import Encoded, Prediction, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class EvaluationResult:
    """An evaluation: metrics, the errors of scores, and outcomes by example if the task has any."""

    examples: int
    metrics: dict[str, float]
    errors: dict[str, ScoreError]
    outcomes: PredictionFile | None


@dataclass
class LatestPredictions:
    """The predictions of the latest evaluation, of one task or of several tasks in order."""

    task: Task
    data: Encoded
    predictions: list[Prediction] = field(default_factory=list)

    def file(self, step: int) -> PredictionFile | None:
        """Return the predictions file of a step."""
        labels = self.data.setting.labels
        return outcomes_of(self.task, self.data.examples, self.predictions, labels, step)

    def errors(self, metrics: Mapping[str, float]) -> dict[str, ScoreError]:
        """Return the errors of the scores of the latest evaluation."""
        parts, start = dict[str, EvaluatedRows](), 0
        complete = len(self.predictions) == len(self.data.examples)
        for name, first, rows in self.data.by_source():
            own = self.predictions[first : first + len(rows.examples)]
            file = outcomes_of(self.task, rows.examples, own, rows.setting.labels, 0)
            parts[f"{name}/"] = EvaluatedRows(len(rows.examples), file if complete else None)
        for part in self.data.parts:
            end = start + len(part.examples)
            own, labels = self.predictions[start:end], part.setting.labels
            file = outcomes_of(part.task, part.examples, own, labels, 0) if complete else None
            parts[part.score_prefix] = EvaluatedRows(end - start, file)
            start = end
        return score_errors(metrics, parts)


def evaluate_rows(model: PreTrainedModel, rows: Encoded, batch_size: int) -> EvaluationResult:
    """Evaluate labelled rows, and keep the errors of the scores and the outcome of each example."""
    latest = LatestPredictions(rows.task, rows)
    metrics = rows.task.evaluate(model, rows, batch_size, latest.predictions)
    metrics = metrics | rows.source_scores(model, batch_size, latest.predictions, metrics)
    return EvaluationResult(len(rows.examples), metrics, latest.errors(metrics), latest.file(0))


def evaluate_off_and_on(
    model: PreTrainedModel, rows: Encoded, batch_size: int
) -> tuple[EvaluationResult, EvaluationResult]:
    """Evaluate labelled rows with the active adapters off, and on.

    The adapters that they were trained on top of apply in both.
    """
    results = []
    for state, context in (("off", only_foundations(model)), ("on", nullcontext())):
        with doing(f"evaluating {len(rows.examples):,} rows with the adapter {state}"), context:
            results.append(evaluate_rows(model, rows, batch_size))
    return results[0], results[1]


def with_evaluation_reference(model: PreTrainedModel, rows: Encoded, batch_size: int) -> Encoded:
    """Return rows with the reference of a finished adapter: the model with it off.

    Rows of tasks whose evaluation reads no reference are returned as they are.
    """
    if not rows.task.evaluates_with_reference:
        return rows
    with only_foundations(model):
        return rows.task.with_reference(model, rows, batch_size)
