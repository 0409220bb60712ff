"""How wide the range of good learning rates of a method is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from adapterhub.bench.records import CellRecord
from adapterhub.bench.results import MethodResult
from adapterhub.files.manifest import LOWER_IS_BETTER
from adapterhub.pages.row_scores import RowScore


@dataclass(frozen=True)
class GoodRates:
    """The learning rates around the best one whose scores are close to its score.

    Attributes:
        best: the rate with the best mean score.
        score: its mean score.
        tolerance: how much worse a score may be to be close.
        low: the lowest good rate.
        high: the highest good rate.
    """

    best: float
    score: float
    tolerance: float
    low: float
    high: float

    @property
    def decades(self) -> float:
        """The width of the range, log10(high / low), which the grid may cut."""
        return math.log10(self.high / self.low)


def good_rates(curve: Mapping[float, Sequence[float]], score: RowScore) -> GoodRates | None:
    """Find the good rates of a learning-rate curve; None if no rate has a score.

    A rate is good if its mean score is within a tolerance of the best: one point (a hundredth of
    the best possible score, or of the best loss), or the seeds' standard deviation at the best rate
    if that is larger. The range ends at the first rate that is not good, in both directions; a rate
    whose runs diverged is not good. Its resolution is that of the grid.

    Args:
        curve: the scores of the seeds at each rate; none, or NaN, for a run that diverged.
        score: the score.
    """
    rates, sign = sorted(curve), -1.0 if score.lower_is_better else 1.0
    means = [_mean(curve[rate]) for rate in rates]
    gains = [-math.inf if mean is None else sign * mean for mean in means]
    place = max(range(len(rates)), key=gains.__getitem__, default=None)
    if place is None or (best := means[place]) is None:
        return None
    tolerance = _tolerance(best, curve[rates[place]], score)
    is_good = [gain >= sign * best - tolerance * (1 + 1e-9) for gain in gains]
    low = high = place
    while low > 0 and is_good[low - 1]:
        low -= 1
    while high < len(rates) - 1 and is_good[high + 1]:
        high += 1
    return GoodRates(rates[place], best, tolerance, rates[low], rates[high])


def _mean(scores: Sequence[float]) -> float | None:
    """Average the scores of a rate; None if a run diverged."""
    return fmean(scores) if scores and all(map(math.isfinite, scores)) else None


def _tolerance(best: float, scores: Sequence[float], score: RowScore) -> float:
    point = 0.01 * (score.high if math.isfinite(score.high) else abs(best))
    return max(point, stdev(scores)) if len(scores) > 1 else point


def rates_of(result: MethodResult, score: RowScore) -> GoodRates | None:
    """Find the good rates of a method by its first trials; None where it has one rate.

    Args:
        result: the method.
        score: the score of the test rows.
    """
    curve = _rate_curve(result.trials)
    if len(curve) < 2:
        return None
    return good_rates(curve, _selecting([*result.trials, *result.finals], score))


def _rate_curve(trials: Sequence[CellRecord]) -> dict[float, list[float]]:
    """Return the scores by rate of the first trials, which have every rate."""
    first = min((record.cell.steps for record in trials), default=0)
    curve: dict[float, list[float]] = {}
    for record in trials:
        if record.cell.steps == first:
            value = record.selected.get(record.metric) if record.status == "done" else None
            curve.setdefault(record.cell.rate, []).append(float("nan") if value is None else value)
    return curve


def _selecting(records: Sequence[CellRecord], score: RowScore) -> RowScore:
    """Return the score that the runs select by, which has the scale of the test rows' one."""
    metric = records[0].metric.removeprefix("eval_")
    if score.name == metric:
        return score
    high = float("inf") if metric in LOWER_IS_BETTER else 1.0
    return replace(score, name=metric, high=high)
