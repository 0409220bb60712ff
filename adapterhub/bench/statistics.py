"""The score of each method, with an interval over test rows and seeds.

This is the model of multi-reader multi-case studies, with methods as tests, seeds as readers nested
in tests, and test rows as cases (Obuchowski & Rockette 1995,
https://doi.org/10.1080/03610919508813243; Hillis 2014, https://doi.org/10.1002/sim.5926):

    score of method m, seed s = mean of m + seed effect + row error
    row errors correlate, since all runs are scored on the same rows

The mean of J seeds then has the variance

    V = C + S / J                  C: covariance of two seeds of the method, from the rows
                                   S: variance of the seeds' scores beyond C

C is a jackknife estimate. It exists for every score of summed rows, and depends neither on the
order of the rows nor on a random number. With three seeds, S has two degrees of freedom, so it is
pooled over the methods of the study, as Obuchowski and Rockette do. A method whose seeds spread
more than the others' (F test at 10 %) keeps its own S, and a few unsteady methods leave the pool. A
bootstrap over rows and three seeds is too narrow, since it divides by J where J - 1 is right and
lacks a t quantile; tests/bench tests both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from adapterhub.errors import ConfigError
from adapterhub.pages.row_scores import (
    FEWEST_ROWS,
    LARGEST,
    Numbers,
    PredictionFile,
    RowScore,
    Uncertainty,
    grouped_columns,
    influence_of_rows,
    rare_interval,
    score_interval,
)

Flags = np.ndarray[Any, np.dtype[np.bool_]]

FEWEST_SEEDS = 3  # with fewer, no conclusion about differences between methods
_OWN_SPREAD = 0.10  # level of the F test that lets a method keep its own spread
_UNSTEADY = 1e-6  # level at which its spread is not pooled with the others'
_MOST_UNSTEADY = 0.25  # share of the methods
_FEWEST_POOLED = 4  # with fewer methods, unsteady ones cannot be identified


@dataclass(frozen=True, eq=False)
class RepeatedRuns:
    """The runs of one method on the same test rows, one for each seed.

    Attributes:
        method: its name in the study.
        score: the score to compare.
        columns: the columns of each finished seed, (rows, columns).
        failed: the number of seeds that failed or diverged, which are not in `columns`.
        deterministic: whether seeds cannot change the predictions, such as a majority class or a
            prompt.
        data: the sha256 of the test data, shared by all methods of a study.
        is_recorded: whether another program ran them; the usual spread then comes from the others.
        is_constant: whether every row has the same prediction by construction; no other rows can
            have another one, so that none of its classes is rare by chance.
    """

    method: str
    score: RowScore
    columns: tuple[Numbers, ...]
    failed: int = 0
    deterministic: bool = False
    data: str = ""
    is_recorded: bool = False
    is_constant: bool = False

    @property
    def seeds(self) -> int:
        """The number of finished seeds."""
        return len(self.columns)

    @property
    def rows(self) -> int:
        """The number of test rows; 0 without a finished seed."""
        return len(self.columns[0]) if self.columns else 0

    @property
    def is_repeated(self) -> bool:
        """Whether the seeds show how much a score depends on the seed."""
        return self.seeds > 1 and not self.deterministic

    @property
    def is_comparable(self) -> bool:
        """Whether there are enough seeds to compare the method with another.

        With two, the spread is often estimated far too small: one in ten findings was false.
        """
        return self.seeds >= FEWEST_SEEDS or (self.deterministic and self.seeds > 0)

    @cached_property
    def scores(self) -> Numbers:
        """The score of each seed."""
        return np.array([float(self.score.summarize(c.sum(0))) for c in self.columns])

    @cached_property
    def influence(self) -> Numbers:
        """The influence of each row on each seed's score, (seeds, rows), by the jackknife."""
        return np.stack([influence_of_rows(self.score, columns) for columns in self.columns])

    @cached_property
    def mean_influence(self) -> Numbers:
        """The influence of each row on the mean of the seeds' scores."""
        mean: Numbers = self.influence.mean(0)
        return mean

    @cached_property
    def row_variance(self) -> float:
        """The variance over test rows of the mean of these runs alone."""
        return covariance(self, self)

    @cached_property
    def noise_variance(self) -> float:
        """The variance over test rows that a seed does not share with the method's other seeds.

        With c(s, t) the covariance of two seeds' scores: mean of c(s, s) - mean of c(s, t).
        """
        own = float((self.influence**2).sum()) / self.seeds / (self.rows * (self.rows - 1))
        return max((own - self.row_variance) * self.seeds / (self.seeds - 1), 0.0)

    @property
    def shared_variance(self) -> float:
        """The mean of c(s, t) over two seeds: C above."""
        return self.row_variance - self.noise_variance / self.seeds


def covariance(first: RepeatedRuns, second: RepeatedRuns) -> float:
    """Compute the covariance over test rows of the means of two methods' runs."""
    rows = first.rows
    return float(first.mean_influence @ second.mean_influence) / (rows * (rows - 1))


def repeated_runs(
    method: str,
    files: Sequence[PredictionFile],
    score: RowScore,
    *,
    failed: int = 0,
    deterministic: bool = False,
) -> RepeatedRuns:
    """Collect the predictions of a method's seeds.

    A seed has failed if a prediction or a loss is not a number or is too large.

    Raises:
        ConfigError: the test rows of the seeds differ.
    """
    if len({(file.kind, file.data, len(file.rows)) for file in files}) > 1:
        raise ConfigError(
            f"the seeds of {method} were tested on different rows",
            expected="one test set for all seeds",
            offenders=[f"{len(file.rows):,} rows, sha256 {file.data[:12]}" for file in files],
        )
    columns = [grouped_columns(score, file.rows) for file in files]
    finite = tuple(c for c in columns if np.abs(c).max() < LARGEST / len(c))
    failed += len(files) - len(finite)
    data = files[0].data if files else ""
    return RepeatedRuns(method, score, finite, failed, deterministic, data)


@dataclass(frozen=True)
class SeedSpread:
    """The variance of one seed's score around its method's mean.

    Attributes:
        variance: the variance; divide by J for the mean of J seeds.
        freedom: its degrees of freedom.
        is_pooled: whether it is estimated from all methods of the study.
    """

    variance: float
    freedom: float
    is_pooled: bool


def seed_spreads(study: Sequence[RepeatedRuns]) -> dict[str, SeedSpread]:
    """Estimate the spread over seeds of each method with several seeds.

    A seed's score varies by the seed's effect and by the row errors that it does not share:

        S = E + N       N: `noise_variance`, from the rows, so it is known well
                        E: pooled over the methods, weighted by J - 1, and not negative

    A method keeps its own S if it is larger than that of the others by an F test at 10 %. It leaves
    the pool only if it is larger at one in a million: one very unsteady method does not blur all
    others, and the pool does not shrink by methods that spread by chance. The pool has the degrees
    of freedom of its methods, sum of J - 1. Recorded methods are never in it, unless all are
    recorded: the seeds of another program are no reason to doubt those of this one.
    """
    repeated = [runs for runs in study if runs.is_repeated and runs.rows >= FEWEST_ROWS]
    freedom = np.array([runs.seeds - 1.0 for runs in repeated])
    noise = np.array([runs.noise_variance for runs in repeated])
    own = np.array([runs.scores.var(ddof=1) for runs in repeated])
    mine = np.array([not runs.is_recorded for runs in repeated], dtype=bool)
    mine = mine if mine.any() else ~mine
    steady = np.zeros_like(mine)
    steady[mine] = _steady(own[mine], noise[mine], freedom[mine])
    tails = _tails(own, noise, freedom, steady)
    pooled = _excess((own - noise)[steady], freedom[steady]) + noise
    spreads = {}
    for i, runs in enumerate(repeated):
        if tails[i] < _OWN_SPREAD:
            spreads[runs.method] = SeedSpread(max(own[i], pooled[i]), freedom[i], False)
        else:
            spreads[runs.method] = SeedSpread(pooled[i], freedom[steady].sum(), True)
    return spreads


def _steady(own: Numbers, noise: Numbers, freedom: Numbers) -> Flags:
    """Return the methods in the pool: first those near the median, then those near the pool.

    A mean would be raised by several unsteady methods, which would then hide each other. If more
    than a quarter are unsteady, there is no usual spread, and all methods are pooled, which is
    cautious.
    """
    from scipy.special import chdtri, fdtrc

    everything = np.ones(len(own), dtype=bool)
    if len(own) < _FEWEST_POOLED:
        return everything
    usual = np.median((own - noise) * freedom / chdtri(freedom, 0.5))
    ratio = own / np.maximum(max(usual, 0.0) + noise, np.finfo(float).tiny)
    steady: Flags = fdtrc(freedom, freedom.sum() / 2, ratio) >= _UNSTEADY
    if steady.mean() < 1 - _MOST_UNSTEADY:
        return everything
    return _tails(own, noise, freedom, steady) >= _UNSTEADY


def _excess(differences: Numbers, freedom: Numbers) -> float:
    total = float(freedom.sum())
    return max(float(freedom @ differences) / total, 0.0) if total else 0.0


def _tails(own: Numbers, noise: Numbers, freedom: Numbers, steady: Flags) -> Numbers:
    """Return for each method the p-value of so large a variance if the method were steady.

    `noise` is the part due to the test rows.
    """
    from scipy.special import fdtrc

    tails = np.ones(len(own))
    for i in range(len(own)):
        others = steady & (np.arange(len(own)) != i)
        expected = _excess((own - noise)[others], freedom[others]) + noise[i]
        if not others.any() or own[i] <= 0:
            continue
        total = freedom[others].sum()
        tails[i] = fdtrc(freedom[i], total, own[i] / expected) if expected > 0 else 0.0
    return tails


def uncertainty(
    row_variance: float, rows: int, seeds: Sequence[tuple[SeedSpread, int]]
) -> Uncertainty:
    """Add up the variance of a mean or a difference of means, over rows and seeds.

    The degrees of freedom are Satterthwaite's (1946), V^2 / sum of v^2 / freedom, as derived for
    this model by Hillis (2007, https://doi.org/10.1002/sim.2532). Methods with the pooled spread
    share its error too, so they form one term. `seeds` has the spread of each method in the
    difference, and its number of seeds.
    """
    terms = [(max(row_variance, 0.0), rows - 1.0)]
    terms += [(s.variance / count, s.freedom) for s, count in seeds if not s.is_pooled]
    if shared := [(s.variance / count, s.freedom) for s, count in seeds if s.is_pooled]:
        terms.append((sum(variance for variance, _ in shared), shared[0][1]))
    total = sum(variance for variance, _ in terms)
    square = sum(variance**2 / freedom for variance, freedom in terms)
    return Uncertainty(total, total**2 / square if square > 0 else rows - 1.0)


@dataclass(frozen=True)
class Estimate:
    """The score of a method; None where it cannot be estimated.

    Attributes:
        method: its name in the study.
        score: the metric's name.
        points: the points in a score of 1, for printing.
        rows: the number of test rows.
        scores: the score of each finished seed.
        value: the mean over finished seeds.
        sd: the standard deviation over seeds; None for one seed.
        low: the lower end of the 95 % interval; None with fewer than 20 rows.
        high: its upper end.
        covers_seeds: whether the interval also covers the choice of the seeds; with one seed, it is
            the interval of this one run on other test rows.
    """

    method: str
    score: str
    points: float
    rows: int
    scores: tuple[float, ...]
    value: float | None = None
    sd: float | None = None
    low: float | None = None
    high: float | None = None
    covers_seeds: bool = False


def estimate_all(study: Sequence[RepeatedRuns]) -> list[Estimate]:
    """Estimate the score of each method of a study, in its order.

    Raises:
        ConfigError: the methods were scored differently, or on different rows.
    """
    check_study(study)
    spreads = seed_spreads(study)
    return [_estimate(runs, spreads.get(runs.method)) for runs in study]


def check_study(study: Sequence[RepeatedRuns]) -> None:
    """Check that methods can be in one table.

    Raises:
        ConfigError: two methods have the same name, different scores, or different test rows.
    """
    names, scores = {runs.method for runs in study}, {runs.score.name for runs in study}
    rows = {(runs.data, len(columns)) for runs in study for columns in runs.columns}
    if len(names) < len(study) or len(scores) > 1 or len(rows) > 1:
        raise ConfigError(
            "these methods cannot be compared",
            expected="methods with different names, one score and the same test rows",
            offenders=[
                f"{runs.method}: {runs.score.name}, {runs.rows:,} rows, sha256 {runs.data[:12]}"
                for runs in study
            ],
        )


def _estimate(runs: RepeatedRuns, spread: SeedSpread | None) -> Estimate:
    score, scores = runs.score, tuple(map(float, runs.scores))
    estimate = Estimate(runs.method, score.name, score.points, runs.rows, scores)
    if not scores:
        return estimate
    value = float(runs.scores.mean())
    sd = float(runs.scores.std(ddof=1)) if len(scores) > 1 else None
    low, high = _interval(runs, value, spread) if runs.rows >= FEWEST_ROWS else (None, None)
    covers = low is not None and (spread is not None or runs.deterministic)
    return replace(estimate, value=value, sd=sd, low=low, high=high, covers_seeds=covers)


def _interval(runs: RepeatedRuns, value: float, spread: SeedSpread | None) -> tuple[float, float]:
    """Return the 95 % interval of a method's score."""
    over_rows = runs.shared_variance if spread else runs.row_variance
    over = uncertainty(over_rows, runs.rows, [(spread, runs.seeds)] if spread else [])
    low, high = score_interval(runs.score, value, over, runs.rows, of_rows=spread is None)
    if runs.score.pseudo_rows is None or runs.is_constant:
        return low, high
    # Combination of rows and seeds: Zou & Donner 2008, https://doi.org/10.1002/sim.3095.
    ends = np.mean([rare_interval(runs.score, columns) for columns in runs.columns], axis=0)
    of_seeds = over.quantile**2 * spread.variance / runs.seeds if spread else 0.0
    below, above = (float(np.sqrt((end - value) ** 2 + of_seeds)) for end in ends)
    return (
        max(min(low, value - below), runs.score.low),
        min(max(high, value + above), runs.score.high),
    )
