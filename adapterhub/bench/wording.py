"""Results in plain English: what an estimate or a comparison says, and what it does not."""

from __future__ import annotations

from adapterhub.bench.paired import PairedComparison
from adapterhub.bench.statistics import FEWEST_ROWS, LEVEL, Estimate

_VERDICTS = {
    "better": "is better than",
    "worse": "is worse than",
    "tied": "cannot be told apart from",
}


def points_text(value: float, points: float) -> str:
    """Write a score: 84.1 for an accuracy of 0.841, and 0.3214 for a loss."""
    return f"{value * points:.1f}" if points > 1 else f"{value:.4g}"


def difference_text(found: PairedComparison) -> str:
    """Write a difference with its unit: +0.4 points, or +0.0412 loss."""
    unit = "points" if found.points > 1 else found.score
    return f"{_signed(found.value or 0.0, found.points)} {unit}"


def p_text(p: float) -> str:
    """Write a p-value with two digits, and three close to the level."""
    if p < 0.001:
        return "p < 0.001"
    return f"p = {p:.3g}" if abs(p - LEVEL) < 0.01 else f"p = {p:.2g}"


def estimate_sentence(found: Estimate) -> str:
    """Describe the score of a method: its interval, its seeds, and those that failed."""
    if found.value is None:
        return f"{found.method}: no score, {_failures(found.failed, found.failed)}."
    score = f"{found.method}: {found.score} {points_text(found.value, found.points)}"
    parts = [_interval_text(found), _seeds_text(found), f"{found.rows:,} test rows"]
    if found.failed:
        parts.append(_failures(found.failed, found.failed + len(found.scores)))
    return f"{score} ({'; '.join(part for part in parts if part)})."


def _interval_text(found: Estimate) -> str:
    if found.low is None or found.high is None:
        return f"no interval with fewer than {FEWEST_ROWS} test rows"
    over = "" if found.covers_seeds else " over test rows only"
    ends = [points_text(end, found.points) for end in (found.low, found.high)]
    return f"95 % interval{over} {ends[0]} to {ends[1]}"


def _seeds_text(found: Estimate) -> str:
    if found.sd is not None:
        return f"{len(found.scores)} seeds, sd {points_text(found.sd, found.points)}"
    if found.covers_seeds:
        return "" if not found.failed else "one seed"
    return "one seed, so its spread over seeds is not known"


def comparison_sentence(found: PairedComparison) -> str:
    """Say whether a method is better or worse than its baseline, with the numbers.

    A method with failed seeds is compared by those that finished, and the sentence says so.
    """
    if found.verdict == "unknown":
        return f"It is not known how {found.method} compares with {found.baseline}: {_why(found)}."
    finished = " in the seeds that finished" if any(found.failed) else ""
    verdict = f"{found.method} {_VERDICTS[found.verdict]} {found.baseline}{finished}"
    names, counts = (found.baseline, found.method), zip(found.failed, found.seeds, strict=True)
    failures = [
        f"; {_failures(failed, failed + seeds)} for {name}"
        for name, (failed, seeds) in zip(names, counts, strict=True)
        if failed
    ]
    return f"{verdict} ({numbers_text(found)}){''.join(failures)}."


def numbers_text(found: PairedComparison) -> str:
    """Write the difference, its interval and its p-value.

    The interval is that of one difference, the p-value is corrected for all: where only the
    interval would tell the two apart, it is marked as that of this pair alone.
    """
    parts = [difference_text(found)]
    if found.low is not None and found.high is not None:
        apart = not found.low <= 0 <= found.high
        alone = " of this pair alone" if apart and found.verdict == "tied" else ""
        ends = [_signed(end, found.points) for end in (found.low, found.high)]
        over = "" if found.covers_seeds else " over test rows only"
        parts.append(f"95 % interval{alone}{over} {ends[0]} to {ends[1]}")
    if found.corrected is not None:
        many = f" after correction for {found.comparisons} comparisons"
        parts.append(p_text(found.corrected) + (many if found.comparisons > 1 else ""))
    return ", ".join(parts)


def _why(found: PairedComparison) -> str:
    """Say why there is no verdict."""
    names = found.baseline, found.method
    for name, seeds, failed in zip(names, found.seeds, found.failed, strict=True):
        if not seeds:
            return f"{name} has no score, {_failures(failed, failed)}"
    if found.rows < FEWEST_ROWS:
        few = f"{found.rows} test rows are too few, at least {FEWEST_ROWS} are needed"
        return f"{few} ({difference_text(found)})"
    single = [name for name, seeds in zip(names, found.seeds, strict=True) if seeds == 1]
    verb = "has" if len(single) == 1 else "have"
    return f"{' and '.join(single)} {verb} one finished seed ({numbers_text(found)})"


def _failures(failed: int, seeds: int) -> str:
    if failed == seeds:
        return (
            f"all {seeds} seeds failed" if seeds > 1 else "its seed failed" if seeds else "not run"
        )
    return f"{failed} of {seeds} seeds failed"


def _signed(value: float, points: float) -> str:
    return without_negative_zero(f"{value * points:+.1f}" if points > 1 else f"{value:+.3g}")


def without_negative_zero(number: str) -> str:
    """Write +0.0 for a signed number that is -0.0 by rounding."""
    return number if float(number) else number.replace("-", "+", 1)


def time_words(seconds: float) -> str:
    """Write a duration with two or three digits: 4.2 s, 12 min."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
