"""`predictions.jsonl` in a run folder: what the best tensors predict on the evaluation data.

The first line describes the file, each other line is what `Task.outcome` returns for one example.
It contains the user's texts: it is never part of an adapter, and never published.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterhub.errors import FileError
from adapterhub.files.atomic import UnreadableError, read_lines

if TYPE_CHECKING:
    from adapterhub.tasks import Prediction, Task

PREDICTIONS = "predictions.jsonl"
FORMAT = 1
KINDS = ("classes", "sets", "choices", "numbers", "spans", "texts", "losses", "pictures")
PICTURE = "picture"  # the field of a picture, as the text of an address (data:)
GROUP = "group"  # the field with the number of the group, such as a query, that a row is of
_ADDRESS = re.compile(r"(data:image/png;base64,[A-Za-z0-9+/]+=*)?")
_MOST_TEXT = 4000  # characters that are kept of a text
MOST_BYTES = 4 << 30

Outcome = dict[str, Any]
"""One example: `texts`, its `group`, and by kind `label`, `prediction`, `score`, `loss`, ..."""


@dataclass(frozen=True)
class PredictionFile:
    """What a predictions file holds.

    Attributes:
        kind: one of `KINDS`.
        task: the task's name.
        step: the step that the predictions are of.
        data: the sha256 of the evaluation data.
        metric: the main metric of the task.
        labels: the classes, or none.
        rows: one outcome per example, in order.
    """

    kind: str
    task: str
    step: int
    data: str
    metric: str
    labels: tuple[str, ...]
    rows: list[Outcome]

    @property
    def only_class(self) -> str | None:
        """The class that is predicted for every row, if the rows have several."""
        predicted = {row["prediction"] for row in self.rows} if self.kind == "classes" else set()
        several = len({row["label"] for row in self.rows}) > 1 if predicted else False
        return str(*predicted) if several and len(predicted) == 1 else None

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        head = {"format": FORMAT, "kind": self.kind, "task": self.task, "step": self.step}
        head |= {"data": self.data, "metric": self.metric, "labels": list(self.labels)}
        head["rows"] = len(self.rows)
        return "".join(f"{json.dumps(line)}\n" for line in (head, *self.rows)).encode()


def outcomes_of(
    task: Task,
    examples: Sequence[Any],
    predictions: Sequence[Prediction],
    labels: Sequence[str],
    step: int,
) -> PredictionFile | None:
    """Build the predictions file of an evaluation; None if there is not one for each example."""
    from adapterhub.data.examples import data_hash

    if not task.outcomes or len(predictions) != len(examples):
        return None
    rows = [
        {"id": i, **_json_ready(task.outcome(example, prediction))}
        for i, (example, prediction) in enumerate(zip(examples, predictions, strict=True))
    ]
    numbers: dict[Hashable, int] = {}
    groups = [numbers.setdefault(each, len(numbers)) for each in task.groups_of(examples)]
    if len(numbers) < len(rows):
        rows = [row | {GROUP: group} for row, group in zip(rows, groups, strict=True)]
    digest, metric = data_hash(examples), task.main_metric
    return PredictionFile(task.outcomes, task.name, step, digest, metric, tuple(labels), rows)


def read_predictions(folder: Path) -> PredictionFile | None:
    """Read the predictions file of a run folder; None if it has none.

    Raises:
        FileError: the file is broken.
    """
    path = folder / PREDICTIONS
    if not path.exists():
        return None
    try:
        head, *rows = map(json.loads, read_lines(path, MOST_BYTES))
        _check(head, rows)
    except (UnreadableError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise FileError(
            f"{path} is broken: {error}",
            expected="the file as the run wrote it",
            hint=f"delete {path}: the report is then made without predictions",
        ) from error
    labels = tuple(map(str, head["labels"]))
    task, digest, metric = (str(head[name]) for name in ("task", "data", "metric"))
    return PredictionFile(head["kind"], task, head["step"], digest, metric, labels, rows)


_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "classes": {"label": (str,), "prediction": (str,), "score": (int, float)},
    "sets": {"label": (list,), "prediction": (list,), "scores": (dict,)},
    "choices": {
        "label": (str,),
        "prediction": (str,),
        "score": (int, float),
        "right": (bool, int, float),
    },
    "numbers": {"label": (int, float), "prediction": (int, float)},
    "spans": {"label": (list,), "prediction": (list,)},
    "texts": {"label": (str,), "prediction": (str,), "score": (int, float)},
    "losses": {"loss": (int, float), "tokens": (int,)},
    "pictures": {"loss": (int, float), PICTURE: (str,)},
}


def _check(head: Any, rows: Sequence[Any]) -> None:
    """Refuse a file whose lines do not have the fields of its kind."""
    if head["format"] != FORMAT or head["kind"] not in KINDS or not isinstance(head["step"], int):
        raise ValueError(f"it has format {head['format']!r} and kind {head['kind']!r}")
    if head["rows"] != len(rows):
        raise ValueError(f"{len(rows)} of {head['rows']} rows")
    if not rows:
        raise ValueError("it has no rows")
    fields = _FIELDS[head["kind"]]
    for number, row in enumerate(rows, start=2):
        wrong = [name for name, types in fields.items() if not isinstance(row[name], types)]
        texts = row["texts"]
        if wrong or not isinstance(texts, list) or not all(isinstance(t, str) for t in texts):
            raise ValueError(f"line {number}: {', '.join(wrong) or 'texts'}")
        if not isinstance(row.get(GROUP, 0), int):
            raise ValueError(f"line {number}: {GROUP}")
        if head["kind"] == "spans":
            _check_spans(row, number)
        if head["kind"] == "pictures" and not _ADDRESS.fullmatch(row[PICTURE]):
            raise ValueError(f"line {number}: {PICTURE}")
        if head["kind"] == "sets":
            _check_sets(row, number)


def _check_spans(row: Outcome, number: int) -> None:
    for kind, start, end in [*row["label"], *row["prediction"]]:
        inside = isinstance(start, int) and isinstance(end, int) and 0 <= start <= end
        if not isinstance(kind, str) or not inside:
            raise ValueError(f"line {number}: [{kind!r}, {start!r}, {end!r}]")


def _check_sets(row: Outcome, number: int) -> None:
    names = [*row["label"], *row["prediction"], *row["scores"]]
    numbers = row["scores"].values()
    if not all(isinstance(n, str) for n in names) or not all(isinstance(p, float) for p in numbers):
        raise ValueError(f"line {number}: {names!r}")


def _json_ready(value: Any) -> Any:
    """Cut long texts, and replace NaN and infinity, which JSON lacks, by the largest numbers.

    NaN becomes the largest positive number: a loss of 0 would be the best.
    """
    if isinstance(value, Mapping):
        return {k: item if k == PICTURE else _json_ready(item) for k, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(item) for item in value]
    if isinstance(value, str):
        return value if len(value) <= _MOST_TEXT else f"{value[:_MOST_TEXT]}..."
    if isinstance(value, float) and not math.isfinite(value):
        return math.copysign(1e308, 1.0 if math.isnan(value) else value)
    return value
