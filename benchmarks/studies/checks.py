"""Checks of a claim: a difference or a correlation with its interval, tested, with a verdict.

All checks of one claim are corrected for their number by Holm's method, in both directions: a check
holds, or does not hold, if its corrected two-sided p-value is below 5 %; else it cannot be told.
A claim holds if all of its checks hold, and does not hold if one of them does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import stats

from adapterhub.bench.advice import p_text
from adapterhub.bench.paired import PairedComparison, holm
from adapterhub.pages.row_scores import LEVEL

Verdict = Literal["holds", "does not hold", "cannot be told"]
HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot be told"
RESAMPLES = 9_999
FEWEST_GROUPS = 6  # with five, a sign test of all in one direction has p = 0.06


@dataclass(frozen=True)
class Check:
    """One comparison that a claim is checked by; None where it cannot be computed.

    Attributes:
        where: the task and the number of training rows.
        what: what is compared: prefix - full.
        unit: of the value: points, or nothing.
        value: what is measured; the claim says that it is larger than `bound`.
        low: the lower end of its 95 % interval.
        high: its upper end.
        bound: what it is compared with.
        p: the two-sided p-value of value = bound.
        corrected: the same, corrected for the number of checks of the claim.
        why_open: why it has no p-value.
        exact: whether something is exactly so, which needs no test.
    """

    where: str
    what: str
    unit: str = "points"
    value: float | None = None
    low: float | None = None
    high: float | None = None
    bound: float = 0.0
    p: float | None = None
    corrected: float | None = None
    why_open: str = ""
    exact: bool | None = None

    @property
    def verdict(self) -> Verdict:
        """Whether the claim holds here."""
        if self.exact is not None:
            return HOLDS if self.exact else FAILS
        if self.corrected is None or self.value is None or self.corrected >= LEVEL:
            return OPEN
        return HOLDS if self.value > self.bound else FAILS

    @property
    def numbers(self) -> str:
        """The value, its interval and the corrected p-value."""
        if self.value is None:
            return self.why_open
        parts = [f"{self.value:+.{self._digits}f}"]
        if self.low is not None and self.high is not None:
            parts.append(f"{self.low:+.{self._digits}f} to {self.high:+.{self._digits}f}")
        parts += [p_text(self.corrected)] if self.corrected is not None else []
        return ", ".join([*parts, *([self.why_open] if self.why_open else [])])

    @property
    def _digits(self) -> int:
        return 1 if self.unit == "points" else 2


@dataclass(frozen=True)
class Claim:
    """A claim, the checks of it, and what they leave out.

    Attributes:
        name: a short name.
        text: what the claim says, as it is checked.
        checks: its comparisons.
        notes: what the checks do not show.
    """

    name: str
    text: str
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """Holds if all checks hold; does not hold if one does not."""
        found = {check.verdict for check in self.checks}
        if FAILS in found:
            return FAILS
        return HOLDS if found == {HOLDS} else OPEN

    @property
    def counts(self) -> str:
        """How many checks have each verdict."""
        if not self.checks:
            return "no study with these methods"
        hold, fail, open_ = (
            sum(check.verdict == word for check in self.checks) for word in (HOLDS, FAILS, OPEN)
        )
        checks = f"{len(self.checks)} check{'s' * (len(self.checks) != 1)}"
        return f"{checks}; here it holds in {hold}, not in {fail}, and {open_} cannot be told"


def claim(name: str, text: str, checks: Sequence[Check], notes: Sequence[str] = ()) -> Claim:
    """Make a claim; the p-values of its checks are corrected for their number.

    Args:
        name: a short name.
        text: what it says.
        checks: its comparisons.
        notes: what they do not show.
    """
    tested = [i for i, check in enumerate(checks) if check.p is not None]
    values = holm([check.p for check in checks if check.p is not None])
    found = list(checks)
    for i, value in zip(tested, values, strict=True):
        found[i] = replace(found[i], corrected=value)
    return Claim(name, text, tuple(found), tuple(notes))


def gain_check(where: str, what: str, pair: PairedComparison, bound: float = 0.0) -> Check:
    """Check that a method is better than another one by more than a bound.

    Args:
        where: the task and the number of rows.
        what: what is compared.
        pair: the comparison.
        bound: in points; -2: at most 2 points worse.
    """
    open_check = Check(where, what, bound=bound)
    if pair.value is None or pair.error is None or pair.freedom is None:
        return replace(open_check, why_open="a method has no score")
    if pair.points == 1:
        return replace(open_check, why_open=f"{pair.score} has no points")
    sign = -pair.points if pair.lower_is_better else pair.points
    value, error = sign * pair.value, pair.points * pair.error
    if not pair.covers_seeds:
        return replace(open_check, value=value, why_open="one seed")
    return tested(open_check, value, error, pair.freedom)


def tested(check: Check, value: float, error: float, freedom: float) -> Check:
    """Add a value, its interval and its test by Student's t.

    Args:
        check: what is checked.
        value: the value.
        error: its standard error.
        freedom: the degrees of freedom.
    """
    half = float(stats.t.ppf(1 - LEVEL / 2, freedom)) * error
    away = abs(value - check.bound)
    t = away / error if error > 0 else (np.inf if away else 0.0)
    p = float(2 * stats.t.sf(t, freedom))
    return replace(check, value=value, low=value - half, high=value + half, p=p)


def difference_of(check: Check, first: PairedComparison, second: PairedComparison) -> Check:
    """Check that a difference is larger in one study than in another one.

    Both have the same test rows and different runs; their covariance is taken as 0, which is
    cautious where a row is hard in both.

    Args:
        check: what is checked.
        first: the difference that should be larger.
        second: the other one.
    """
    sides = [(pair.value, pair.error, pair.freedom) for pair in (first, second)]
    if not (first.covers_seeds and second.covers_seeds) or any(None in side for side in sides):
        return replace(check, why_open="a method has no score, or one seed")
    (a, error_a, freedom_a), (b, error_b, freedom_b) = sides
    variance = error_a**2 + error_b**2
    square = error_a**4 / freedom_a + error_b**4 / freedom_b
    freedom = variance**2 / square if square > 0 else min(freedom_a, freedom_b)
    points = -first.points if first.lower_is_better else first.points
    return tested(check, points * (a - b), abs(points) * variance**0.5, freedom)


def over_groups(check: Check, values: Sequence[float]) -> Check:
    """Check that the mean of one value per task and number of rows is larger than the bound.

    The interval is a bootstrap over the groups, the test flips their signs, all of them or 9,999
    at random (`scipy.stats`).

    Args:
        check: what is checked.
        values: the value of each group.
    """
    if len(values) < FEWEST_GROUPS:
        value = float(np.mean(values)) if len(values) else None
        few = f"{len(values)} groups, {FEWEST_GROUPS} are needed"
        return replace(check, value=value, why_open=few)
    data = np.asarray(values, dtype=float)
    flipped = stats.permutation_test(
        (data - check.bound,),
        np.mean,
        permutation_type="samples",
        n_resamples=RESAMPLES,
        random_state=np.random.default_rng(0),
    )
    low, high = _bootstrap((data,), np.mean)
    p = float(flipped.pvalue)
    return replace(check, value=float(data.mean()), low=low, high=high, p=p)


def rank_correlation(check: Check, x: Sequence[float], y: Sequence[float]) -> Check:
    """Check that two values of the methods are correlated in their ranks (Spearman).

    The interval is a bootstrap over the methods, the test permutes them.

    Args:
        check: what is checked.
        x: one value of each method.
        y: the other one.
    """
    if len(x) < FEWEST_GROUPS:
        return replace(check, why_open=f"{len(x)} methods, {FEWEST_GROUPS} are needed")
    first, second = (stats.rankdata(each) for each in (x, y))
    found = stats.permutation_test(
        (first,),
        lambda each, axis=-1: _correlation(each, second, axis),
        permutation_type="pairings",
        n_resamples=RESAMPLES,
        random_state=np.random.default_rng(0),
    )
    low, high = _bootstrap((first, second), _spearman)
    value = float(found.statistic)
    return replace(check, value=value, low=low, high=high, p=float(found.pvalue))


def _spearman(x: np.ndarray, y: np.ndarray, axis: int = -1) -> np.ndarray:
    return _correlation(stats.rankdata(x, axis=axis), stats.rankdata(y, axis=axis), axis)


def _correlation(x: np.ndarray, y: np.ndarray, axis: int = -1) -> np.ndarray:
    """Return Pearson's correlation; 0 where all values are equal."""
    x, y = (each - each.mean(axis, keepdims=True) for each in (x, y))
    size = np.sqrt((x**2).sum(axis) * (y**2).sum(axis))
    return (x * y).sum(axis) / np.where(size > 0, size, 1.0)


def _bootstrap(data: tuple[np.ndarray, ...], statistic: object) -> tuple[float, float]:
    found = stats.bootstrap(
        data,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        method="percentile",
        random_state=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)
