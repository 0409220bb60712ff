"""Reading examples: CSV, TSV, JSON lines, Parquet and Hugging Face Hub datasets, read strictly.

A broken line is an error that names the line, never a row dropped or a field shifted.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import math
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from adapterhub.data.options import DataOptions
from adapterhub.data.tables import first_few, read_table
from adapterhub.errors import DataError

E = TypeVar("E")

_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True)
class Example:
    """One text or pair of texts; the label is a class name, a number (regression) or unknown."""

    text: str
    pair: str | None = None
    label: str | float | None = None


def read_examples(
    source: str,
    options: DataOptions,
    *,
    labelled: bool,
    regression: bool = False,
    split: str = "train",
) -> list[Example]:
    """The examples in a file or Hub dataset, in order.

    Labels are strings as they stand in the data, without outer blanks (the class names of a Hub
    dataset that has them), or floats for `regression`. Without `labelled` the label column is not
    read. `split` is "train" or "eval", which stand for the options `train_split` and `eval_split`,
    or the name of a Hub split.

    Raises DataError where the source is missing, empty, broken or lacks a column, or where a text
    or label is missing or of a wrong kind.
    """
    named = [n for n in (options.text, options.pair) if n is not None]

    def build(*values: object) -> Example:
        texts, label = values[: len(named)], values[len(named) :]
        problems = [text_problem(v, n) for v, n in zip(texts, named, strict=True)]
        read, problem = _read_label(label[0], regression) if labelled else (None, "")
        refuse(*problems, problem)
        text, pair = (*texts, None)[:2]
        return Example(str(text), None if pair is None else str(pair), read)

    return read_rows(source, options, split, [*named, *[options.label] * labelled], build)


def read_rows(
    source: str,
    options: DataOptions,
    split: str,
    columns: Sequence[str],
    build: Callable[..., E],
) -> list[E]:
    """`build(*values)` of these columns for each row, in order.

    Raises DataError where the source cannot be read or lacks a column, and with every row that
    `build` refuses by a `ValueError`, whose arguments say what is wrong.
    """
    table = read_table(source, options, split)
    values = [list(column) for column in table.take(columns)]
    wrong: list[str] = []
    built = []
    for line, *row in zip(table.lines, *values, strict=True):
        try:
            built.append(build(*row))
        except ValueError as error:
            wrong += [f"{table.unit} {line}: {problem}" for problem in error.args]
    if wrong:
        raise DataError(f"{source} has rows that cannot be used", offenders=first_few(wrong))
    return built


def refuse(*problems: str) -> None:
    """Raise ValueError with the problems that are not empty, if there is one."""
    if found := [problem for problem in problems if problem]:
        raise ValueError(*found)


def read_texts(source: str, options: DataOptions, split: str = "eval") -> list[Example]:
    """The texts of a source, without labels; raises DataError as `read_examples` does."""
    return read_examples(source, options, labelled=False, split=split)


def sample(examples: Sequence[E], rows: int | None, seed: int) -> list[E]:
    """`rows` examples drawn with `seed`, in their first order; all, if there are not more."""
    if rows is not None and rows < 1:
        raise DataError(f"rows is {rows}", expected="1 or more, or null for all")
    if rows is None or rows >= len(examples):
        return list(examples)
    chosen = random.Random(seed).sample(range(len(examples)), rows)
    return [examples[i] for i in sorted(chosen)]


def labels_of(examples: Iterable[Example]) -> list[str]:
    """The distinct class labels, sorted; in the order of numbers if all are numbers."""
    labels = sorted({e.label for e in examples if isinstance(e.label, str)})
    if all(_NUMBER.fullmatch(label) for label in labels):
        labels.sort(key=float)
    return labels


def check_labels(train_labels: Sequence[str], eval_labels: Iterable[str | float | None]) -> None:
    """Raise DataError if training has fewer than two labels or evaluation has one it lacks."""
    if len(train_labels) < 2:
        raise DataError(
            f"the training data has {len(train_labels)} label(s)",
            offenders=[repr(label) for label in train_labels],
            expected="two or more classes",
            hint="check the option label, the name of the label column",
        )
    unseen = collections.Counter(label for label in eval_labels if label not in train_labels)
    if unseen:
        raise DataError(
            "the evaluation data has labels that the training data lacks",
            offenders=[f"{label!r}: {unseen[label]} time(s)" for label in sorted(unseen, key=str)],
            expected=f"one of {', '.join(first_few([repr(label) for label in train_labels]))}",
        )


def data_hash(examples: Iterable[Any]) -> str:
    """The sha256, in hex, of the examples as JSON lines of their fields, in order.

    That of an `Example` is `[text, pair, label]`.
    """
    digest = hashlib.sha256()
    for e in examples:
        values = [getattr(e, field.name) for field in dataclasses.fields(e)]
        row = json.dumps(values, separators=(",", ":"))
        digest.update(f"{row}\n".encode("ascii"))
    return digest.hexdigest()


def text_problem(value: object, column: str) -> str:
    """Why a value of a column is not text; "" if it is."""
    if value is None:
        return f"{column!r} is missing"
    if not isinstance(value, str):
        return f"{column!r} is a {type(value).__name__}, not text"
    if not value.isascii() and re.search("[\ud800-\udfff]", value):
        return f"{column!r} holds half of a surrogate pair, which is not Unicode text"
    return ""


def _read_label(value: object, regression: bool) -> tuple[str | float | None, str]:
    text = "" if value is None else str(value).strip()
    if not text or value != value:  # NaN is how a table of floats says missing.
        return None, "the label is empty"
    if not isinstance(value, (str, int, float)):
        return None, f"the label is a {type(value).__name__}, not a string or number"
    if not regression:
        return text, ""
    number = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(number):
        return None, f"the label {text[:40]!r} is not a number"
    return number, ""
