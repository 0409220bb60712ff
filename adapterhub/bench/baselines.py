"""Predictions without a backbone: the most frequent class or the mean, and a bag of words."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from adapterhub.bench.records import PredictedRows
from adapterhub.data.examples import data_hash
from adapterhub.errors import FileError
from adapterhub.files.atomic import replace_file
from adapterhub.pages.page import BAG_OF_WORDS
from adapterhub.pages.row_scores import GROUP
from adapterhub.training.word_baseline import MOST_FITTED, predict_by_words, reads_words

B = TypeVar("B")

CONSTANTS = "constants.json"
_OF_ROWS = ("label", GROUP, "query")  # columns of test rows that no prediction changes


@dataclass(frozen=True)
class Constant:
    """A constant prediction for every row.

    Attributes:
        name: its name in tables.
        kind: one of `pages.row_scores.KINDS`.
        value: the class, the number or the labels.
        share: the share of training rows with this class or these labels.
    """

    name: str
    kind: str
    value: Any
    share: float = 0.0

    def predict(self, rows: PredictedRows) -> PredictedRows:
        """Return the same test rows with this prediction."""
        count = len(rows.columns["label"])
        columns = {"prediction": [self.value] * count}
        if self.kind == "classes":
            columns["score"] = [self.share] * count
        return _predicted(rows, self.kind, columns)


def _predicted(rows: PredictedRows, kind: str, columns: Mapping[str, list[Any]]) -> PredictedRows:
    """Return the same test rows with other predictions."""
    kept = {n: rows.columns[n] for n in _OF_ROWS if n in rows.columns}
    outputs = {"output": columns["prediction"]} if "output" in rows.columns else {}
    return PredictedRows(kind, {**kept, **columns, **outputs})


def constant_of(kind: str, examples: Sequence[Any]) -> Constant | None:
    """Find the best constant prediction for training examples; None for kinds without one."""
    if not examples:
        return None
    if kind == "numbers":
        labels = [float(example.label or 0.0) for example in examples]
        return Constant("mean", kind, sum(labels) / len(labels))
    if kind == "classes":
        value, count = _most_frequent([str(example.label) for example in examples])
        return Constant("majority class", kind, value, count / len(examples))
    if kind == "sets":
        sets = [tuple(sorted(example.labels or ())) for example in examples]
        chosen, count = _most_frequent(sets)
        return Constant("most frequent labels", kind, list(chosen), count / len(examples))
    return None


def _most_frequent(labels: Sequence[Any]) -> tuple[Any, int]:
    """Return the most frequent label and its count; ties go to the first in order."""
    return min(Counter(labels).items(), key=lambda item: (-item[1], item[0]))


@dataclass(frozen=True)
class BagOfWords:
    """The predictions of a linear model on words: a baseline of seconds, without a backbone.

    Attributes:
        kind: one of `pages.row_scores.KINDS`.
        columns: the predictions for the test rows, by the number of training rows.
        data: the sha256 of the training and test rows.
    """

    kind: str
    columns: Mapping[int, Mapping[str, list[Any]]]
    data: str = ""
    name: ClassVar[str] = "bag of words"

    def predict(self, rows: PredictedRows, trained: int) -> PredictedRows | None:
        """Return the same test rows with these predictions; None if the number is missing."""
        columns = self.columns.get(trained)
        if columns is None or len(columns["prediction"]) != len(rows.columns["label"]):
            return None
        return _predicted(rows, self.kind, columns)


def bag_of_words(
    kind: str,
    train: Mapping[int, Sequence[Any]],
    test: Sequence[Any],
    known: BagOfWords | None = None,
) -> BagOfWords | None:
    """Fit a bag of words to each number of training rows; None for rows that are not texts.

    At most `MOST_FITTED` rows are fitted, the first ones. The result `known` for the same rows is
    reused.
    """
    if not reads_words(kind, chain(*train.values(), test)):
        return None
    fitted = {number: examples[:MOST_FITTED] for number, examples in train.items()}
    rows = [(number, data_hash(examples)) for number, examples in sorted(fitted.items())]
    data = hashlib.sha256(f"{kind} {rows} {data_hash(test)}".encode()).hexdigest()
    if known is not None and known.data == data:
        return known
    by_number = {
        number: columns
        for number, examples in fitted.items()
        if (columns := predict_by_words(kind, examples, test))
    }
    return BagOfWords(kind, by_number, data) if by_number else None


def write_baselines(
    folder: Path, constants: Mapping[str, Constant], words: Mapping[str, BagOfWords]
) -> None:
    """Write the baselines of a study's tasks, so that its report does not need training data."""
    for name, baselines in ((CONSTANTS, constants), (BAG_OF_WORDS, words)):
        content = {task: asdict(baseline) for task, baseline in baselines.items()}
        replace_file(folder / name, f"{json.dumps(content)}\n".encode())


def read_constants(folder: Path) -> dict[str, Constant]:
    """Read the constants of a study's tasks; empty if they were not written.

    Raises:
        FileError: the file is broken.
    """
    return _read(folder / CONSTANTS, lambda fields: Constant(**fields))


def read_bags_of_words(folder: Path) -> dict[str, BagOfWords]:
    """Read the bags of words of a study's tasks; empty if they were not written.

    Raises:
        FileError: the file is broken.
    """
    return _read(
        folder / BAG_OF_WORDS,
        lambda fields: BagOfWords(
            str(fields["kind"]),
            {int(n): dict(columns) for n, columns in fields["columns"].items()},
            str(fields.get("data", "")),
        ),
    )


def _read(path: Path, parse: Callable[[dict[str, Any]], B]) -> dict[str, B]:
    if not path.is_file():
        return {}
    try:
        content: Mapping[str, dict[str, Any]] = json.loads(path.read_bytes())
        return {task: parse(fields) for task, fields in content.items()}
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise FileError(
            f"{path} is broken: {error}",
            expected="the file as adapterhub bench wrote it",
            hint=f"delete {path}: the report is then made without these baselines",
        ) from error
