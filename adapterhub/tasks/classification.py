"""Classification and regression of a text or a pair of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import PreTrainedModel

from adapterhub.data.examples import Example, check_labels, labels_of, read_examples
from adapterhub.data.options import DataOptions
from adapterhub.errors import DataError
from adapterhub.tasks._base import (
    Encoded,
    Prediction,
    Setting,
    Task,
    forward,
    limit_of,
    one_row_each,
    register_task,
    rows_from_columns,
)
from adapterhub.tasks._metrics import classification_metrics, regression_metrics


@dataclass(frozen=True)
class Scored(Prediction):
    """A class, with the probability of each."""

    label: str
    scores: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """The class, and the probability of each."""
        return {"label": self.label, "scores": self.scores}

    def __str__(self) -> str:
        return f"{self.label} {self.scores[self.label]:.3f}"


@dataclass(frozen=True)
class Number(Prediction):
    """A number."""

    value: float

    def as_dict(self) -> dict[str, Any]:
        """The number."""
        return {"value": self.value}

    def __str__(self) -> str:
        return f"{self.value:.3f}"


class OfTexts(Task):
    """What classification and regression share: an `Example`, encoded as one row."""

    numbers: ClassVar[bool] = False

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Example]:
        """Texts, or pairs of texts, with a label."""
        return read_examples(
            source, options, labelled=labelled, regression=self.numbers, split=split
        )

    def example(self, fields: Sequence[str], options: DataOptions) -> Example:
        """One text, or two where training was on pairs."""
        if len(fields) < self.fields(options):
            raise DataError(
                "the adapter was trained on pairs of texts, and a second text is missing",
                hint='adapterhub predict DIR "first text" --pair "second text"',
            )
        return Example(*fields)

    def fields(self, options: DataOptions) -> int:
        """Two for pairs."""
        return 1 if options.pair is None else 2

    def shown(self, example: Example) -> list[str]:
        """The one text or the two."""
        return [example.text] if example.pair is None else [example.text, example.pair]

    def target(self, example: Example, labels: Sequence[str]) -> int | float:
        """The label as the model's loss takes it."""
        raise NotImplementedError

    def encode(self, examples: Sequence[Example], setting: Setting, *, labelled: bool) -> Encoded:
        """Pairs as the tokenizer joins them; what is too long is cut."""
        pairs = [e.pair for e in examples] if examples and examples[0].pair is not None else None
        texts = [e.text for e in examples]
        encoded = setting.tokenizer(texts, pairs, truncation=True, max_length=limit_of(setting))
        rows = rows_from_columns(encoded)
        if labelled:
            for row, example in zip(rows, examples, strict=True):
                row["labels"] = self.target(example, setting.labels)
        return one_row_each(self, examples, setting, rows)


@register_task
@dataclass(frozen=True)
class Classification(OfTexts):
    """One class for a text or a pair of texts."""

    name = "classification"
    summary = "one class for a text or a pair of texts"
    main_metric = "accuracy"

    def labels(self, train: Sequence[Example]) -> tuple[str, ...]:
        """The classes of the training data, sorted."""
        return tuple(labels_of(train))

    def check(self, labels: Sequence[str], examples: Sequence[Example]) -> None:
        """Two classes or more, and no others in evaluation."""
        check_labels(labels, (e.label for e in examples))

    def target(self, example: Example, labels: Sequence[str]) -> int:
        """The index of the label."""
        return labels.index(str(example.label))

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """The most probable class, and the probability of each (softmax)."""
        found: dict[int, Prediction] = {}
        for indices, _, output in forward(model, data, batch_size):
            for index, row in zip(indices, output.logits.float().softmax(-1).tolist(), strict=True):
                scores = dict(zip(data.setting.labels, row, strict=True))
                found[index] = Scored(max(scores, key=scores.__getitem__), scores)
        return [found[i] for i in range(len(found))]

    def metrics(
        self, examples: Sequence[Example], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """accuracy, macro_f1, matthews."""
        found = [p.label for p in predictions if isinstance(p, Scored)]
        return classification_metrics([str(e.label) for e in examples], found)


@register_task
@dataclass(frozen=True)
class Regression(OfTexts):
    """One number for a text or a pair of texts."""

    name = "regression"
    summary = "one number for a text or a pair of texts"
    main_metric = "pearson"
    numbers = True

    def target(self, example: Example, labels: Sequence[str]) -> float:
        """The number."""
        return float(example.label or 0.0)

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """The one output."""
        found: dict[int, Prediction] = {}
        for indices, _, output in forward(model, data, batch_size):
            values = output.logits.float().squeeze(-1).tolist()
            found |= zip(indices, map(Number, values), strict=True)
        return [found[i] for i in range(len(found))]

    def metrics(
        self, examples: Sequence[Example], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """pearson, spearman, mse."""
        found = [p.value for p in predictions if isinstance(p, Number)]
        return regression_metrics([float(e.label or 0.0) for e in examples], found)
