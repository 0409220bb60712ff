"""Tasks: what examples are, how they become tensors, and what the model's outputs mean.

A task is one class: its examples come from `data.py`, its metrics from `metrics.py`, and its head
is the one that `load_backbone` gives for the task's name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from adapterhub.errors import ConfigError, did_you_mean
from adapterhub.training.data import Example, check_labels, labels_of
from adapterhub.training.metrics import classification_metrics, regression_metrics


@dataclass(frozen=True)
class Prediction:
    """What a model says of one text: a label with the score of each class, or a number."""

    label: str | float
    scores: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """For JSON lines."""
        return (
            {"label": self.label, "scores": self.scores} if self.scores else {"value": self.label}
        )


class Task(ABC):
    """One kind of task."""

    name: ClassVar[str]
    main_metric: ClassVar[str]
    regression: ClassVar[bool] = False

    @abstractmethod
    def labels(self, train: Sequence[Example], evaluation: Sequence[Example]) -> tuple[str, ...]:
        """The classes, in the order of the logits; () if the task has none.

        Raises:
            DataError: labels that cannot be trained on, or are unseen in training.
        """

    @abstractmethod
    def targets(self, examples: Sequence[Example], labels: Sequence[str]) -> Tensor:
        """The labels as the model's loss takes them: (batch,)."""

    @abstractmethod
    def predict(self, logits: Tensor, labels: Sequence[str]) -> list[Prediction]:
        """logits: (batch, outputs) -> one prediction a row."""

    @abstractmethod
    def metrics(
        self, examples: Sequence[Example], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """The metrics of predictions against the examples' labels."""


class Classification(Task):
    """One class for a text or a pair of texts."""

    name = "classification"
    main_metric = "accuracy"

    def labels(self, train: Sequence[Example], evaluation: Sequence[Example]) -> tuple[str, ...]:
        """The classes of the training data, sorted."""
        names = labels_of(train)
        check_labels(names, evaluation)
        return tuple(names)

    def targets(self, examples: Sequence[Example], labels: Sequence[str]) -> Tensor:
        """The index of each label."""
        index = {label: i for i, label in enumerate(labels)}
        return torch.tensor([index[str(example.label)] for example in examples])

    def predict(self, logits: Tensor, labels: Sequence[str]) -> list[Prediction]:
        """The most probable class, and the probability of each (softmax)."""
        rows = logits.float().softmax(-1).tolist()
        scored = [dict(zip(labels, row, strict=True)) for row in rows]
        return [Prediction(max(scores, key=scores.__getitem__), scores) for scores in scored]

    def metrics(
        self, examples: Sequence[Example], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """accuracy, macro_f1, matthews."""
        found = [str(p.label) for p in predictions]
        return classification_metrics([str(e.label) for e in examples], found)


class Regression(Task):
    """One number for a text or a pair of texts."""

    name = "regression"
    main_metric = "pearson"
    regression = True

    def labels(self, train: Sequence[Example], evaluation: Sequence[Example]) -> tuple[str, ...]:
        """None."""
        return ()

    def targets(self, examples: Sequence[Example], labels: Sequence[str]) -> Tensor:
        """The numbers."""
        return torch.tensor([float(example.label or 0.0) for example in examples])

    def predict(self, logits: Tensor, labels: Sequence[str]) -> list[Prediction]:
        """The one output."""
        return [Prediction(value, {}) for value in logits.float().squeeze(-1).tolist()]

    def metrics(
        self, examples: Sequence[Example], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """pearson, spearman, mse."""
        found = [float(p.label) for p in predictions]
        return regression_metrics([float(e.label or 0.0) for e in examples], found)


TASKS: dict[str, Task] = {task.name: task for task in (Classification(), Regression())}


def task_of(name: str) -> Task:
    """The task of a name.

    Raises:
        ConfigError: there is none.
    """
    if name not in TASKS:
        raise ConfigError(
            f"no task is called {name!r}{did_you_mean(name, TASKS)}",
            expected=f"one of {', '.join(TASKS)}",
        )
    return TASKS[name]


class Encoded:
    """Examples as token ids: cut to `max_length`, padded a batch at a time."""

    def __init__(
        self, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, max_length: int
    ) -> None:
        self.examples = tuple(examples)
        self.tokenizer = tokenizer
        pairs = [e.pair for e in examples] if examples and examples[0].pair is not None else None
        limit = min(max_length, tokenizer.model_max_length)
        encoded = tokenizer([e.text for e in examples], pairs, truncation=True, max_length=limit)
        self.rows = [
            dict(zip(encoded, row, strict=True)) for row in zip(*encoded.values(), strict=True)
        ]
        self.lengths = [len(row["input_ids"]) for row in self.rows]

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """The model's inputs for some examples, padded to the longest of them: (batch, tokens)."""
        keys = self.rows[0] if self.rows else ()
        rows = {key: [self.rows[index][key] for index in indices] for key in keys}
        return dict(self.tokenizer.pad(rows, return_tensors="pt"))
