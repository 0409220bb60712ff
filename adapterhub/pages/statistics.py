"""Scores by class, calibration and paired differences, computed from predictions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from adapterhub.pages.predictions import Outcome, PredictionFile
from adapterhub.pages.row_scores import Numbers, grouped_columns, row_score

_BINS = 10
_RESAMPLES = 2000
FEWEST_ROWS = 20  # with fewer, neither a normal distribution nor a jackknife can be relied on


@dataclass(frozen=True)
class ClassScore:
    """Precision, recall and F1 of one class, and how many examples have and were given it."""

    name: str
    right: int
    predicted: int
    support: int

    @property
    def precision(self) -> float:
        """The share of its predictions that are right; 0 without any."""
        return self.right / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """The share of its examples that are found; 0 without any."""
        return self.right / self.support if self.support else 0.0

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall."""
        total = self.predicted + self.support
        return 2 * self.right / total if total else 0.0


@dataclass(frozen=True)
class CalibrationBin:
    """The predictions with a probability in one interval."""

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float


def is_right(row: Outcome) -> bool:
    """Return whether the prediction of a class or a choice is right."""
    return bool(row["right"] > 0.5) if "right" in row else bool(row["label"] == row["prediction"])


def class_scores(rows: Sequence[Outcome], labels: Sequence[str]) -> list[ClassScore]:
    """Score each class that occurs or is in `labels`, in the order of the labels."""
    support = Counter(row["label"] for row in rows)
    predicted = Counter(row["prediction"] for row in rows)
    right = Counter(row["label"] for row in rows if is_right(row))
    names = dict.fromkeys([*labels, *sorted(support | predicted)])
    return [ClassScore(n, right[n], predicted[n], support[n]) for n in names]


def span_scores(rows: Sequence[Outcome]) -> list[ClassScore]:
    """Score each kind of entity; an entity is right if its kind and both ends are."""
    counts: dict[str, list[int]] = {}
    for row in rows:
        true, given = ({tuple(span) for span in row[name]} for name in ("label", "prediction"))
        for place, spans in enumerate((true & given, given, true)):
            for kind, *_ in spans:
                counts.setdefault(kind, [0, 0, 0])[place] += 1
    return [ClassScore(kind, *counts[kind]) for kind in sorted(counts)]


def confusions(rows: Sequence[Outcome]) -> Counter[tuple[str, str]]:
    """Count the pairs (label, prediction)."""
    return Counter((row["label"], row["prediction"]) for row in rows)


def calibration(rows: Sequence[Outcome]) -> tuple[list[CalibrationBin], float]:
    """Return the bins of a reliability diagram that have examples, and the calibration error.

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
        better: the examples on which only the second run is right.
        worse: those on which only the first is right.
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
        """Whether the runs differ at the level of 5 %."""
        return not self.low <= 0 <= self.high if self.p is None else self.p < 0.05


def difference(first: PredictionFile, second: PredictionFile, metric: str = "") -> Difference:
    """Compare two runs on the same evaluation data, example by example.

    By a score that is a function of sums over rows: the main one of their kind, or `metric`.

    The interval is that of a paired bootstrap over the examples, of 2000 resamples with a fixed
    seed (Efron & Tibshirani 1993, section 13.3). For classes, the p-value is that of McNemar's
    exact test (McNemar 1947). Rows of groups, such as contexts, are resampled by group.
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
    drawn = []
    for _ in range(_RESAMPLES):
        weights = np.bincount(random.integers(count, size=count), minlength=count)
        drawn.append(summarize(weights @ other) - summarize(weights @ one))
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)
