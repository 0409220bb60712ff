"""The error of one score over the rows that it is of: by the jackknife, and Wilson's interval.

Scores without an upper bound, such as losses, have an interval that is longer upwards.

It is that of one run, on other rows of the same kind. `adapterhub bench` has the spread over seeds
too (`bench/statistics.py`), and takes influence and interval from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from adapterhub.files.shown_table import ScoreError
from adapterhub.pages.predictions import PredictionFile
from adapterhub.pages.row_scores import (
    LARGEST,
    Numbers,
    Outcome,
    RowScore,
    grouped_columns,
    row_scores,
    with_classes,
)

LEVEL = 0.05
_STEEPEST = 2.0  # of an interval by logarithms: two rows say next to nothing
_PLENTY = 30  # rows, or entities, of each kind that is counted: none of them is rare
_PSEUDO = 0.5  # rows of each class that are added, right and wrong, for the variance
_SAME = 1e-3  # by which a metric and the score of its rows may differ: texts are cut in the file


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
    """The rows of one task that were evaluated: how many, and what was predicted, if it is kept."""

    count: int
    predictions: PredictionFile | None = None


def influence_of_rows(score: RowScore, columns: Numbers) -> Numbers:
    """Return the influence of each row on a score, by the jackknife.

    (n - 1) * (mean of all scores without one row - score without row k); for a mean, the row's
    deviation from it (Efron 1982, The Jackknife, the Bootstrap and Other Resampling Plans,
    chapter 3).
    """
    without = score.summarize(columns.sum(0) - columns)
    influence: Numbers = (len(columns) - 1) * (without.mean() - without)
    return influence


def score_interval(
    score: RowScore, value: float, found: Uncertainty, rows: int, *, of_rows: bool = True
) -> tuple[float, float]:
    """Return the 95 % interval of a score, inside its bounds.

    Rows of a score without an upper bound are skewed, and few of them rarely have the largest. An
    interval `of_rows` alone, not of seeds too, reaches up as that of the score's logarithm does.
    """
    low, high = score.low, score.high
    if np.isinf(high):
        half = found.quantile * found.error
        upper = value * _above(half / value) if of_rows and value > 0 else value + half
        return max(value - half, low), upper
    width = high - low
    ends = _wilson((value - low) / width, found, found.variance / width**2, rows)
    return low + width * ends[0], low + width * ends[1]


def _above(part: float) -> float:
    """Return exp(part), and from the exponent `_STEEPEST` on its tangent."""
    return float(np.exp(min(part, _STEEPEST)) * (1 + max(part - _STEEPEST, 0.0)))


def _wilson(share: float, found: Uncertainty, variance: float, rows: int) -> tuple[float, float]:
    """Return an interval inside [0, 1], which is wider towards 1/2.

    Wilson's (1927) interval, with Student's t and with the number of independent rows that would
    have this variance, share * (1 - share) / variance (Korn & Graubard 1998, Survey Methodology
    24(2)). All right or all wrong, the variance is 0, and all rows are counted.
    Score and variance are scaled to [0, 1].
    """
    spread = share * (1 - share)
    if spread > 0 and variance <= 0:
        return share, share
    count = spread / variance if spread > 0 else float(rows)
    return _of_share(share, found.quantile**2 / count)


def _of_share(share: float, extra: float) -> tuple[float, float]:
    """Return Wilson's interval of a share; `extra` is the square of the quantile per row."""
    half = np.sqrt(extra * (share * (1 - share) + extra / 4))
    ends = (share + extra / 2 - half) / (1 + extra), (share + extra / 2 + half) / (1 + extra)
    return max(float(ends[0]), 0.0), min(float(ends[1]), 1.0)


def score_error(score: RowScore, columns: Numbers) -> ScoreError:
    """Return the error of a score of one run.

    There is no interval of one row, nor of rows without what is counted, nor where no row changes a
    score between its bounds: the rows then do not tell how much it varies.
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
    """Return the 95 % interval of a score that rare classes decide; else the score twice.

    Of a class with two rows that are both right, the jackknife finds no error at all. So each class
    has half a right and half a wrong row more, as in the intervals of shares of Agresti & Coull
    1998 (https://doi.org/10.1080/00031305.1998.10480550), to estimate the variance: the interval is
    Wilson's with the number of rows that would have it.
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

    `parts` has the rows of each task by what precedes the names of its metrics: "" for one task
    alone. A metric that is not a score of summed rows has their number, and no interval.
    """
    found = {}
    for name, value in metrics.items():
        before = next((b for b in parts if b and name.startswith(b)), "")
        part = parts.get(before) or EvaluatedRows(sum(each.count for each in parts.values()))
        found[name] = _error_of(name.removeprefix(before), value, part)
    return found


def spearman_error(value: float, rows: Sequence[Outcome]) -> ScoreError:
    """Return the error of a correlation of ranks, which is no function of sums over rows.

    By Fisher's z, whose variance for ranks is (1 + r^2 / 2) / (n - 3) (Bonett & Wright 2000,
    Psychometrika 65(1)). Rows of groups are not drawn one by one, and have no interval.
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
    except KeyError:  # an older file has not what it is computed from
        return ScoreError(part.count)
    groups = len(columns) if len(columns) < len(file.rows) else None
    if score.is_by_class:
        columns = with_classes(columns, len(file.labels))
    own = float(score.summarize(columns.sum(0)))
    if not abs(own - value) <= _SAME * max(1.0, abs(value)):
        return ScoreError(part.count, groups=groups)
    return replace(score_error(score, columns), rows=part.count, groups=groups)
