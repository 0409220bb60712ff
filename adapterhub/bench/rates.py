"""How wide the range of good learning rates is, and whether the best lies at the grid's edge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

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
        edges: the ends of the grid at which the best rate lies: "low", "high", or both.
        open_ends: the ends of the grid that the good rates reach, beyond which more may be good.
    """

    best: float
    score: float
    tolerance: float
    low: float
    high: float
    edges: tuple[str, ...]
    open_ends: tuple[str, ...]

    @property
    def decades(self) -> float:
        """The width of the range, log10(high / low); a lower bound if an end is open."""
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
    edges, open_ends = _ends(place, place, len(rates)), _ends(low, high, len(rates))
    return GoodRates(rates[place], best, tolerance, rates[low], rates[high], edges, open_ends)


def _mean(scores: Sequence[float]) -> float | None:
    """Average the scores of a rate; None if a run diverged."""
    return fmean(scores) if scores and all(map(math.isfinite, scores)) else None


def _tolerance(best: float, scores: Sequence[float], score: RowScore) -> float:
    point = 0.01 * (score.high if math.isfinite(score.high) else abs(best))
    return max(point, stdev(scores)) if len(scores) > 1 else point


def _ends(low: int, high: int, count: int) -> tuple[str, ...]:
    return ("low",) * (low == 0) + ("high",) * (high == count - 1)


def rates_sentence(method: str, found: GoodRates, score: RowScore) -> str:
    """Describe the range of good rates, and what to try if the best lies at an edge.

    Args:
        method: the method's name.
        found: its good rates.
        score: the score.
    """
    unit, size = ("points", found.tolerance * score.points) if score.points > 1 else (
        score.name, found.tolerance
    )  # fmt: skip
    span = f"{found.low:g} to {found.high:g}, {found.decades:.1f} decades"
    least = "at least " if found.open_ends else ""
    text = f"{method}: rates within {size:.2g} {unit} of the best, {found.best:g}: {least}{span}."
    ends = {"low": "lower", "high": "higher"}
    tries = " and ".join(ends[end] for end in found.edges)
    return f"{text} The best lies at the edge of the grid: try {tries} rates." if tries else text
