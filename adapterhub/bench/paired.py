"""Tested differences between methods on the same test rows, with one-word verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import numpy as np

from adapterhub.bench.statistics import (
    RepeatedRuns,
    SeedSpread,
    check_study,
    covariance,
    seed_spreads,
    uncertainty,
)
from adapterhub.pages.row_scores import FEWEST_ROWS, LEVEL

_ROUNDING = 1e-12  # relative difference between sums in different orders

Verdict = Literal["better", "worse", "tied", "unknown"]


@dataclass(frozen=True)
class PairedComparison:
    """A method against a baseline, on the same test rows; None where it cannot be estimated.

    Attributes:
        baseline: the baseline's name.
        method: the method's name.
        score: the metric's name.
        points: the points in a score of 1, for printing.
        lower_is_better: whether a negative difference is an improvement.
        rows: the number of test rows.
        value: the method's mean minus the baseline's.
        low: the lower end of the 95 % interval of this difference alone.
        high: its upper end.
        error: the standard error of the difference.
        freedom: its degrees of freedom.
        covers_seeds: whether interval and test cover the choice of the seeds.
        p: the two-sided p-value; None without a test.
        corrected: the p-value corrected for all comparisons.
        comparisons: the number of tests in the correction.
        divisor: what the level of this test is divided by, for `corrected_interval`.
    """

    baseline: str
    method: str
    score: str
    points: float
    lower_is_better: bool
    rows: int
    value: float | None = None
    low: float | None = None
    high: float | None = None
    error: float | None = None
    freedom: float | None = None
    covers_seeds: bool = False
    p: float | None = None
    corrected: float | None = None
    comparisons: int = 0
    divisor: int = 1

    @property
    def corrected_interval(self) -> tuple[float, float] | None:
        """The interval that excludes 0 exactly if the corrected p-value is below 5 %.

        Its level is the one at which Holm's method tests this pair (Serlin 1993, Journal
        of Experimental Education 61(4)). Without a test, it is the interval of this difference
        alone.
        """
        from scipy.special import stdtrit

        if self.value is None or self.low is None or self.high is None:
            return None
        if self.corrected is None or self.error is None:
            return self.low, self.high
        half = float(stdtrit(self.freedom, 1 - LEVEL / 2 / self.divisor)) * self.error
        return self.value - half, self.value + half

    @property
    def verdict(self) -> Verdict:
        """Whether the method is better or worse at 5 %, by the corrected p-value."""
        if self.corrected is None or self.value is None:
            return "unknown"
        if self.corrected >= LEVEL:
            return "tied"
        return "better" if (self.value > 0) != self.lower_is_better else "worse"

    @property
    def smallest(self) -> float | None:
        """The smallest difference that is significant regardless of the other comparisons.

        It is the quantile of Student's t at 5 % / comparisons, Holm's first step, times the
        standard error. A true difference of this size is found in about half of all studies.
        """
        from scipy.special import stdtrit

        if self.error is None or not self.comparisons:
            return None
        return float(stdtrit(self.freedom, 1 - LEVEL / 2 / self.comparisons)) * self.error

    @property
    def mirrored(self) -> PairedComparison:
        """The comparison of the baseline with the method."""
        return replace(
            self,
            baseline=self.method,
            method=self.baseline,
            value=None if self.value is None else -self.value,
            low=None if self.high is None else -self.high,
            high=None if self.low is None else -self.low,
        )


def holm(values: Sequence[float]) -> list[float]:
    """Correct p-values for their number by Holm's step-down method.

    The i-th smallest of k is multiplied by k - i + 1. It is at most 1, and not smaller than those
    before it (Holm 1979, https://www.jstor.org/stable/4615733). The probability of any false
    rejection is at most the level, however the tests depend on each other.
    """
    p = np.asarray(values, dtype=float)
    order = np.argsort(p, kind="stable")
    steps = np.minimum(p[order] * np.arange(len(p), 0, -1), 1.0)
    corrected = np.empty_like(p)
    corrected[order] = np.maximum.accumulate(steps)
    return [float(value) for value in corrected]


def compare_with(baseline: RepeatedRuns, others: Sequence[RepeatedRuns]) -> list[PairedComparison]:
    """Compare each method with the baseline, corrected for the number of methods.

    Raises:
        ConfigError: they were scored differently, or on different rows.
    """
    study = [baseline, *others]
    check_study(study)
    spreads = seed_spreads(study)
    return _corrected([_difference(baseline, other, spreads) for other in others])


def compare_each(study: Sequence[RepeatedRuns]) -> dict[tuple[str, str], PairedComparison]:
    """Compare each method with all others, by the names of baseline and method.

    Each method is a baseline once, and its comparisons are corrected for their number. Whichever
    method is truly the best, the probability that another one is called better is thus at most the
    level, although the best mean is chosen by the same rows and seeds (Hsu 1984, Annals of
    Statistics 12(3)). A correction for all pairs would answer which of any two methods differ, a
    question that no recommendation asks.

    Raises:
        ConfigError: they were scored differently, or on different rows.
    """
    check_study(study)
    spreads = seed_spreads(study)
    once = [_difference(*sides, spreads) for sides in combinations(study, 2)]
    both = {(p.baseline, p.method): p for pair in once for p in (pair, pair.mirrored)}
    names = [runs.method for runs in study]
    families = ([both[name, other] for other in names if other != name] for name in names)
    return {(p.baseline, p.method): p for family in families for p in _corrected(family)}


def _corrected(pairs: list[PairedComparison]) -> list[PairedComparison]:
    """Correct the p-values for their number, and the levels of the intervals likewise.

    Holm's i-th test of k is at the level / (k - i + 1), and it stops where one fails: those after
    it have no level of their own.
    """
    tested = [pair.p for pair in pairs if pair.p is not None]
    values = iter(holm(tested))
    corrected = [None if pair.p is None else next(values) for pair in pairs]
    rejected = sum(value is not None and value < LEVEL for value in corrected)
    return [
        pair
        if pair.p is None
        else replace(
            pair,
            corrected=value,
            comparisons=len(tested),
            divisor=max(len(tested) - min(sum(p < pair.p for p in tested), rejected), 1),
        )
        for pair, value in zip(pairs, corrected, strict=True)
    ]


def _difference(
    baseline: RepeatedRuns, other: RepeatedRuns, spreads: dict[str, SeedSpread]
) -> PairedComparison:
    """Estimate a difference and its interval, and test it.

    With the covariance D of the two means over test rows, the variance over rows is C + C' - 2 D:
    the difficulty of a row for both methods cancels.
    """
    score, sides = baseline.score, (baseline, other)
    pair = PairedComparison(
        baseline=baseline.method,
        method=other.method,
        score=score.name,
        points=score.points,
        lower_is_better=score.lower_is_better,
        rows=min(side.rows for side in sides),
    )
    if not pair.rows:
        return pair
    value = float(other.scores.mean() - baseline.scores.mean())
    if abs(value) <= _ROUNDING * abs(baseline.scores.mean()):
        value = 0.0
    if pair.rows < FEWEST_ROWS:
        return replace(pair, value=value)
    covers = all(side.is_comparable for side in sides)
    return _tested(replace(pair, value=value, covers_seeds=covers), sides, spreads)


def _tested(
    pair: PairedComparison,
    sides: tuple[RepeatedRuns, RepeatedRuns],
    spreads: dict[str, SeedSpread],
) -> PairedComparison:
    """Add the interval, and the test if the seeds of both methods are covered."""
    from scipy.special import stdtr

    value = pair.value or 0.0
    known = [(spreads.get(side.method), side) for side in sides] if pair.covers_seeds else []
    seeds = [(spread, side.seeds) for spread, side in known if spread]
    own = sum(s.shared_variance if s.method in spreads and known else s.row_variance for s in sides)
    over = uncertainty(own - 2 * covariance(*sides), pair.rows, seeds)
    half = over.quantile * over.error
    pair = replace(pair, low=value - half, high=value + half)
    pair = replace(pair, error=over.error, freedom=over.freedom)
    if not pair.covers_seeds:
        return pair
    if value == 0.0:
        return replace(pair, p=1.0)
    t = -abs(value) / over.error if over.error > 0 else -np.inf
    return replace(pair, p=float(2 * stdtr(over.freedom, t)))
