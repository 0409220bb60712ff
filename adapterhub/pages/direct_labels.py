"""Names beside the points and lines of a chart, so that it needs no legend."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from adapterhub.errors import one_line
from adapterhub.pages.figures import INK, MUTED

_SIZE = 8.5  # points
_HEIGHT, _WIDTH = 1.15 * _SIZE, 0.56 * _SIZE  # of a line and of a character, about
_MOST = 20  # characters of a name
# Where a label may be beside its point: to the right or left, above or below, and how far.
_SIDES = ((1, 1), (1, -1), (-1, 1), (-1, -1), (0, 1), (0, -1), (1, 0), (-1, 0))
_DISTANCES = (5, 12, 22, 34, 48)

Box = tuple[float, float, float, float]


def short_name(name: str) -> str:
    """Return a name as a chart shows it."""
    return one_line(name, _MOST)


def label_points(
    axes: Any, points: Mapping[str, tuple[float, float]], lines: Sequence[Box] = ()
) -> None:
    """Write each name beside its point: over no other name, point or line, while there is place.

    Args:
        axes: the axes, with their final limits.
        points: x and y by name.
        lines: horizontal and vertical lines, as both ends, x and y.
    """
    axes.autoscale_view()  # else it is done when the chart is drawn, after the labels are placed
    places = {name: axes.transData.transform(point) for name, point in points.items()}
    left, low, right, high = axes.get_window_extent().extents
    taken: list[Box] = [(x - 4, y - 4, x + 4, y + 4) for x, y in places.values()]
    for x0, y0, x1, y1 in lines:
        (x0, y0), (x1, y1) = axes.transData.transform([(x0, y0), (x1, y1)])
        taken.append((min(x0, x1) - 1, min(y0, y1) - 1, max(x0, x1) + 1, max(y0, y1) + 1))
    for name, (x, y) in places.items():
        text = short_name(name)
        width = _WIDTH * len(text)
        boxes = [
            (_box((x, y), side, distance, width), distance)
            for distance, side in itertools.product(_DISTANCES, _SIDES)
        ]
        inside = [
            (box, distance)
            for box, distance in boxes
            if box[0] >= left and box[2] <= right + 8 and box[1] >= low and box[3] <= high
        ]
        box, distance = min(
            inside or boxes, key=lambda found: (_overlap(found[0], taken), found[1])
        )
        taken.append(box)
        _write(axes, text, (x, y), box, distance > _DISTANCES[0])


def _write(axes: Any, text: str, point: tuple[float, float], box: Box, far: bool) -> None:
    x, y = point
    middle = (box[1] + box[3]) / 2
    axes.annotate(
        text,
        (x, y),
        (box[0], middle),
        xycoords="figure pixels",
        textcoords="figure pixels",
        fontsize=_SIZE,
        color=INK,
        va="center",
        arrowprops={"arrowstyle": "-", "color": MUTED, "linewidth": 0.6} if far else None,
    )


def _box(point: tuple[float, float], side: tuple[int, int], distance: float, width: float) -> Box:
    """Return the rectangle of a label on one side of its point."""
    (x, y), (right, up) = point, side
    x, y = x + right * distance, y + up * (distance + 1)
    left = x - width / 2 + right * width / 2
    low = y - _HEIGHT / 2 + up * _HEIGHT / 2 - up * 3
    return left, low, left + width, low + _HEIGHT


def _overlap(box: Box, others: Sequence[Box]) -> float:
    """Return the area of a rectangle that others take."""
    return sum(
        max(0.0, min(box[2], o[2]) - max(box[0], o[0]))
        * max(0.0, min(box[3], o[3]) - max(box[1], o[1]))
        for o in others
    )


def room_for(names: Iterable[str], width: float) -> float:
    """Return the right edge of axes, as a part of the figure, that leaves room for names.

    Args:
        names: the names that `label_ends` writes.
        width: of the figure, in inches.
    """
    longest = max((len(short_name(name)) for name in names), default=0)
    return 0.95 - _WIDTH * longest / (72 * width)


def label_ends(axes: Any, ends: Mapping[str, tuple[float, float]], colours: Sequence[str]) -> None:
    """Write each name to the right of the axes, at the height of the end of its line.

    Args:
        axes: the axes, with their final limits.
        ends: the last point of each line by name.
        colours: the colour of each name.
    """
    axes.autoscale_view()
    heights = {name: axes.transData.transform(point)[1] for name, point in ends.items()}
    extent = axes.get_window_extent()
    placed = spread_apart(list(heights.values()), _HEIGHT, extent.y0, extent.y1)
    for name, colour, y in zip(heights, colours, placed, strict=True):
        axes.annotate(
            short_name(name),
            (extent.x1 + 6, y),
            xycoords="figure pixels",
            fontsize=_SIZE,
            color=colour,
            va="center",
            annotation_clip=False,
        )


def spread_apart(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move values apart until neighbours differ by a gap, within two ends if there is place.

    Args:
        values: the values.
        gap: the least difference; less where they do not fit.
        low: the lower end.
        high: the upper end.
    """
    order = sorted(range(len(values)), key=lambda i: values[i])
    gap = min(gap, (high - low) / max(len(values) - 1, 1))
    placed = [0.0] * len(values)
    place = low - gap
    for i in order:
        place = placed[i] = max(values[i], place + gap)
    place = high + gap
    for i in reversed(order):
        place = placed[i] = min(placed[i], place - gap)
    return placed
