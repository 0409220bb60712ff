"""Examples from text tables, JSON, Parquet and Hugging Face Hub datasets, read strictly.

A malformed line raises an error with its line number; no field is shifted, and no row is dropped
unless the option `skip_empty` says so.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import math
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from adapterhub.data.columns import WANTS, choose_columns
from adapterhub.data.options import NO_GROUPS, PREDICT, DataOptions
from adapterhub.data.table import Table, first_few
from adapterhub.data.tables import read_table
from adapterhub.errors import DataError, counted

E = TypeVar("E")

_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """An example of a group that the data name; None: what the task holds out together."""

    group: str | None = dataclasses.field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Example(Grouped):
    """One text or text pair with a class name, a number (regression) or no label."""

    text: str
    pair: str | None = None
    label: str | float | None = None


class Streamed(ABC):
    """Examples that are read from disk one after the other: their digest is known."""

    @property
    @abstractmethod
    def sha256(self) -> str:
        """The sha256 of their content."""


def read_examples(
    source: str,
    options: DataOptions,
    *,
    labelled: bool,
    regression: bool = False,
    split: str = "train",
) -> list[Example]:
    """Read the examples in a file or Hub dataset, in order.

    Labels are floats for `regression`, else stripped texts, or the class names of a Hub dataset.

    Raises:
        DataError: the source is missing, empty or malformed, lacks a column, or has missing texts
            or labels or ones of the wrong type, or empty texts with a label.
    """
    wants = WANTS["numbers" if regression else "classes"]
    choice = choose_columns(source, options, split, wants, labelled=labelled)
    options, commas = choice.options, choice.table is not None and choice.table.decimal_comma
    text_columns = [name for name in (options.text, options.pair) if name is not None]
    columns = [*text_columns, options.label_column] if labelled else text_columns

    def build(*values: object) -> Example:
        texts, labels = values[: len(text_columns)], values[len(text_columns) :]
        problems = [
            text_problem(value, name, allow_empty=not labelled)
            for value, name in zip(texts, text_columns, strict=True)
        ]
        label, problem = parse_label(labels[0], regression, commas) if labels else (None, "")
        if problem or any(problems):
            refuse(*problems, problem)
        text, pair = (*texts, None)[:2]
        return Example(text, pair, label)  # type: ignore[arg-type]

    return read_rows(source, options, split, columns, build)


def read_rows(
    source: str,
    options: DataOptions,
    split: str,
    columns: Sequence[str],
    build: Callable[..., E],
) -> list[E]:
    """Build an example from each row's values of the columns, in order.

    `build` reports an invalid row as a `ValueError` with one argument per problem.

    Raises:
        DataError: the source cannot be read, lacks a column or has invalid rows; lists all of them.
    """
    table = read_table(source, options, split)
    values = [list(column) for column in table.take(columns)]
    groups = _groups(table, options, split)
    problems: list[str] = []
    empty = 0
    examples = []
    for line, group, *row in zip(table.lines, groups, *values, strict=True):
        try:
            example = build(*row)
            examples.append(example if group is None else _in_group(example, group))
        except ValueError as error:
            is_empty = all(isinstance(problem, EmptyCell) for problem in error.args)
            empty += is_empty
            if not (is_empty and options.skip_empty):
                problems += [f"{table.unit} {line}: {problem}" for problem in error.args]
    if problems:
        skip = f"data.skip_empty=true skips the {empty:,} with an empty cell"
        skip = skip if empty and split != PREDICT else ""
        raise DataError(
            f"{source} has invalid rows",
            offenders=first_few(problems),
            hint=skip or "correct or delete these rows",
        )
    if not examples:
        raise AllEmpty(f"{source} has empty cells in all of its {len(table.lines):,} rows")
    return examples


def _groups(table: Table, options: DataOptions, split: str) -> Iterable[object]:
    """Return the cell of each row that `data.group` names; evaluation data may lack the column."""
    column = options.group
    if column in (None, NO_GROUPS) or (split != "train" and column not in table.columns):
        return [None] * len(table.lines)
    return next(iter(table.take([str(column)])))


def _in_group(example: E, group: object) -> E:
    """Return an example of a group.

    Raises:
        ValueError: the cell is no name or number.
    """
    if group != group or not str(group).strip():  # NaN marks a missing number
        return example
    if not isinstance(group, str | int | float):
        raise ValueError(f"the group has type {type(group).__name__}, expected a name or number")
    return dataclasses.replace(example, group=str(group).strip())  # type: ignore[type-var]


class AllEmpty(DataError):
    """Every row has an empty cell, and was skipped."""


class EmptyCell(str):
    """A problem of a row that the option `skip_empty` leaves out: a cell is empty."""


def refuse(*problems: str) -> None:
    """Raise a ValueError with the non-empty problems, if any."""
    if nonempty := [problem for problem in problems if problem]:
        raise ValueError(*nonempty)


def read_texts(source: str, options: DataOptions, split: str = "eval") -> list[Example]:
    """Read the texts of a source, without labels.

    Raises:
        DataError: as in `read_examples`.
    """
    choice = choose_columns(source, options, split, WANTS["texts"], labelled=False)
    return read_examples(source, choice.options, labelled=False, split=split)


def sample(examples: Sequence[E], rows: int | None, seed: int) -> list[E]:
    """Draw a random subset of so many examples, in their original order; None draws all.

    Raises:
        DataError: `rows` is less than 1.
    """
    if rows is not None and rows < 1:
        raise DataError(f"rows is {rows}", expected="1 or more, or null for all")
    if rows is None or rows >= len(examples):
        return list(examples)
    indices = random.Random(seed).sample(range(len(examples)), rows)
    return [examples[i] for i in sorted(indices)]


def labels_of(examples: Iterable[Example]) -> list[str]:
    """List the distinct class labels, sorted; numerically if all are numbers."""
    return sorted_labels(e.label for e in examples if isinstance(e.label, str))


def sorted_labels(values: Iterable[str]) -> list[str]:
    """List distinct labels, sorted; numerically if all are numbers."""
    labels = sorted(set(values))
    if all(_NUMBER.fullmatch(label) for label in labels):
        labels.sort(key=float)
    return labels


def check_labels(train_labels: Sequence[str], eval_labels: Iterable[str | float | None]) -> None:
    """Refuse fewer than two training labels, and evaluation labels that training lacks.

    Raises:
        DataError: the labels are refused.
    """
    if len(train_labels) < 2:
        raise DataError(
            f"the training data has {counted(len(train_labels), 'label')}",
            offenders=[repr(label) for label in train_labels],
            expected="two or more classes",
            hint="check the option label, the name of the label column",
        )
    unseen = collections.Counter(label for label in eval_labels if label not in train_labels)
    if unseen:
        raise DataError(
            "the evaluation data has labels that the training data lacks",
            offenders=[
                f"{label!r}: {counted(unseen[label], 'time')}" for label in sorted(unseen, key=str)
            ],
            expected=f"one of {', '.join(first_few([repr(label) for label in train_labels]))}",
        )


def data_hash(examples: Iterable[Any]) -> str:
    """Return the sha256, in hex, of the examples as JSON lines of their fields, in order.

    The line of an `Example` is `[text, pair, label]`. Fields that do not compare are no content.
    """
    if isinstance(examples, Streamed):
        return examples.sha256
    digest = hashlib.sha256()
    for example in examples:
        fields = (field.name for field in dataclasses.fields(example) if field.compare)
        values = [getattr(example, name) for name in fields]
        row = json.dumps(values, separators=(",", ":"))
        digest.update(f"{row}\n".encode("ascii"))
    return digest.hexdigest()


def text_problem(value: object, column: str, *, allow_empty: bool) -> str:
    """Describe why a value of a column is not text, or return "".

    In any format, an empty text is the same as a missing one where it would be learned from.
    """
    if value is None:
        return EmptyCell(f"{column!r} is missing")
    if not isinstance(value, str):
        return f"{column!r} has type {type(value).__name__}, expected text"
    if not value.isascii() and re.search("[\ud800-\udfff]", value):
        return f"{column!r} contains a lone surrogate, which is not valid Unicode"
    return "" if allow_empty or value.strip() else EmptyCell(f"{column!r} is empty")


def parse_label(
    value: object, regression: bool = False, decimal_comma: bool = False
) -> tuple[str | float | None, str]:
    """Return the label of a cell, or None and the problem with it."""
    text = "" if value is None else str(value).strip()
    if not text or value != value:  # NaN marks a missing float
        return None, EmptyCell("the label is empty")
    if not isinstance(value, (str, int, float)):
        return None, f"the label has type {type(value).__name__}, expected a string or number"
    if not regression:
        return text, ""
    if decimal_comma and text.count(",") == 1 and "." not in text:
        text = text.replace(",", ".")
    number = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(number):
        return None, f"the label {text[:40]!r} is not a number"
    return number, ""
