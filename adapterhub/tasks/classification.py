"""Classification and regression of a text or a pair of texts.

example      a text or a pair, with a class name or a number
row          the tokens, a pair joined by the tokenizer; `labels`: class index or number
prediction   the most probable class and all probabilities; or a number
metrics      accuracy, macro F1, Matthews; or Pearson, Spearman, mean squared error
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import PreTrainedModel

from adapterhub.data.columns import WANTS
from adapterhub.data.examples import Example, check_labels, labels_of, read_examples
from adapterhub.data.options import DataOptions
from adapterhub.errors import DataError
from adapterhub.tasks._base import (
    Encoded,
    Prediction,
    Setting,
    Task,
    forward,
    in_order,
    limit_of,
    one_row_each,
    register_task,
    rows_from_columns,
)
from adapterhub.tasks._metrics import classification_metrics, regression_metrics


@dataclass(frozen=True)
class Scored(Prediction):
    """A class, and the probability of every class."""

    label: str
    scores: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """Return the class and the probability of every class."""
        return {"label": self.label, "scores": self.scores}

    def __str__(self) -> str:
        return f"{self.label} {self.scores[self.label]:.3f}"


@dataclass(frozen=True)
class Number(Prediction):
    """A number."""

    value: float

    def as_dict(self) -> dict[str, Any]:
        """Return the number."""
        return {"value": self.value}

    def __str__(self) -> str:
        return f"{self.value:.3f}"


class OfTexts(Task):
    """The examples and rows of classification and regression: one row per `Example`."""

    numbers: ClassVar[bool] = False
    columns = WANTS["classes"]

    # Examples

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Example]:
        """Read texts or pairs of texts, with a label."""
        return read_examples(
            source, options, labelled=labelled, regression=self.numbers, split=split
        )

    def example(self, fields: Sequence[str], options: DataOptions) -> Example:
        """Build an example from one text, or from two if training used pairs."""
        if len(fields) < self.fields(options):
            raise DataError(
                "the second text is missing; the adapter was trained on pairs of texts",
                hint='adapterhub predict ADAPTER "first text" --pair "second text"',
            )
        return Example(*fields)

    def fields(self, options: DataOptions) -> int:
        """Return 2 for pairs, else 1."""
        return 1 if options.pair is None else 2

    def shown(self, example: Example) -> list[str]:
        """Return the text or the two texts."""
        return [example.text] if example.pair is None else [example.text, example.pair]

    # Rows

    def encode(self, examples: Sequence[Example], setting: Setting, *, labelled: bool) -> Encoded:
        """Tokenize texts or pairs, truncated to the longest input."""
        pairs = [e.pair for e in examples] if examples and examples[0].pair is not None else None
        texts = [e.text for e in examples]
        encoded = setting.tokenizer(texts, pairs, truncation=True, max_length=limit_of(setting))
        rows = rows_from_columns(encoded)
        if labelled:
            for row, example in zip(rows, examples, strict=True):
                row["labels"] = self.target(example, setting.labels)
        return one_row_each(self, examples, setting, rows)

    def target(self, example: Example, labels: Sequence[str]) -> int | float:
        """Return the label in the form that the model's loss expects."""
        raise NotImplementedError


@register_task
@dataclass(frozen=True)
class Classification(OfTexts):
    """One class per text or pair of texts."""

    name = "classification"
    summary = "one class per text or pair of texts"
    main_metric = "accuracy"

    # Examples

    def labels(self, train: Sequence[Example]) -> tuple[str, ...]:
        """Return the classes of the training data, sorted."""
        return tuple(labels_of(train))

    def check(self, labels: Sequence[str], examples: Sequence[Example]) -> None:
        """Refuse fewer than two classes, and evaluation classes that training lacks."""
        check_labels(labels, (e.label for e in examples))

    # Rows

    def target(self, example: Example, labels: Sequence[str]) -> int:
        """Return the index of the class."""
        return labels.index(str(example.label))

    # Predictions

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """Return the most probable class, with the softmax over all classes."""
        scored: dict[int, Prediction] = {}
        for indices, _, output in forward(model, data, batch_size):
            probabilities = output.logits.float().softmax(-1).tolist()
            for index, row in zip(indices, probabilities, strict=True):
                scored[index] = best_of(dict(zip(data.setting.labels, row, strict=True)))
        return in_order(scored)

    # Metrics

    def metrics(
        self, examples: Sequence[Example], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """Compute accuracy, macro_f1 and matthews."""
        return score_classes(examples, predictions)


@register_task
@dataclass(frozen=True)
class Regression(OfTexts):
    """One number per text or pair of texts."""

    name = "regression"
    summary = "one number per text or pair of texts"
    main_metric = "pearson"
    numbers = True
    columns = WANTS["numbers"]

    # Rows

    def target(self, example: Example, labels: Sequence[str]) -> float:
        """Return the number."""
        return float(example.label or 0.0)

    # Predictions

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """Return the single output of the head."""
        numbers: dict[int, Prediction] = {}
        for indices, _, output in forward(model, data, batch_size):
            values = output.logits.float().squeeze(-1).tolist()
            numbers |= zip(indices, map(Number, values), strict=True)
        return in_order(numbers)

    # Metrics

    def metrics(
        self, examples: Sequence[Example], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """Compute pearson, spearman and mse."""
        values = [p.value for p in predictions if isinstance(p, Number)]
        return regression_metrics([float(e.label or 0.0) for e in examples], values)


def best_of(scores: dict[str, float]) -> Scored:
    """Return the most probable class with all probabilities."""
    return Scored(max(scores, key=scores.__getitem__), scores)


def score_classes(
    examples: Sequence[Example], predictions: Sequence[Prediction]
) -> dict[str, float]:
    """Compute accuracy, macro F1 and Matthews correlation of predicted classes."""
    classes = [p.label for p in predictions if isinstance(p, Scored)]
    return classification_metrics([str(e.label) for e in examples], classes)
