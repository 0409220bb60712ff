"""Predictions without a model: the most frequent class, or the mean, of the training labels."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adapterhub.bench.records import PredictedRows
from adapterhub.errors import FileError
from adapterhub.files.atomic import replace_file
from adapterhub.pages.predictions import GROUP

CONSTANTS = "constants.json"
_OF_ROWS = (GROUP, "query")  # what of test rows no prediction changes


@dataclass(frozen=True)
class Constant:
    """What is predicted for every row.

    Attributes:
        name: how a table names it.
        kind: one of `pages.predictions.KINDS`.
        value: the class, the number or the labels.
        share: of the training rows that have this class or these labels.
    """

    name: str
    kind: str
    value: Any
    share: float = 0.0

    def predict(self, rows: PredictedRows) -> PredictedRows:
        """Return the same test rows with this prediction."""
        true = rows.columns["label"]
        columns = {"label": true, "prediction": [self.value] * len(true)}
        columns |= {n: rows.columns[n] for n in _OF_ROWS if n in rows.columns}
        if "output" in rows.columns:
            columns["output"] = [self.value] * len(true)
        if self.kind == "classes":
            columns["score"] = [self.share] * len(true)
        return PredictedRows(self.kind, columns)


def constant_of(kind: str, examples: Sequence[Any]) -> Constant | None:
    """Find the best constant prediction of training examples; None for kinds without one."""
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
    """Return the most frequent label and its count; of several, the first in order."""
    return min(Counter(labels).items(), key=lambda item: (-item[1], item[0]))


def write_constants(folder: Path, constants: Mapping[str, Constant]) -> None:
    """Write the constants of a study's tasks, so that its report needs no training data."""
    content = {task: asdict(constant) for task, constant in constants.items()}
    replace_file(folder / CONSTANTS, f"{json.dumps(content)}\n".encode())


def read_constants(folder: Path) -> dict[str, Constant]:
    """Read the constants of a study's tasks; none if they were not written.

    Raises:
        FileError: the file is broken.
    """
    path = folder / CONSTANTS
    if not path.is_file():
        return {}
    try:
        content: Mapping[str, dict[str, Any]] = json.loads(path.read_bytes())
        return {task: Constant(**fields) for task, fields in content.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise FileError(
            f"{path} is broken: {error}",
            expected="the file as adapterhub bench wrote it",
            hint=f"delete {path}: the report is then made without these baselines",
        ) from error
