"""Charts as SVG: small, without dates, the same bytes for the same data, light and dark."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from adapterhub.errors import one_line
from adapterhub.pages.statistics import CalibrationBin
from adapterhub.pages.svg import Axes, limits

LINES = ("first", "second", "third", "muted")  # the colours of several lines
_FEW = 30  # points of a line that are marked
_BINS = 30  # of a histogram
_MOST_POINTS = 300
_MOST_IN_A_NAME = 30  # characters, in a legend
_LARGEST = 1e30  # of a value, whose distance to another is then finite
_LOGARITHMIC = 100  # ratio of values from which on an axis is logarithmic

Points = Sequence[tuple[float, float | None]]
"""x and y; None where there is no value."""


def line_chart(
    lines: dict[str, Points],
    x: str,
    *,
    best: float | None = None,
    span: float = 0.0,
    zero: bool = False,
    log: bool = False,
) -> str:
    """Draw lines over the steps of a run.

    Args:
        lines: the points of each line, by name.
        x: the label of the horizontal axis.
        best: the x of the best evaluation, to mark.
        span: the least difference between the ends of the vertical axis: noise stays small.
        zero: whether the vertical axis begins at 0.
        log: whether it may be logarithmic, if the values are very different.
    """
    drawn = {
        (one_line(name, _MOST_IN_A_NAME), colour): _thinned(points)
        for (name, points), colour in zip(lines.items(), LINES, strict=False)
    }
    values = [y for points in drawn.values() for _, y in points]
    log = bool(log and values and max(values) > _LOGARITHMIC * min(values) > 0)
    axes = Axes(
        limits([x for points in drawn.values() for x, _ in points]),
        (0.0, 1.1 * max(values, default=1.0) or 1.0) if zero else _widened(values, span, log=log),
        whole=True,
        log=log,
        legend=drawn if len(drawn) > 1 else (),
    )
    for (_, colour), points in drawn.items():
        axes.line(points, colour)
        axes.dots(points if len(points) < _FEW else [], colour)
        axes.dots([p for p in points if p[0] == best], "second", radius=3.5, hollow=True)
    return axes.svg(one_line(x))


def reliability_chart(bins: Sequence[CalibrationBin]) -> str:
    """Draw the accuracy of the predictions by their probability."""
    total = sum(b.count for b in bins)
    axes = Axes((0.0, 1.0), (0.0, 1.02))
    axes.bars([(b.low + 0.005, b.low + 0.095, b.count / total) for b in bins], "grid")
    axes.line([(0, 0), (1, 1)], "muted", width=1, dashed=True)
    points = [(b.confidence, b.accuracy) for b in bins]
    axes.line(points, "first")
    axes.dots(points, "first", radius=2)
    return axes.svg("probability", "accuracy")


def scatter_chart(true: Sequence[float], predicted: Sequence[float]) -> str:
    """Draw predicted over true numbers, with the diagonal."""
    both = np.array([true, predicted]).clip(-_LARGEST, _LARGEST)
    ends = float(both.min()), float(both.max())
    across, up = (limits([float(row.min()), float(row.max()), *ends]) for row in both)
    axes = Axes(across, up)
    axes.line([(end, end) for end in ends], "muted", width=1, dashed=True)
    axes.dots(both[:, _spread(len(true), 500)].T.tolist(), "first", opacity=0.45)
    return axes.svg("true", "predicted")


def histogram_chart(values: Sequence[float], x: str, *, centre: float | None = None) -> str:
    """Draw how many values there are by size.

    Args:
        values: the values.
        x: the label of the horizontal axis.
        centre: where to draw a vertical line.
    """
    kept = np.array(values, dtype=float).clip(-_LARGEST, _LARGEST)
    low, high = float(kept.min()), float(kept.max())
    if high - low < 1e-6 * max(abs(low), abs(high), 1e-6):  # no bins between almost equal ends
        margin = abs(low) / 10 or 0.5
        low, high = low - margin, high + margin
    counts, edges = np.histogram(kept, bins=_BINS, range=(low, high))
    marked = [] if centre is None else [centre]
    axes = Axes(limits([low, high, *marked]), (0.0, 1.05 * int(counts.max())))
    axes.bars(zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True), "first")
    for value in marked:
        axes.line([(value, 0.0), (value, axes.y.high)], "second", width=1.2)
    return axes.svg(x, "examples")


def _widened(values: Sequence[float], span: float, *, log: bool) -> tuple[float, float]:
    """Return the ends of the vertical axis, at least `span` apart unless it is logarithmic."""
    low, high = limits(values, log=log)
    if log or high - low >= span:
        return low, high
    middle = (low + high) / 2
    return middle - span / 2, middle + span / 2


def _thinned(points: Points) -> list[tuple[float, float]]:
    """Return the points that have a value; the mean of neighbours if there are very many."""
    kept = np.array([(x, y) for x, y in points if y is not None], dtype=float).reshape(-1, 2)
    kept = kept[np.isfinite(kept).all(1)].clip(-_LARGEST, _LARGEST)
    if len(kept) > _MOST_POINTS:
        kept = np.array([part.mean(0) for part in np.array_split(kept, _MOST_POINTS)])
    return [(x, y) for x, y in kept.tolist()]


def _spread(count: int, most: int) -> list[int]:
    """Choose at most `most` indices, evenly."""
    return [*range(count)] if count <= most else [i * count // most for i in range(most)]
