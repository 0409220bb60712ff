"""Names beside the lines of a chart, so that it needs no legend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from adapterhub.errors import one_line

_SIZE = 8.5  # points
_HEIGHT, _WIDTH = 1.15 * _SIZE, 0.56 * _SIZE  # of a line and of a character, about
_MOST = 20  # characters of a name


def short_name(name: str) -> str:
    """Return a name as a chart shows it."""
    return one_line(name, _MOST)


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
