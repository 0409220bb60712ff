"""Multiple choice: the best of several choices for a text.

    example      a text, the choices, and the index of the right one
    row          one (text, choice) pair per choice; `labels`: the index
    prediction   the most probable choice, and all probabilities
    metrics      accuracy

Each (text, choice) pair gets one score from the same head; the softmax is over the choices (Devlin
et al. 2019, section 4.4, https://arxiv.org/abs/1810.04805).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adapterhub.config.options import option
from adapterhub.data.columns import WANTS, choose_columns, marked_choices
from adapterhub.data.examples import Grouped, read_rows, refuse, text_problem
from adapterhub.data.options import DataOptions
from adapterhub.data.tables import first_few
from adapterhub.errors import DataError
from adapterhub.tasks.common.base import (
    POOLING_HELP,
    Encoded,
    Pooling,
    Prediction,
    Task,
    register_task,
)
from adapterhub.tasks.common.batches import Passed, Row, Setting, limit_of, pad, rows_from_columns
from adapterhub.tasks.common.metrics import tied_share
from adapterhub.tasks.common.preview import tokens_line

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Choices(Grouped):
    """A text, the choices, and the index of the right one or None."""

    text: str
    choices: tuple[str, ...]
    label: int | None = None


@dataclass(frozen=True)
class Choice(Prediction):
    """A choice's index and text, and the probability of every choice."""

    index: int
    text: str
    scores: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the index and text of the choice, and all probabilities."""
        return {"choice": self.index, "chosen": self.text, "scores": list(self.scores)}

    @property
    def probability(self) -> float:
        """The probability of the choice."""
        return self.scores[self.index]

    def right(self, label: int | None) -> float:
        """Return 1 if this is the right choice, else 0; ties share it."""
        return 0.0 if label is None else tied_share(self.scores, label)

    def __str__(self) -> str:
        return " ".join(self.cells())

    def cells(self, every: bool = False) -> tuple[str, ...]:
        """Return the choice and its probability."""
        others = [f"{value:.3f}" for value in self.scores if every]
        return self.text, f"{self.probability:.3f}", *others

    def columns(self, every: bool = False) -> dict[str, Any]:
        """Return the choice and its probability; choices differ between rows."""
        columns = {"choice": self.index, "chosen": self.text, "probability": self.probability}
        return columns | ({"probabilities": list(self.scores)} if every else {})


@register_task
@dataclass(frozen=True)
class MultipleChoice(Task):
    """The best of several choices for a text.

    Rows of `train.jsonl`:

        {"text": "He lit the candle, and", "choices": ["it burned.", "it barked."], "label": "A"}
        {"text": "She opened the umbrella, as", "choices": ["it sang.", "it rained."], "label": 1}

    The label is the text of the choice, its index from 0 (from 1 if the labels count that way), or
    its letter. Choices may have marks that labels refer to, as in ARC: {"text": [...], "label":
    [...]}. All rows have the same number of choices.

    `predict` prints the choice and its probability:

        it burned. 0.874
        {"choice": 0, "chosen": "it burned.", "scores": [0.874, 0.126]}
    """

    name = "multiple-choice"
    summary = "which of several texts fits a text"
    main_metric = "accuracy"
    measures = ("accuracy",)
    columns = WANTS["choices"]
    has_scores = True
    outcomes = "choices"
    printed_fields = ("choice", "chosen", "scores")

    pooling: Pooling | None = option(None, POOLING_HELP)

    # Examples

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Choices]:
        """Read a text, its choices (several columns, or one with lists) and the label.

        The label is the text of a choice, its index from 0, or its letter from A.
        """
        choice = choose_columns(source, options, split, self.columns, labelled=labelled)
        options, table = choice.options, choice.table
        in_columns = not isinstance(options.choices, str)
        names = [*options.choices] if in_columns else [str(options.choices)]
        first = 0
        if labelled and table is not None and options.label_column in table.columns:
            cells = [] if in_columns else [*map(_length, table.column(names[0]))]
            first = first_number(table.column(options.label_column), len(names), cells)

        def build(text: Any, *values: Any) -> Choices:
            listed = list(values[: len(names)]) if in_columns else values[0]
            choices, marks = listed_choices(listed)
            refuse(
                text_problem(text, options.text_column, allow_empty=not labelled),
                choices_problem(choices, names, allow_empty=not labelled),
            )
            label = choice_index(values[-1], choices, marks, first) if labelled else None
            return Choices(text, tuple(choices), label)

        columns = [options.text_column, *names, *[options.label_column] * labelled]
        examples = read_rows(source, options, split, columns, build)
        _check_counts(source, examples)
        return examples

    def example(self, fields: Sequence[str], options: DataOptions) -> Choices:
        """Build an example from a text and its choices."""
        if len(fields) < 3:
            raise DataError(
                "multiple choice needs a text and two or more choices",
                hint='adapterhub predict ADAPTER "the text" --pair "one choice" --pair "another"',
            )
        return Choices(fields[0], tuple(fields[1:]))

    def fields(self, options: DataOptions) -> int:
        """Return 0: a text and any number of choices."""
        return 0

    def group_of(self, example: Choices) -> Hashable:
        """Return the text without its choices."""
        return example.text

    # Rows

    def rows_of(self, example: Choices, setting: Setting, *, labelled: bool) -> list[Row]:
        """Return one row, which holds one row per choice and has the length of the longest."""
        texts = [example.text] * len(example.choices)
        encoded = setting.tokenizer(
            texts, list(example.choices), truncation=True, max_length=limit_of(setting)
        )
        parts = rows_from_columns(encoded)
        row: Row = {"choices": parts, "input_ids": max((p["input_ids"] for p in parts), key=len)}
        return [row | ({"labels": example.label} if labelled else {})]

    def show_row(self, row: Row, setting: Setting) -> dict[str, str]:
        """Return the tokens of each choice, with the right one marked."""
        return {
            f"{'right' if i == row['labels'] else 'wrong'}, {i}": tokens_line(
                part["input_ids"], setting.tokenizer
            )
            for i, part in enumerate(row["choices"])
        }

    def collate(self, rows: Sequence[Row], setting: Setting) -> dict[str, Tensor]:
        """Pad the rows of all choices: (batch, choices, tokens)."""
        flat = pad([part for row in rows for part in row["choices"]], setting.tokenizer)
        batch = {k: v.view(len(rows), -1, v.shape[-1]) for k, v in flat.items()}
        labels = [{"labels": row["labels"]} for row in rows if "labels" in row]
        return batch | pad(labels, setting.tokenizer)

    # Predictions

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """Return one choice per example; the number of choices may differ on the command line."""
        uniform = len({len(e.choices) for e in data.examples}) == 1
        return super().predict(model, data, batch_size if uniform else 1)

    def read_output(self, data: Encoded, passed: Passed) -> Iterator[Prediction]:
        """Return the most probable choice, with the softmax over the choices."""
        scored = passed.output.logits.float().softmax(-1).tolist()
        for i, scores in zip(passed.indices, scored, strict=True):
            best = max(range(len(scores)), key=scores.__getitem__)
            yield Choice(best, data.examples[i].choices[best], tuple(scores))

    # Metrics

    def metrics(
        self, examples: Sequence[Choices], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """Compute the accuracy; ties share it."""
        both = zip(examples, (p for p in predictions if isinstance(p, Choice)), strict=True)
        return {"accuracy": math.fsum(p.right(e.label) for e, p in both) / len(examples)}

    def outcome(self, example: Choices, prediction: Prediction) -> dict[str, Any]:
        """Return the right and the predicted choice, and the predicted one's probability."""
        assert isinstance(prediction, Choice)
        label = None if example.label is None else example.choices[example.label]
        score = prediction.scores[prediction.index]
        return {
            "texts": [example.text],
            "label": label,
            "prediction": prediction.text,
            "score": score,
            "right": prediction.right(example.label),
        }


def choices_problem(choices: object, names: Sequence[str], *, allow_empty: bool) -> str:
    """Return the reason why a value is not a list of two or more choices, or ""."""
    if not isinstance(choices, list) or not all(isinstance(c, str) for c in choices):
        return f"{', '.join(map(repr, names))}: not a list of texts"
    if not allow_empty and not all(choice.strip() for choice in choices):
        return "a choice is empty"
    return "" if len(choices) > 1 else "fewer than two choices"


def listed_choices(value: object) -> tuple[Any, list[str]]:
    """Return the texts of choices, and their marks, if any.

    Choices with marks are {text: [...], label: [...]}, a list of {text: ..., label: ...}, or {A:
    ..., B: ...}.
    """
    if marked_choices(value):
        assert isinstance(value, dict)
        return [*value.values()], [*value]
    if (
        isinstance(value, list)
        and value
        and all(isinstance(v, dict) and "text" in v for v in value)
    ):
        value = {"text": [v["text"] for v in value], "label": [v.get("label") for v in value]}
    if not isinstance(value, dict) or not isinstance(value.get("text"), list):
        return value, []
    marks = value.get("label")
    return value["text"], [*map(str, marks)] if isinstance(marks, list) else []


def first_number(labels: Iterable[object], columns: int, lists: Sequence[int] = ()) -> int:
    """Return the number of the first choice: 1 if labels reach the last number without a 0.

    Choices are in `columns` columns, or in lists of the lengths `lists`. With lists, the labels
    must contain every number from 1.
    """
    numbers = {str(label).strip() for label in labels}
    if "0" in numbers:
        return 0
    if any(lists):
        return int({str(number) for number in range(1, max(lists) + 1)} <= numbers)
    return int(str(columns) in numbers)


def _length(cell: object) -> int:
    """Return the number of choices in a cell; 0 if labels refer to their marks."""
    return len(cell) if isinstance(cell, list) else 0


def choice_index(
    value: object, choices: Sequence[str], marks: Sequence[str] = (), first: int = 0
) -> int:
    """Return the index of a choice from its text, mark, number or letter.

    Numbers count from `first`; a mark is the key or label of a choice.

    Raises:
        ValueError: the value does not name a choice.
    """
    text = str(value).strip()
    if marks:
        if marks.count(text) != 1:
            raise ValueError(f"the label {text[:40]!r} is none of {', '.join(marks)}")
        return marks.index(text)
    if choices.count(text) == 1:
        return choices.index(text)
    index = _LETTERS.find(text) if len(text) == 1 and text.isalpha() else -1
    index = int(text) - first if text.isdecimal() else index
    if not 0 <= index < len(choices):
        raise ValueError(f"the label {text[:40]!r} is not a choice, an index from 0 or a letter")
    return index


def _check_counts(source: str, examples: Sequence[Choices]) -> None:
    counts = [len(example.choices) for example in examples]
    usual = max(set(counts), key=counts.count, default=0)
    unusual = [example for example in examples if len(example.choices) != usual]
    if unusual:
        raise DataError(
            f"{source} has rows with different numbers of choices",
            offenders=first_few([f"{e.text[:40]!r}: {len(e.choices)} choices" for e in unusual]),
            expected=f"{usual} choices in each row",
        )
