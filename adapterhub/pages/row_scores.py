"""Scores that are functions of sums over rows: one row of numbers per example.

Every score has the form f(sum of columns), such as right / all. A score without one row, or of a
resample of the rows, therefore needs only other sums.

The error of a score over its rows is given by the jackknife or Wilson's interval. Scores without an
upper bound, such as losses, have an interval that is longer upwards. It is the error of one run on
other rows of the same kind; `adapterhub bench` adds the spread over seeds (`bench/statistics.py`).

`predictions.jsonl` in a run folder contains the predictions of the best tensors on the evaluation
data. The first line describes the file; each other line is the result of `Task.outcome` for one
example. The file contains the user's texts, so it is never part of an adapter and never published.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from adapterhub.errors import FileError, unknown
from adapterhub.files.atomic import UnreadableError, read_lines
from adapterhub.files.manifest import LOWER_IS_BETTER
from adapterhub.files.shown_table import ScoreError
from adapterhub.tasks.common.metrics import RANKING_METRICS, query_metrics, ranked_gains

if TYPE_CHECKING:
    from adapterhub.tasks import Prediction, Task


PREDICTIONS = "predictions.jsonl"
FORMAT = 1
KINDS = ("classes", "sets", "choices", "numbers", "spans", "texts", "losses", "images")
_OLD_KINDS = {"pictures": "images"}  # in files of version 0.3 and before
PICTURE = "picture"  # the field of an image, as a data: address
GROUP = "group"  # the field with the number of the row's group, such as a query
_ADDRESS = re.compile(r"(data:image/png;base64,[A-Za-z0-9+/]+=*)?")
_MOST_TEXT = 4000  # characters kept of a text
MOST_BYTES = 4 << 30

Outcome = dict[str, Any]
"""One example: `texts`, its `group`, and by kind `label`, `prediction`, `score`, `loss`, ..."""


@dataclass(frozen=True)
class PredictionFile:
    """The content of a predictions file.

    Attributes:
        kind: one of `KINDS`.
        task: the task's name.
        step: the step at which the predictions were made.
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
        """The class predicted for every row, if the rows have several classes."""
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
    """Build the predictions file of an evaluation; None unless each example has a prediction."""
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


def current_kind(kind: str) -> str:
    """Return the name of a kind that a file records, which may be an earlier one."""
    return _OLD_KINDS.get(kind, kind)


def read_predictions(folder: Path) -> PredictionFile | None:
    """Read the predictions file of a run folder; None if it does not exist.

    Raises:
        FileError: the file is broken.
    """
    path = folder / PREDICTIONS
    if not path.exists():
        return None
    try:
        head, *rows = map(json.loads, read_lines(path, MOST_BYTES))
        head["kind"] = current_kind(head["kind"])
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
    "images": {"loss": (int, float), PICTURE: (str,)},
}


def _check(head: Any, rows: Sequence[Any]) -> None:
    """Check that the lines of a file have the fields of its kind."""
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
        if head["kind"] == "images" and not _ADDRESS.fullmatch(row[PICTURE]):
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

    NaN becomes the largest positive number, since a loss of 0 would be the best.
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


Numbers = NDArray[np.float64]
LARGEST = 1e60  # largest number: its fourth power times the number of rows is finite


@dataclass(frozen=True)
class RowScore:
    """A score that is computed from summed columns.

    Attributes:
        name: the metric's name.
        columns: the numbers of all examples, (rows, columns).
        summarize: maps sums, (..., columns), to scores, (...).
        low: the smallest possible score.
        high: the largest possible score.
        pseudo_rows: right and wrong rows to add for the interval, in case few real rows lack them;
            each counts by half. None if the real rows suffice.
    """

    name: str
    columns: Callable[[Sequence[Outcome]], Numbers]
    summarize: Callable[[Numbers], Numbers]
    low: float = 0.0
    high: float = 1.0
    pseudo_rows: Callable[[Numbers], Numbers] | None = None

    @property
    def is_by_class(self) -> bool:
        """Whether the columns belong to classes and are completed by `with_classes`."""
        return self.pseudo_rows is _class_pseudo_rows

    @property
    def lower_is_better(self) -> bool:
        """Whether a smaller score is better, as for losses."""
        return self.name in LOWER_IS_BETTER

    @property
    def points(self) -> float:
        """The points in a score of 1: 100 for shares and correlations, else 1."""
        return 100.0 if self.high == 1.0 else 1.0


def row_scores(kind: str) -> dict[str, RowScore]:
    """Return the scores of a kind of predictions, by name, the main one first."""
    return {score.name: score for score in _SCORES[kind]}


def row_score(kind: str, metric: str = "") -> RowScore:
    """Return a score of a kind of predictions by its name, or the first one.

    Raises:
        ConfigError: the score is not computed from rows of this kind.
    """
    scores = row_scores(kind)
    if metric and metric not in scores:
        raise unknown("score", metric, scores)
    return scores[metric] if metric else _SCORES[kind][0]


def _ratio(above: Numbers, below: Numbers) -> Numbers:
    """Divide; return 0 where the divisor is 0."""
    quotient: Numbers = np.zeros_like(above, dtype=float)
    np.divide(above, below, out=quotient, where=below > 0)
    return quotient


def _mean(sums: Numbers) -> Numbers:
    return _ratio(sums[..., 0], sums[..., 1])


def _f1(sums: Numbers) -> Numbers:
    return _ratio(2 * sums[..., 0], sums[..., 1] + sums[..., 2])


def _recall(sums: Numbers) -> Numbers:
    return _ratio(sums[..., 0], sums[..., 2])


def _perplexity(sums: Numbers) -> Numbers:
    with np.errstate(over="ignore"):
        perplexity: Numbers = np.exp(_mean(sums))
    return perplexity


def _pearson(sums: Numbers) -> Numbers:
    n, x, y, xx, yy, xy = np.moveaxis(sums, -1, 0)
    variances = np.maximum(n * xx - x * x, 0.0) * np.maximum(n * yy - y * y, 0.0)
    return _ratio(n * xy - x * y, np.sqrt(variances))


def _matthews(sums: Numbers) -> Numbers:
    """Compute the correlation of two partitions (R_K of Gorodkin 2004)."""
    right, count, true, predicted = _class_sums(sums)
    covariance = right.sum(-1) * count - (true * predicted).sum(-1)
    variances = (count**2 - (true**2).sum(-1)) * (count**2 - (predicted**2).sum(-1))
    return _ratio(covariance, np.sqrt(np.maximum(variances, 0.0)))


def _macro_f1(sums: Numbers) -> Numbers:
    """Average F1 over the classes that occur as a label or prediction."""
    right, _, true, predicted = _class_sums(sums)
    each = _ratio(2 * right, true + predicted)
    return _ratio(each.sum(-1), (true + predicted > 0).sum(-1))


def _class_sums(sums: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Return the right rows by class, the total rows, and the true and predicted ones by class."""
    right, true, predicted = np.split(sums, 3, axis=-1)
    return right, true.sum(-1), true, predicted


def _bleu(sums: Numbers) -> Numbers:
    """Compute corpus BLEU with sacreBLEU's defaults (Post 2018)."""
    from sacrebleu import BLEU

    def score(sums: Numbers) -> float:
        *counts, predicted, true = (int(number) for number in sums)
        bleu = BLEU.compute_bleu(counts[:4], counts[4:], predicted, true, smooth_method="exp")
        return float(bleu.score)

    return np.apply_along_axis(score, -1, sums)


def _each(row: Callable[[Outcome], list[Any]]) -> Callable[[Sequence[Outcome]], Numbers]:
    """Build columns by applying a function to each row."""
    return lambda rows: np.array([row(outcome) for outcome in rows], dtype=float)


def _right(row: Outcome) -> list[Any]:
    return [row["right"] if "right" in row else row["label"] == row["prediction"], 1.0]


def _span_columns(row: Outcome) -> list[Any]:
    true, predicted = ({tuple(span) for span in row[name]} for name in ("label", "prediction"))
    return [len(true & predicted), len(predicted), len(true)]


def _set_columns(row: Outcome) -> list[Any]:
    true, predicted = set(row["label"]), set(row["prediction"])
    return [len(true & predicted), len(predicted), len(true)]


def _same_set(row: Outcome) -> list[Any]:
    return [set(row["label"]) == set(row["prediction"]), 1.0]


def _class_columns(rows: Sequence[Outcome]) -> Numbers:
    """Mark, by class, whether a row is right, true and predicted."""
    classes = sorted({row[name] for row in rows for name in ("label", "prediction")})
    true, predicted = (
        np.array([[row[name] == c for c in classes] for row in rows], dtype=float)
        for name in ("label", "prediction")
    )
    return np.concatenate([true * predicted, true, predicted], axis=1)


def _class_pseudo_rows(sums: Numbers) -> Numbers:
    """Return a right and a wrong row of each class; wrong rows get the others' shares."""
    _, true, predicted = np.split(sums, 3)
    count, same = len(true), np.eye(len(true))
    shares = (1 - same) * (true + predicted + 1)
    wrong = shares / np.maximum(shares.sum(1, keepdims=True), 1)
    right = np.concatenate([same, same, same], axis=1)
    pseudo: Numbers = np.concatenate(
        [right, np.concatenate([np.zeros((count, count)), same, wrong], axis=1)]
    )
    return pseudo


def _set_pseudo_rows(sums: Numbers) -> Numbers:
    """Return a right row, one with an additional wrong item, and one with a missing item."""
    rows: Numbers = np.array([[1.0, 1.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    return rows


def with_classes(columns: Numbers, count: int) -> Numbers:
    """Add columns for classes that do not occur in any row to a score by class."""
    parts = np.split(columns, 3, axis=1)
    more = max(count - parts[0].shape[1], 0)
    return np.concatenate([np.pad(part, ((0, 0), (0, more))) for part in parts], axis=1)


def _numbers(rows: Sequence[Outcome], *names: str) -> Numbers:
    """Return these fields, (rows, fields), clipped to `LARGEST`, which also replaces NaN."""
    fields = np.array([[row[name] for name in names] for row in rows], dtype=float)
    limited: Numbers = np.nan_to_num(fields, nan=LARGEST).clip(-LARGEST, LARGEST)
    return limited


def grouped_columns(score: RowScore, rows: Sequence[Outcome]) -> Numbers:
    """Return the columns of a score, summed over the rows of each group.

    Groups, such as queries or contexts, are the units that were sampled, so errors and comparisons
    refer to them. The score is a function of the same sums.
    """
    columns = score.columns(rows)
    if not rows or "group" not in rows[0]:
        return columns
    numbers = np.unique([row["group"] for row in rows], return_inverse=True)[1]
    summed = np.zeros((numbers.max() + 1, columns.shape[1]))
    np.add.at(summed, numbers, columns)
    return summed


def _ranking_columns(place: int, rows: Sequence[Outcome]) -> Numbers:
    """Return the ranking metric of each query with a relevant passage, at its first row, and 1."""
    queries: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        queries.setdefault(row["query"], []).append(number)
    columns = np.zeros((len(rows), 2))
    for numbers in queries.values():
        own = [rows[i] for i in numbers]
        if "ranking" in own[0]:
            columns[numbers[0]] = own[0]["ranking"][RANKING_METRICS[place]], 1.0
        elif max(gains := [float(row["label"]) for row in own]) > 0:
            ranked = ranked_gains([row["output"] for row in own], gains)
            columns[numbers[0]] = query_metrics(ranked, gains)[place], 1.0
    return columns


def _square_columns(rows: Sequence[Outcome]) -> Numbers:
    label, prediction = _numbers(rows, "label", "prediction").T
    return np.stack([(label - prediction) ** 2, np.ones(len(rows))], axis=1)


def _loss_columns(rows: Sequence[Outcome]) -> Numbers:
    loss, tokens = _numbers(rows, "loss", "tokens").T
    return np.stack([loss * tokens, tokens], axis=1)


def _number_columns(rows: Sequence[Outcome]) -> Numbers:
    """Return the moments of both numbers around their means, so that large numbers stay exact."""
    pairs = _numbers(rows, "label", "prediction")
    x, y = (pairs - pairs.mean(0)).T
    return np.stack([np.ones(len(x)), x, y, x * x, y * y, x * y], axis=1)


def _bleu_columns(rows: Sequence[Outcome]) -> Numbers:
    from sacrebleu import BLEU

    bleu = BLEU(effective_order=True)
    scores = [bleu.sentence_score(row["prediction"], [row["label"]]) for row in rows]
    return np.array([[*f.counts, *f.totals, f.sys_len, f.ref_len] for f in scores], dtype=float)


def _rouge_columns(name: str, rows: Sequence[Outcome]) -> Numbers:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer([name], use_stemmer=True)
    scores = [scorer.score(row["label"], row["prediction"])[name].fmeasure for row in rows]
    return np.stack([np.array(scores, dtype=float), np.ones(len(scores))], axis=1)


def _word_error_columns(rows: Sequence[Outcome]) -> Numbers:
    """Return the word errors of each row, and the number of words in its text."""
    return np.array([[row["wrong_words"], row["words"]] for row in rows], dtype=float)


_ACCURACY = RowScore("accuracy", _each(_right), _mean)
_TEXT_SCORE = _each(lambda row: [row["score"], 1.0])
_RANKING = tuple(
    RowScore(name, partial(_ranking_columns, place), _mean)
    for place, name in enumerate(RANKING_METRICS)
)
_SCORES: dict[str, tuple[RowScore, ...]] = {
    "classes": (
        _ACCURACY,
        RowScore("matthews", _class_columns, _matthews, low=-1.0, pseudo_rows=_class_pseudo_rows),
        RowScore("macro_f1", _class_columns, _macro_f1, pseudo_rows=_class_pseudo_rows),
    ),
    "choices": (_ACCURACY, *_RANKING),
    "sets": (
        RowScore("micro_f1", _each(_set_columns), _f1, pseudo_rows=_set_pseudo_rows),
        RowScore("exact_match", _each(_same_set), _mean),
    ),
    "numbers": (
        RowScore("pearson", _number_columns, _pearson, low=-1.0),
        RowScore("mse", _square_columns, _mean, high=np.inf),
        *_RANKING,
    ),
    "spans": (
        RowScore("f1", _each(_span_columns), _f1, pseudo_rows=_set_pseudo_rows),
        RowScore("precision", _each(_span_columns), _mean, pseudo_rows=_set_pseudo_rows),
        RowScore("recall", _each(_span_columns), _recall, pseudo_rows=_set_pseudo_rows),
    ),
    "texts": (
        RowScore("mean score", _TEXT_SCORE, _mean),
        RowScore("f1", _TEXT_SCORE, _mean),
        RowScore("exact_match", _TEXT_SCORE, _mean),
        RowScore("bleu", _bleu_columns, _bleu, high=100.0),
        RowScore("reward", _TEXT_SCORE, _mean, low=-np.inf, high=np.inf),
        RowScore("wer", _word_error_columns, _mean, high=np.inf),
        *(
            RowScore(name, partial(_rouge_columns, name), _mean)
            for name in ("rouge1", "rouge2", "rougeL", "rougeLsum")
        ),
    ),
    "losses": (
        RowScore("loss", _loss_columns, _mean, high=np.inf),
        RowScore("perplexity", _loss_columns, _perplexity, low=1.0, high=np.inf),
    ),
    "images": (RowScore("loss", _each(lambda row: [row["loss"], 1]), _mean, high=np.inf),),
}


_BINS = 10
_RESAMPLES = 2000
FEWEST_ROWS = 20  # with fewer, neither a normal distribution nor a jackknife is reliable


@dataclass(frozen=True)
class ClassScore:
    """Precision, recall and F1 of one class, with its numbers of labels and predictions."""

    name: str
    right: int
    predicted: int
    support: int

    @property
    def precision(self) -> float:
        """The share of its predictions that are right; 0 without predictions."""
        return self.right / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """The share of its examples that are found; 0 without examples."""
        return self.right / self.support if self.support else 0.0

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall."""
        total = self.predicted + self.support
        return 2 * self.right / total if total else 0.0


@dataclass(frozen=True)
class CalibrationBin:
    """The predictions whose probability lies in one interval."""

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float


def is_right(row: Outcome) -> bool:
    """Return whether the predicted class or choice is right."""
    return bool(row["right"] > 0.5) if "right" in row else bool(row["label"] == row["prediction"])


def class_scores(rows: Sequence[Outcome], labels: Sequence[str]) -> list[ClassScore]:
    """Score each class that occurs or is in `labels`, in the order of the labels."""
    support = Counter(row["label"] for row in rows)
    predicted = Counter(row["prediction"] for row in rows)
    right = Counter(row["label"] for row in rows if is_right(row))
    names = dict.fromkeys([*labels, *sorted(support | predicted)])
    return [ClassScore(n, right[n], predicted[n], support[n]) for n in names]


def span_scores(rows: Sequence[Outcome]) -> list[ClassScore]:
    """Score each kind of entity; an entity is right if its kind and both ends match."""
    counts: dict[str, list[int]] = {}
    for row in rows:
        true, predicted = ({tuple(span) for span in row[name]} for name in ("label", "prediction"))
        for place, spans in enumerate((true & predicted, predicted, true)):
            for kind, *_ in spans:
                counts.setdefault(kind, [0, 0, 0])[place] += 1
    return [ClassScore(kind, *counts[kind]) for kind in sorted(counts)]


def confusions(rows: Sequence[Outcome]) -> Counter[tuple[str, str]]:
    """Count the pairs (label, prediction)."""
    return Counter((row["label"], row["prediction"]) for row in rows)


def calibration(rows: Sequence[Outcome]) -> tuple[list[CalibrationBin], float]:
    """Return the nonempty bins of a reliability diagram, and the expected calibration error.

    The expected calibration error is the mean distance between probability and accuracy over ten
    bins of equal width, weighted by their examples (Guo et al. 2017, section 2,
    https://arxiv.org/abs/1706.04599).
    """
    scores = np.clip([float(row["score"]) for row in rows], 0.0, 1.0)
    right = np.array([is_right(row) for row in rows], dtype=float)
    index = np.clip(np.ceil(scores * _BINS).astype(int) - 1, 0, _BINS - 1)
    bins = []
    for b in range(_BINS):
        inside = index == b
        if count := int(inside.sum()):
            mean = float(scores[inside].mean()), float(right[inside].mean())
            bins.append(CalibrationBin(b / _BINS, (b + 1) / _BINS, count, *mean))
    error = sum(b.count * abs(b.confidence - b.accuracy) for b in bins) / len(rows)
    return bins, error


@dataclass(frozen=True)
class Difference:
    """The difference of a score between two runs on the same examples, second minus first.

    Attributes:
        score: the name of the score.
        value: the difference.
        low: the lower end of the 95 % interval.
        high: the upper end.
        p: the exact p-value of McNemar's test, for classes.
        better: the examples that only the second run gets right.
        worse: the examples that only the first run gets right.
    """

    score: str
    value: float
    low: float
    high: float
    p: float | None = None
    better: int = 0
    worse: int = 0

    @property
    def is_significant(self) -> bool:
        """Whether the runs differ at the 5 % level."""
        return not self.low <= 0 <= self.high if self.p is None else self.p < 0.05


def difference(first: PredictionFile, second: PredictionFile, metric: str = "") -> Difference:
    """Compare two runs on the same evaluation data, example by example.

    The score is `metric` or the main score of their kind, and must be a function of sums over rows.

    The interval comes from a paired bootstrap over the examples, with 2000 resamples and a fixed
    seed (Efron & Tibshirani 1993, section 13.3). For classes, the p-value comes from McNemar's
    exact test (McNemar 1947). Rows in groups, such as contexts, are resampled by group.
    """
    score = row_score(first.kind, metric)
    one, other = (grouped_columns(score, file.rows) for file in (first, second))
    value = float(score.summarize(other.sum(0)) - score.summarize(one.sum(0)))
    low, high = _interval(one, other, score.summarize)
    by_row = first.kind in ("classes", "choices") and score == row_score(first.kind)
    if not by_row or len(one) < len(first.rows):
        return Difference(score.name, value, low, high)
    from scipy.stats import binomtest

    better, worse = (int((d > 0).sum()) for d in (other[:, 0] - one[:, 0], one[:, 0] - other[:, 0]))
    p = float(binomtest(better, better + worse).pvalue) if better + worse else 1.0
    return Difference(score.name, value, low, high, p, better, worse)


def _interval(
    one: Numbers, other: Numbers, summarize: Callable[[Numbers], Numbers]
) -> tuple[float, float]:
    """Return the 95 % percentile interval of a difference of scores."""
    random, count = np.random.default_rng(0), len(one)
    ones: list[Numbers] = []
    others: list[Numbers] = []
    for _ in range(_RESAMPLES):
        weights = np.bincount(random.integers(count, size=count), minlength=count)
        ones.append(weights @ one)
        others.append(weights @ other)
    drawn = summarize(np.array(others)) - summarize(np.array(ones))
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)


LEVEL = 0.05
_STEEPEST = 2.0  # of a logarithmic interval: two rows contain almost no information
_PLENTY = 30  # rows or entities of each counted kind: no kind is rare
_PSEUDO = 0.5  # right and wrong rows added to each class, for the variance
_SAME = 1e-3  # largest difference between a metric and the score of its rows: the file cuts texts


@dataclass(frozen=True)
class Uncertainty:
    """The variance of an estimate, and its degrees of freedom."""

    variance: float
    freedom: float

    @property
    def error(self) -> float:
        """The standard error."""
        return float(np.sqrt(self.variance))

    @property
    def quantile(self) -> float:
        """The quantile of Student's t for a 95 % interval."""
        from scipy.special import stdtrit

        return float(stdtrit(self.freedom, 1 - LEVEL / 2))


@dataclass(frozen=True)
class EvaluatedRows:
    """The evaluated rows of one task: their number, and the predictions if they are kept."""

    count: int
    predictions: PredictionFile | None = None


def influence_of_rows(score: RowScore, columns: Numbers) -> Numbers:
    """Return the influence of each row on a score, by the jackknife.

    (n - 1) * (mean of all scores without one row - score without row k); for a mean, the row's
    deviation from it (Efron 1982, The Jackknife, the Bootstrap and Other Resampling Plans, chapter
    3).
    """
    without = score.summarize(columns.sum(0) - columns)
    influence: Numbers = (len(columns) - 1) * (without.mean() - without)
    return influence


def score_interval(
    score: RowScore, value: float, uncertainty: Uncertainty, rows: int, *, of_rows: bool = True
) -> tuple[float, float]:
    """Return the 95 % interval of a score, inside its bounds.

    Scores without an upper bound have skewed rows, and a few rows rarely include the largest
    values. An interval `of_rows` alone, without seeds, therefore has the upper end of the interval
    of the score's logarithm.
    """
    low, high = score.low, score.high
    if np.isinf(high):
        half = uncertainty.quantile * uncertainty.error
        upper = value * _above(half / value) if of_rows and value > 0 else value + half
        return max(value - half, low), upper
    width = high - low
    ends = _wilson((value - low) / width, uncertainty, uncertainty.variance / width**2, rows)
    return low + width * ends[0], low + width * ends[1]


def _above(part: float) -> float:
    """Return exp(part), continued by its tangent above the exponent `_STEEPEST`."""
    return float(np.exp(min(part, _STEEPEST)) * (1 + max(part - _STEEPEST, 0.0)))


def _wilson(
    share: float, uncertainty: Uncertainty, variance: float, rows: int
) -> tuple[float, float]:
    """Return an interval inside [0, 1], which is wider towards 1/2.

    This is Wilson's (1927) interval, with Student's t and with the number of independent rows that
    would have this variance, share * (1 - share) / variance (Korn & Graubard 1998, Survey
    Methodology 24(2)). If all rows are right or all are wrong, the variance is 0, and all rows are
    counted. Score and variance are scaled to [0, 1].
    """
    spread = share * (1 - share)
    if spread > 0 and variance <= 0:
        return share, share
    count = spread / variance if spread > 0 else float(rows)
    return _of_share(share, uncertainty.quantile**2 / count)


def _of_share(share: float, extra: float) -> tuple[float, float]:
    """Return Wilson's interval for a share; `extra` is the squared quantile per row."""
    half = np.sqrt(extra * (share * (1 - share) + extra / 4))
    ends = (share + extra / 2 - half) / (1 + extra), (share + extra / 2 + half) / (1 + extra)
    return max(float(ends[0]), 0.0), min(float(ends[1]), 1.0)


def score_error(score: RowScore, columns: Numbers) -> ScoreError:
    """Return the error of a score of one run.

    An interval cannot be given for one row, for rows without counted items, or if no row changes a
    score between its bounds. The rows then do not show how much the score varies.
    """
    rows = len(columns)
    if rows < 2 or not columns.any() or not np.abs(columns).max(initial=0.0) < LARGEST / rows:
        return ScoreError(rows)
    value = float(score.summarize(columns.sum(0)))
    influence = influence_of_rows(score, columns)
    variance = float(influence @ influence) / (rows * (rows - 1))
    at_bound = value in (score.low, score.high) and np.isfinite(score.high)
    if not np.isfinite(variance) or (variance <= 0 and not at_bound):
        return ScoreError(rows)
    low, high = score_interval(score, value, Uncertainty(variance, rows - 1.0), rows)
    more = rare_interval(score, columns)
    return ScoreError(rows, float(min(low, more[0])), float(max(high, more[1])))


def rare_interval(score: RowScore, columns: Numbers) -> tuple[float, float]:
    """Return the 95 % interval of a score that depends on rare classes; else the score twice.

    For a class with two rows that are both right, the jackknife finds no error at all. To estimate
    the variance, each class therefore gets an extra half of a right row and half of a wrong row, as
    in the intervals for shares by Agresti & Coull 1998
    (https://doi.org/10.1080/00031305.1998.10480550). The interval is Wilson's, with the number of
    rows that would have this variance.
    """
    value, rows = float(score.summarize(columns.sum(0))), len(columns)
    if score.pseudo_rows is None or columns.sum(0).min(initial=_PLENTY) >= _PLENTY:
        return value, value
    size = max(columns.sum() / 2 / rows, 1.0) if rows else 1.0
    pseudo = score.pseudo_rows(columns.sum(0)) * size * _PSEUDO
    sums = columns.sum(0) + pseudo.sum(0)
    smooth = float(score.summarize(sums))
    own, others = (smooth - score.summarize(sums - each) for each in (columns, pseudo))
    variance = float(own @ own + others @ others / _PSEUDO)
    width = score.high - score.low
    share, middle = ((each - score.low) / width for each in (value, smooth))
    if variance <= 0 or not 0 < middle < 1:
        return value, value
    count = middle * (1 - middle) * width**2 / variance
    low, high = _of_share(share, Uncertainty(variance, rows - 1.0).quantile ** 2 / count)
    return score.low + width * low, score.low + width * high


def score_errors(
    metrics: Mapping[str, float], parts: Mapping[str, EvaluatedRows]
) -> dict[str, ScoreError]:
    """Return the error of each metric of an evaluation.

    `parts` maps the prefix of each task's metrics to its rows; the prefix is "" for a single task.
    A metric that is not a score of summed rows gets their number, without an interval.
    """
    errors = {}
    for name, value in metrics.items():
        before = next((b for b in parts if b and name.startswith(b)), "")
        part = parts.get(before) or EvaluatedRows(sum(each.count for each in parts.values()))
        errors[name] = _error_of(name.removeprefix(before), value, part)
    return errors


def spearman_error(value: float, rows: Sequence[Outcome]) -> ScoreError:
    """Return the error of a rank correlation, which is not a function of sums over rows.

    It uses Fisher's z, whose variance for ranks is (1 + r^2 / 2) / (n - 3) (Bonett & Wright 2000,
    Psychometrika 65(1)). Rows in groups are not sampled one by one, and get no interval.
    """
    count = len(rows)
    if count < 5 or not abs(value) < 1 or "group" in rows[0]:
        return ScoreError(count)
    half = _normal_quantile() * np.sqrt((1 + value**2 / 2) / (count - 3))
    low, high = np.tanh(np.arctanh(value) - half), np.tanh(np.arctanh(value) + half)
    return ScoreError(count, float(low), float(high))


def _normal_quantile() -> float:
    from scipy.special import ndtri

    return float(ndtri(1 - LEVEL / 2))


def _error_of(name: str, value: float, part: EvaluatedRows) -> ScoreError:
    file = part.predictions
    score = row_scores(file.kind).get(name) if file else None
    if file is not None and name == "spearman" and file.kind == "numbers":
        return spearman_error(value, file.rows)
    if file is None or score is None:
        return ScoreError(part.count)
    try:
        columns = grouped_columns(score, file.rows)
    except KeyError:  # older files lack the fields for its computation
        return ScoreError(part.count)
    groups = len(columns) if len(columns) < len(file.rows) else None
    if score.is_by_class:
        columns = with_classes(columns, len(file.labels))
    own = float(score.summarize(columns.sum(0)))
    if not abs(own - value) <= _SAME * max(1.0, abs(value)):
        return ScoreError(part.count, groups=groups)
    return replace(score_error(score, columns), rows=part.count, groups=groups)
