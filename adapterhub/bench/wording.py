"""Numbers of a study as texts: scores, differences, p-values, rates, sizes and times."""

from __future__ import annotations

from adapterhub.bench.paired import PairedComparison
from adapterhub.pages.score_errors import LEVEL


def points_text(value: float, points: float) -> str:
    """Write a score: 84.1 for an accuracy of 0.841, and 0.3214 for a loss."""
    return f"{value * points:.1f}" if points > 1 else f"{value:.4g}"


def signed_text(value: float, points: float) -> str:
    """Write a difference of scores with its sign, +0.0 for one that is -0.0 by rounding."""
    number = f"{value * points:+.1f}" if points > 1 else f"{value:+.3g}"
    return number if float(number) else number.replace("-", "+", 1)


def difference_text(found: PairedComparison) -> str:
    """Write a difference with its unit: +0.4 points, or +0.0412 loss."""
    unit = "points" if found.points > 1 else found.score
    return f"{signed_text(found.value or 0.0, found.points)} {unit}"


def numbers_text(found: PairedComparison) -> str:
    """Write the difference, its interval and its p-value, corrected for all comparisons."""
    parts = [difference_text(found)]
    if found.low is not None and found.high is not None:
        low, high = (signed_text(end, found.points) for end in (found.low, found.high))
        parts.append(f"95 % interval {low} to {high}")
    if found.corrected is not None:
        parts.append(p_text(found.corrected))
    return ", ".join(parts)


def p_text(p: float) -> str:
    """Write a p-value with two digits, and three close to the level."""
    if p < 0.001:
        return "p < 0.001"
    return f"p = {p:.3g}" if abs(p - LEVEL) < 0.01 else f"p = {p:.2g}"


def rate_words(rate: float | None) -> str:
    """Write a learning rate with two digits, 1e-3 or 3.2e-3; - for none."""
    if rate is None:
        return "-"
    mantissa, exponent = f"{rate:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def size_words(size: float) -> str:
    """Write bytes with two or three digits: 1.5 MB."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2g} GB" if size < 100 else f"{size:,.0f} GB"


def time_words(seconds: float) -> str:
    """Write a duration with two or three digits: 4.2 s, 12 min."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
