"""Multiple choice: which of several texts goes with a text.

Each choice is encoded with the text as a pair and gets one score from the same head; the choices'
scores go through one softmax (Devlin et al. 2019, section 4.4, https://arxiv.org/abs/1810.04805).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from adapterhub.data.examples import read_rows, refuse, text_problem
from adapterhub.data.options import DataOptions
from adapterhub.data.tables import first_few
from adapterhub.errors import DataError
from adapterhub.tasks._base import (
    Encoded,
    Prediction,
    Row,
    Setting,
    Task,
    forward,
    limit_of,
    one_row_each,
    pad,
    register_task,
    rows_from_columns,
)
from adapterhub.tasks._metrics import classification_metrics

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Choices:
    """A text, the choices, and the index of the right one if it is known."""

    text: str
    choices: tuple[str, ...]
    label: int | None = None


@dataclass(frozen=True)
class Choice(Prediction):
    """The index and the text of a choice, and the probability of each."""

    index: int
    text: str
    scores: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        """The choice by index and text, and the probability of each."""
        return {"choice": self.index, "chosen": self.text, "scores": list(self.scores)}

    def __str__(self) -> str:
        return f"{self.text} {self.scores[self.index]:.3f}"


@register_task
@dataclass(frozen=True)
class MultipleChoice(Task):
    """Which of several texts goes with a text."""

    name = "multiple-choice"
    summary = "which of several texts goes with a text"
    main_metric = "accuracy"

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Choices]:
        """A column with the text, choices in columns or in one list, and the label: the text of
        a choice, its index from 0, or its letter from A."""
        several = not isinstance(options.choices, str)
        names = [*options.choices] if several else [str(options.choices)]

        def build(text: Any, *values: Any) -> Choices:
            given = values[: len(names)]
            choices = list(given) if several else given[0]
            refuse(text_problem(text, options.text), _choices_problem(choices, names))
            label = _label(values[-1], choices) if labelled else None
            return Choices(text, tuple(choices), label)

        columns = [options.text, *names, *[options.label] * labelled]
        examples = read_rows(source, options, split, columns, build)
        _check_counts(source, examples)
        return examples

    def example(self, fields: Sequence[str], options: DataOptions) -> Choices:
        """A text and its choices."""
        if len(fields) < 3:
            raise DataError(
                "a choice needs a text and two choices or more",
                hint='adapterhub predict DIR "the text" --pair "one choice" --pair "another"',
            )
        return Choices(fields[0], tuple(fields[1:]))

    def fields(self, options: DataOptions) -> int:
        """The text, and any number of choices."""
        return 0

    def encode(self, examples: Sequence[Choices], setting: Setting, *, labelled: bool) -> Encoded:
        """A row an example, with a row a choice in it; the longest decides its length."""
        rows: list[Row] = []
        for example in examples:
            texts = [example.text] * len(example.choices)
            encoded = setting.tokenizer(
                texts, list(example.choices), truncation=True, max_length=limit_of(setting)
            )
            parts = rows_from_columns(encoded)
            row: Row = {
                "choices": parts,
                "input_ids": max((p["input_ids"] for p in parts), key=len),
            }
            if labelled:
                row["labels"] = example.label
            rows.append(row)
        return one_row_each(self, examples, setting, rows)

    def collate(self, rows: Sequence[Row], setting: Setting) -> dict[str, Tensor]:
        """(batch, choices, tokens)."""
        flat = pad([part for row in rows for part in row["choices"]], setting.tokenizer)
        batch = {k: v.view(len(rows), -1, v.shape[-1]) for k, v in flat.items()}
        labels = [{"labels": row["labels"]} for row in rows if "labels" in row]
        return batch | pad(labels, setting.tokenizer)

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """The most probable choice (softmax over the choices)."""
        found: dict[int, Prediction] = {}
        # Typed examples may differ in their number of choices: then each is a batch of its own.
        same = len({len(e.choices) for e in data.examples}) == 1
        for indices, _, output in forward(model, data, batch_size if same else 1):
            for i, scores in zip(indices, output.logits.float().softmax(-1).tolist(), strict=True):
                best = max(range(len(scores)), key=scores.__getitem__)
                found[i] = Choice(best, data.examples[i].choices[best], tuple(scores))
        return [found[i] for i in range(len(found))]

    def metrics(
        self, examples: Sequence[Choices], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """accuracy."""
        found = [p.index for p in predictions if isinstance(p, Choice)]
        known = [-1 if e.label is None else e.label for e in examples]
        return {"accuracy": classification_metrics(known, found)["accuracy"]}


def _choices_problem(choices: object, names: Sequence[str]) -> str:
    if not isinstance(choices, list) or not all(isinstance(c, str) for c in choices):
        return f"{', '.join(map(repr, names))}: not a list of texts"
    return "" if len(choices) > 1 else "there are less than two choices"


def _label(value: object, choices: Sequence[str]) -> int:
    text = str(value).strip()
    if choices.count(text) == 1:
        return choices.index(text)
    index = _LETTERS.find(text) if len(text) == 1 and text.isalpha() else -1
    index = int(text) if text.isdecimal() else index
    if not 0 <= index < len(choices):
        raise ValueError(f"the label {text[:40]!r} is no choice, no index from 0 and no letter")
    return index


def _check_counts(source: str, examples: Sequence[Choices]) -> None:
    counts = [len(e.choices) for e in examples]
    odd = [f"{e.text[:40]!r}: {n} choices" for e, n in zip(examples, counts, strict=True)]
    if len(set(counts)) > 1:
        usual = max(set(counts), key=counts.count)
        raise DataError(
            f"{source} has rows with another number of choices",
            offenders=first_few([o for o, n in zip(odd, counts, strict=True) if n != usual]),
            expected=f"{usual} choices in each row",
        )
