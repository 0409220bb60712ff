"""Recommend a method: the cheapest one within the interval of the best, if the runs can tell."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from adapterhub.bench.paired import PairedComparison, compare_each, compare_with
from adapterhub.bench.statistics import (
    FEWEST_SEEDS,
    Estimate,
    RepeatedRuns,
    estimate_all,
)
from adapterhub.pages.row_scores import FEWEST_ROWS, LEVEL


def points_text(value: float, points: float) -> str:
    """Format a score: 84.1 for an accuracy of 0.841, and 0.3214 for a loss."""
    return f"{value * points:.1f}" if points > 1 else f"{value:.4g}"


def signed_text(value: float, points: float) -> str:
    """Format a difference of scores with its sign; -0.0 after rounding becomes +0.0."""
    number = f"{value * points:+.1f}" if points > 1 else f"{value:+.3g}"
    return number if float(number) else number.replace("-", "+", 1)


def difference_text(pair: PairedComparison) -> str:
    """Format a difference with its unit: +0.4 points, or +0.0412 loss."""
    unit = "points" if pair.points > 1 else pair.score
    return f"{signed_text(pair.value or 0.0, pair.points)} {unit}"


def numbers_text(pair: PairedComparison) -> str:
    """Format the difference, its interval and its p-value, corrected for all comparisons alike."""
    parts = [difference_text(pair)]
    if (interval := pair.corrected_interval) is not None:
        low, high = (signed_text(end, pair.points) for end in interval)
        parts.append(f"95 % interval {low} to {high}")
    if pair.corrected is not None:
        parts.append(p_text(pair.corrected))
    return ", ".join(parts)


def p_text(p: float) -> str:
    """Format a p-value with two digits, or three close to the level."""
    if p < 0.001:
        return "p < 0.001"
    return f"p = {p:.3g}" if abs(p - LEVEL) < 0.01 else f"p = {p:.2g}"


def rate_words(rate: float | None) -> str:
    """Format a learning rate with two digits, 1e-3 or 3.2e-3; - if it is missing."""
    if rate is None:
        return "-"
    mantissa, exponent = f"{rate:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def size_words(size: float) -> str:
    """Format bytes with two or three digits: 1.5 MB."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2g} GB" if size < 100 else f"{size:,.0f} GB"


def time_words(seconds: float) -> str:
    """Format a duration with two or three digits: 4.2 s, 12 min."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


_MARGIN = 0.01  # allowed loss without an adapter, of a score of 1, else of the score
_NEAR = 1.25  # times the least time: other runs may reverse smaller differences


_SEEDS = {3: "three"}[FEWEST_SEEDS]


class Cost(NamedTuple):
    """The cost of a method: its trained parameters, none if it is not trained, and seconds.

    `is_adapter` is false if only the task head is trained, or nothing.
    """

    trained: float = math.inf
    seconds: float = math.inf
    is_adapter: bool = True


@dataclass(frozen=True)
class Recommendation:
    """A recommended method, with reasons.

    Attributes:
        method: the recommended method; None if the runs cannot tell.
        best: the tested method with the best mean score.
        reasons: sentences with the reasons, with numbers and open questions.
        unproven: the untrained baselines that the method was not shown to beat.
        candidate: the method that would be recommended if the runs were long enough.
    """

    method: str | None
    best: str | None
    reasons: tuple[str, ...]
    unproven: tuple[str, ...] = ()
    candidate: str | None = None


@dataclass(frozen=True)
class ShortRuns:
    """Runs that are too short for a recommendation because of the study's budget.

    Attributes:
        steps: the steps of a whole run.
        usual: the steps that `adapterhub train` takes.
        seconds: the approximate time of the study with the usual steps.
    """

    steps: int
    usual: int
    seconds: float


Pairs = Mapping[tuple[str, str], PairedComparison]
"""Keys: the names of the baseline and of the method."""


def recommend(
    study: Sequence[RepeatedRuns],
    costs: Mapping[str, Cost],
    recorded: Collection[str] = (),
    short: ShortRuns | None = None,
    ranks: Sequence[Mapping[str, int]] = (),
) -> Recommendation:
    """Recommend the cheapest method within the interval of the best.

    `ranks` groups methods that differ in rank alone: the rank of each by name.

    Methods with one seed or without a score are not candidates. Recorded methods are not candidates
    either: the recommendation is the same without them.

    Raises:
        ConfigError: the methods were scored differently, or on different rows.
    """
    estimates = {estimate.method: estimate for estimate in estimate_all(study)}
    tested = [r for r in study if estimates[r.method].covers_seeds and r.is_comparable]
    own = [runs for runs in tested if runs.method not in recorded]
    adapters = [r.method for r in study if _is_adapter(costs.get(r.method, Cost()))]
    if not own or (adapters and not any(r.method in adapters for r in own)):
        return Recommendation(None, None, (_nothing_tested(estimates),))
    untested = [estimates[r.method] for r in study if r not in tested]
    pairs = compare_each(own)
    best = _best(own)
    able = within_best(own, best, pairs)
    chosen = cheapest([runs for runs in able if not runs.failed] or able, costs)
    if short is not None:
        return Recommendation(None, best.method, (_too_short(short),), candidate=chosen.method)
    untrained = [r.method for r in own if costs.get(r.method, Cost()).trained == 0]
    levels = {runs.method: float(runs.scores.mean()) for runs in own}
    if doubt := _not_shown(chosen.method, pairs, costs, levels):
        doubts = (doubt, *_smallest_ranks(own, ranks, pairs), *_not_tested(untested))
        return Recommendation(None, best.method, doubts, candidate=chosen.method)
    below = [] if chosen.method in untrained else untrained
    beside = [pairs[name, chosen.method] for name in below]
    unproven = [pair for pair in beside if pair.verdict != "better"]
    others = [runs for runs in tested if runs.method in recorded]
    reasons = [
        _take(estimates[chosen.method], costs.get(chosen.method, Cost())),
        *_why(chosen.method, best.method, len(able), pairs, untrained),
        *map(_not_better, unproven),
        *_smallest_ranks(own, ranks, pairs, chosen.method),
        *_recorded_better(compare_with(chosen, others)),
        *_not_tested(untested),
        *_resolution([pair for (first, _), pair in pairs.items() if first == best.method]),
    ]
    beyond = tuple(pair.baseline for pair in unproven)
    return Recommendation(chosen.method, best.method, tuple(reasons), beyond)


def _not_shown(
    method: str, pairs: Pairs, costs: Mapping[str, Cost], levels: Mapping[str, float]
) -> str:
    """Return why a method without an adapter cannot be recommended yet; "" if it can.

    Such a method must be shown to be no worse than each adapter, by a margin of one point, or of a
    hundredth of a score without points (a test of non-inferiority).
    """
    if _is_adapter(costs.get(method, Cost())):
        return ""
    doubts = [
        pair.mirrored
        for (other, adapter), pair in pairs.items()
        if other == method
        and _is_adapter(costs.get(adapter, Cost()))
        and _behind(pair.mirrored) < -_MARGIN * (1.0 if pair.points > 1 else abs(levels[adapter]))
    ]
    if not doubts:
        return ""
    worst = min(doubts, key=_behind)
    unit = "1 point" if worst.points > 1 else f"{_MARGIN:.0%} of the {worst.score}"
    return (
        f"Cannot tell yet whether {method} is enough: it was not shown to be no more than {unit} "
        f"worse than {worst.baseline} ({numbers_text(worst)}). More test rows and seeds would tell."
    )


def _is_adapter(cost: Cost) -> bool:
    return cost.is_adapter and cost.trained > 0


def _behind(pair: PairedComparison) -> float:
    """Return the worse end of the interval, negative if the method may be worse."""
    end = pair.high if pair.lower_is_better else pair.low
    if end is None:
        return -math.inf
    return -end if pair.lower_is_better else end


def within_best(
    tested: Sequence[RepeatedRuns], best: RepeatedRuns, pairs: Pairs
) -> list[RepeatedRuns]:
    """Return the methods within the interval of the best, including the best.

    For such a method, the interval of its difference from the best, for this pair alone, contains
    0. Its mean also lies in the interval of the best over its own seeds: if the seeds of a method
    differ widely, no test can separate methods. Methods are excluded if any other one is better.
    """
    (alone,) = estimate_all([best])
    low, high = alone.low or 0.0, alone.high or 0.0
    beaten = {pair.baseline for pair in pairs.values() if pair.verdict == "better"}
    behind = {
        pair.method
        for (first, _), pair in pairs.items()
        if first == best.method and not (pair.low or 0.0) <= 0 <= (pair.high or 0.0)
    }
    near = [runs for runs in tested if runs is best or low <= runs.scores.mean() <= high]
    return [runs for runs in near if runs.method not in beaten | behind]


def cheapest(able: Sequence[RepeatedRuns], costs: Mapping[str, Cost]) -> RepeatedRuns:
    """Return the method with the fewest parameters, then the shortest time, then the best mean.

    Sizes with the same two digits count as equal, and so do times within a quarter.
    """
    of = {runs.method: costs.get(runs.method, Cost()) for runs in able}
    sizes = {name: float(f"{cost.trained:.1e}") for name, cost in of.items()}
    small = [runs for runs in able if sizes[runs.method] == min(sizes.values())]
    least = min(of[runs.method].seconds for runs in small)
    return _best([runs for runs in small if of[runs.method].seconds <= _NEAR * least])


def _best(study: Sequence[RepeatedRuns]) -> RepeatedRuns:
    sign = -1 if study[0].score.lower_is_better else 1
    return max(study, key=lambda runs: sign * float(runs.scores.mean()))


def _nothing_tested(estimates: Mapping[str, Estimate]) -> str:
    rows = max((estimate.rows for estimate in estimates.values()), default=0)
    if 0 < rows < FEWEST_ROWS:
        return f"Cannot tell yet: {rows} test rows are too few, at least {FEWEST_ROWS} are needed."
    return f"Cannot tell yet: no method has {_SEEDS} finished seeds."


def _too_short(short: ShortRuns) -> str:
    return (
        f"Cannot tell yet: the budget allowed runs of {short.steps:,} steps, where adapterhub "
        f"train takes {short.usual:,}. A study with a budget of about {time_words(short.seconds)} "
        "would tell."
    )


def _take(estimate: Estimate, cost: Cost) -> str:
    """Name the recommended method, with its score and its cost."""
    parts = [f"{estimate.score} {points_text(estimate.value or 0.0, estimate.points)}"]
    if estimate.low is not None and estimate.high is not None:
        ends = [points_text(end, estimate.points) for end in (estimate.low, estimate.high)]
        parts[0] += f" (95 % interval {ends[0]} to {ends[1]})"
    name = estimate.method
    if cost.trained == 0:
        name = f"the {name}"
        parts.append("without training the backbone")
    elif cost.trained < math.inf:
        parts += [f"{cost.trained:,} trained parameters", f"{time_words(cost.seconds)} of training"]
    return f"Take {name}: {', '.join(parts)}."


def _why(method: str, best: str, able: int, pairs: Pairs, untrained: Collection[str]) -> list[str]:
    """Explain how the method compares with the best, and with the methods within its interval."""
    reasons = []
    if method != best:
        numbers = numbers_text(pairs[best, method])
        reasons.append(f"{best} has the best mean, but {method} is near enough ({numbers}).")
    elif able > 1:
        reasons.append(f"It has the best mean; {able - 1} more are near enough, and cost no less.")
    elif pairs:
        reasons.append("It has the best mean, and no other method is near enough.")
    if method in untrained:
        reasons.append(f"No trained method was shown to be better than the {method}.")
    return reasons


def _smallest_ranks(
    own: Sequence[RepeatedRuns],
    groups: Sequence[Mapping[str, int]],
    pairs: Pairs,
    chosen: str = "",
) -> Iterator[str]:
    """Name the smallest rank within the interval of the best, for each group of several.

    The numbers of the chosen method are in another sentence.
    """
    for ranks in groups:
        mine = [runs for runs in own if runs.method in ranks]
        if len(mine) < 2:
            continue
        best = _best(mine)
        small = min(within_best(mine, best, pairs), key=lambda runs: ranks[runs.method])
        rank, numbers = ranks[small.method], sorted({ranks[runs.method] for runs in mine})
        *most, last = map(str, numbers)
        named = f"Of the ranks {', '.join(most)} and {last}"
        if small is not best:
            text = numbers_text(pairs[best.method, small.method])
            text = "" if small.method == chosen else f" ({text})"
            top = ranks[best.method]
            yield f"{named}, {rank} is the smallest that is near enough to the best, {top}{text}."
        elif rank == numbers[0]:
            yield f"{named}, {rank} has the best mean, so no larger one is needed."
        else:
            yield f"{named}, {rank} has the best mean, and no smaller one is near enough."


def _not_better(pair: PairedComparison) -> str:
    return f"It was not shown to be better than {pair.baseline} ({numbers_text(pair)})."


def _recorded_better(pairs: Sequence[PairedComparison]) -> list[str]:
    """Name recorded methods of other programs that are better than the chosen one."""
    named = [f"{p.method} ({difference_text(p)})" for p in pairs if p.verdict == "better"]
    return [f"Recorded by another program, and better: {', '.join(named)}."] if named else []


def _not_tested(left_out: Sequence[Estimate]) -> list[str]:
    names = ", ".join(estimate.method for estimate in left_out)
    return [f"Not tested, without {_SEEDS} finished seeds: {names}."] if names else []


def _resolution(pairs: Sequence[PairedComparison]) -> list[str]:
    """State the smallest difference that the study can detect."""
    if all(pair.verdict == "worse" for pair in pairs):
        return []
    size = median(pair.smallest or 0.0 for pair in pairs)
    points, score = pairs[0].points, pairs[0].score
    text = f"{size * points:.1f} points" if points > 1 else f"{size:.2g} {score}"
    return [f"With these rows and seeds, a difference of less than about {text} cannot be seen."]
