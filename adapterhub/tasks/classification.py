"""Classification and regression of a text or a pair of texts.

    example      a text or a pair, with a class name or a number
    row          the tokens, a pair joined by the tokenizer; `labels`: class index or number
    prediction   the most probable class and all probabilities; or a number
    metrics      accuracy, macro F1, Matthews; or Pearson, Spearman, mean squared error

A pair is one input: the model reads both texts together. Class weights weight each label by its
class in the cross-entropy, here and in other tasks with classes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from adapterhub.config.options import option
from adapterhub.data.columns import WANTS
from adapterhub.data.examples import Example, check_labels, labels_of, read_examples
from adapterhub.data.options import DataOptions, name_labels
from adapterhub.errors import ConfigError, DataError, did_you_mean
from adapterhub.tasks.common.base import (
    POOLING_HELP,
    Encoded,
    Pooling,
    Prediction,
    Task,
    one_row_each,
    register_task,
)
from adapterhub.tasks.common.batches import (
    IGNORED,
    Items,
    Loss,
    Passed,
    Setting,
    limit_of,
    rows_from_columns,
)
from adapterhub.tasks.common.metrics import classification_metrics, regression_metrics

if TYPE_CHECKING:
    from torch import Tensor


ClassWeights = Literal["balanced"] | dict[str, float] | None

WEIGHTS_HELP = (
    "weight of each class in the loss: balanced, or {name: weight} with 1 for the others "
    "(null: all labels alike)"
)


def weights_of(spec: ClassWeights, counts: Mapping[str, int]) -> list[float]:
    r"""Return the weight of each class, in the order of `counts`.

    `balanced` gives class c the weight n / (k n_c), with n labels, k classes and n_c labels of
    class c, so that all classes have the same total (King & Zeng 2001, section 4,
    https://doi.org/10.1093/oxfordjournals.pan.a004868).

    Raises:
        ConfigError: a weight names an unknown class, or all weights are 0.
        DataError: `balanced` was set, and a class has no training label.
    """
    if isinstance(spec, dict):
        if unknown := [name for name in spec if name not in counts]:
            raise ConfigError(
                "class_weights has classes that the data lacks",
                offenders=[f"{name!r}{did_you_mean(name, counts)}" for name in unknown],
                expected=f"some of {', '.join(counts)}",
            )
        weights = [spec.get(name, 1.0) for name in counts]
        if not any(weights):
            raise ConfigError("all class_weights are 0", expected="one or more above 0")
        return weights
    if empty := [name for name, count in counts.items() if not count]:
        raise DataError(
            "class_weights=balanced needs training labels of each class",
            offenders=[f"{name!r} has none" for name in empty],
            hint="leave the class out of --labels, or class_weights={name: weight}",
        )
    total = sum(counts.values())
    return [total / (len(counts) * count) for count in counts.values()]


def weighted_loss(weights: list[float]) -> Loss:
    """Return the cross-entropy with class weights, as in `torch.nn.CrossEntropyLoss(weight)`.

    Its mean is over the weights of the labels: sum(w_y * -log p_y) / sum(w_y).
    """

    def loss(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        import torch
        import torch.nn.functional as F

        logits = output.logits.flatten(0, -2).float()
        labels = batch["labels"].flatten()
        weight = logits.new_tensor(weights)
        # Labels without weight do not count in a step: any finite loss will do.
        counts = weight[labels[labels != IGNORED]].any()
        weight = torch.where(counts, weight, torch.ones_like(weight))
        return F.cross_entropy(logits, labels, weight=weight, ignore_index=IGNORED)

    return loss


@dataclass(frozen=True)
class WeighsClasses(Task):
    """A task with the option `class_weights`."""

    class_weights: ClassWeights = option(None, WEIGHTS_HELP)

    def __post_init__(self) -> None:
        if isinstance(self.class_weights, dict):
            _check_weights(self.class_weights)

    def loss(self, train: Encoded) -> Loss | None:
        """Return the cross-entropy with class weights, or None without weights."""
        return None if self.class_weights is None else weighted_loss(self._weights(train))

    def loss_items(self, train: Encoded) -> Items:
        """Return a function that sums the class weights of the labels."""
        if self.class_weights is None:
            return super().loss_items(train)
        weights = self._weights(train)
        return lambda batch: sum(weights[i] for i in batch["labels"].flatten().tolist() if i >= 0)

    def _weights(self, train: Encoded) -> list[float]:
        assert self.class_weights is not None
        return weights_of(self.class_weights, self.label_counts(train))


def _check_weights(weights: Mapping[str, float]) -> None:
    """Refuse weights that are negative or not finite."""
    wrong = [f"{k}: {v}" for k, v in weights.items() if not (math.isfinite(v) and v >= 0)]
    if wrong:
        raise ConfigError("invalid class_weights", offenders=wrong, expected="numbers from 0")


@dataclass(frozen=True)
class Scored(Prediction):
    """A class, and the probability of every class."""

    label: str
    scores: dict[str, float]

    @property
    def probability(self) -> float:
        """The probability of the class."""
        return self.scores[self.label]

    def as_dict(self) -> dict[str, Any]:
        """Return the class and the probability of every class."""
        return {"label": self.label, "scores": self.scores}

    def __str__(self) -> str:
        return " ".join(self.cells())

    def cells(self, every: bool = False) -> tuple[str, ...]:
        """Return the class and its probability."""
        return self.label, f"{self.probability:.3f}", *score_cells(self.scores, every)

    def columns(self, every: bool = False) -> dict[str, Any]:
        """Return the class and its probability."""
        columns = {"label": self.label, "probability": self.probability}
        return columns | score_columns(self.scores, every)


@dataclass(frozen=True)
class Number(Prediction):
    """A number."""

    value: float

    def as_dict(self) -> dict[str, Any]:
        """Return the number."""
        return {"value": self.value}

    def __str__(self) -> str:
        return f"{self.value:.3f}"


def score_cells(scores: Mapping[str, float], every: bool) -> tuple[str, ...]:
    """Return `NAME 0.123` for each label, or nothing."""
    return tuple(f"{name} {value:.3f}" for name, value in scores.items() if every)


def score_columns(scores: Mapping[str, float], every: bool) -> dict[str, float]:
    """Return a column with the probability of each label, or nothing."""
    return {f"probability of {name}": value for name, value in scores.items() if every}


class OfTexts(Task):
    """The examples and rows of classification and regression: one row per `Example`."""

    numbers: ClassVar[bool] = False
    groups = "different texts"
    columns = WANTS["classes"]

    # Examples

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Any]:
        """Read texts or pairs of texts, with a label."""
        examples = read_examples(
            source, options, labelled=labelled, regression=self.numbers, split=split
        )
        if self.numbers or not labelled:
            return examples
        names = name_labels((str(e.label) for e in examples), options, source)
        return [replace(e, label=name) for e, name in zip(examples, names, strict=True)]

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

    def group_of(self, example: Any) -> Hashable:
        """Return the text, or the first one of a pair."""
        return str(example.text)

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

    def target(self, example: Any, labels: Sequence[str]) -> Any:
        """Return the label in the form that the model's loss expects."""
        raise NotImplementedError


class OneClass(Task):
    """The metrics of tasks that predict one class per example, its `label`."""

    outcomes = "classes"
    main_metric = "accuracy"
    measures = ("accuracy", "macro_f1", "matthews")
    has_labels = has_scores = True
    printed_fields = ("label", "scores")

    def metrics(
        self, examples: Sequence[Any], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """Compute accuracy, macro_f1 and matthews."""
        classes = [p.label for p in predictions if isinstance(p, Scored)]
        return classification_metrics([str(e.label) for e in examples], classes)

    def outcome(self, example: Any, prediction: Prediction) -> dict[str, Any]:
        """Return the true and the predicted class, and the probability of the latter."""
        assert isinstance(prediction, Scored)
        label, predicted = str(example.label), prediction.label
        score, texts = prediction.scores[predicted], self.shown(example)
        return {"texts": texts, "label": label, "prediction": predicted, "score": score}


@dataclass(frozen=True)
class HasClasses(WeighsClasses, OneClass):
    """One class for each example: the head has an output for each class of the training data."""

    def labels(self, train: Sequence[Any]) -> tuple[str, ...]:
        """Return the classes of the training data, sorted."""
        return tuple(labels_of(train))

    def check(self, labels: Sequence[str], examples: Sequence[Any]) -> None:
        """Reject fewer than two classes, and evaluation classes missing from training."""
        check_labels(labels, (e.label for e in examples))

    def read_output(self, data: Encoded, passed: Passed) -> Iterator[Prediction]:
        """Return the most probable class, with the softmax over all classes."""
        for row in passed.output.logits.float().softmax(-1).tolist():
            yield best_of(dict(zip(data.setting.labels, row, strict=True)))


@register_task
@dataclass(frozen=True)
class Classification(HasClasses, OfTexts):
    """One class per text or pair of texts.

    Rows of `train.csv`:

        text,label
        a joy to watch,positive
        "dull, and far too long",negative

    Classes are the values of the label column; `data.labels` names and orders them. Rare classes
    get more weight with `class_weights: balanced`.

    `predict` prints the class and its probability:

        positive 0.981
        {"label": "positive", "scores": {"negative": 0.019, "positive": 0.981}}
    """

    pooling: Pooling | None = option(None, POOLING_HELP)

    name = "classification"
    summary = "one class per text or pair of texts"

    # Rows

    def target(self, example: Example, labels: Sequence[str]) -> int:
        """Return the index of the class."""
        return labels.index(str(example.label))


@register_task
@dataclass(frozen=True)
class Regression(OfTexts):
    """One number per text or pair of texts.

    Rows of `train.csv`:

        text,label
        a joy to watch,4.5
        "dull, and far too long",1.0

    The head has one output, and the loss is the squared error. Numbers are not rescaled.

    `predict` prints the number:

        4.213
        {"value": 4.213}
    """

    name = "regression"
    summary = "one number per text or pair of texts"
    main_metric = "pearson"
    measures: ClassVar[tuple[str, ...]] = ("pearson", "spearman", "mse")
    lower_is_better = frozenset({"mse"})
    numbers = True
    printed_fields = ("value",)
    columns = WANTS["numbers"]
    outcomes = "numbers"

    pooling: Pooling | None = option(None, POOLING_HELP)

    # Rows

    def target(self, example: Example, labels: Sequence[str]) -> float:
        """Return the number."""
        return float(example.label or 0.0)

    # Predictions

    def read_output(self, data: Encoded, passed: Passed) -> Iterator[Prediction]:
        """Return the single output of the head."""
        return map(Number, passed.output.logits.float().squeeze(-1).tolist())

    # Metrics

    def metrics(
        self, examples: Sequence[Example], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """Compute pearson, spearman and mse."""
        values = [p.value for p in predictions if isinstance(p, Number)]
        return regression_metrics([float(e.label or 0.0) for e in examples], values)

    def outcome(self, example: Example, prediction: Prediction) -> dict[str, Any]:
        """Return the label and the predicted number."""
        assert isinstance(prediction, Number)
        label = float(example.label or 0.0)
        return {"texts": self.shown(example), "label": label, "prediction": prediction.value}


def best_of(scores: dict[str, float]) -> Scored:
    """Return the most probable class with all probabilities."""
    return Scored(max(scores, key=scores.__getitem__), scores)
