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


def compare_all_pairs(study: Sequence[RepeatedRuns]) -> list[PairedComparison]:
    """Compare every two methods, corrected for the number of pairs.

    The best method is chosen by the same test rows and seeds, so comparisons with it are also
    corrected for all pairs: among equal methods, the best and the worst differ by more than two
    methods that were chosen beforehand (Tukey 1949).

    Raises:
        ConfigError: they were scored differently, or on different rows.
    """
    check_study(study)
    spreads = seed_spreads(study)
    return _corrected([_difference(*pair, spreads) for pair in combinations(study, 2)])


def _corrected(pairs: list[PairedComparison]) -> list[PairedComparison]:
    """Correct the p-values for their number."""
    tested = [i for i, pair in enumerate(pairs) if pair.p is not None]
    values = holm([pair.p for pair in pairs if pair.p is not None])
    for i, value in zip(tested, values, strict=True):
        pairs[i] = replace(pairs[i], corrected=value, comparisons=len(tested))
    return pairs


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
    if abs(value) <= _ROUNDING * abs(sides[0].scores.mean()):
        return replace(pair, p=1.0)
    t = -abs(value) / over.error if over.error > 0 else -np.inf
    return replace(pair, p=float(2 * stdtr(over.freedom, t)))
