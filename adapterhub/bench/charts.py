"""The charts of a study, as SVG in the colours of the pages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from adapterhub.bench.records import CellRecord
from adapterhub.bench.results import TaskResult
from adapterhub.bench.tables import score_title
from adapterhub.bench.wording import rate_words
from adapterhub.pages.direct_labels import label_ends, room_for, short_name
from adapterhub.pages.figures import FIRST, GRID, INK, MARKERS, MUTED, SECOND, SERIES, svg_chart

_WIDE = (4.6, 3.2)
_WIDEST = 4  # times as wide as usual: a wider interval is cut
_MOST_DOTS = 40  # of an axis with names


def seeds_chart(task: TaskResult) -> str:
    """Draw, for each method, its seeds as dots, their mean, and its interval."""
    shown = [result for result in task.methods if result.estimate.value is not None]
    longest = max((len(short_name(result.method)) for result in shown), default=0)
    height = max(0.75 + 0.24 * min(len(shown), _MOST_DOTS), _WIDE[1])

    def draw(axes: Any) -> None:
        for y, result in enumerate(shown):
            found, points = result.estimate, task.score.points
            value = (found.value or 0.0) * points
            if found.low is not None and found.high is not None:
                ends = [found.low * points, found.high * points]
                axes.plot(ends, [y, y], color=GRID, linewidth=5, solid_capstyle="butt")
            scores = [score * points for score in found.scores]
            axes.plot(scores, [y] * len(scores), "o", color=FIRST, markersize=4.5, alpha=0.75,
                      markeredgewidth=0)  # fmt: skip
            axes.plot([value], [y], "|", color=INK, markersize=11, markeredgewidth=1.6)
        axes.set_yticks(range(len(shown)), [short_name(result.method) for result in shown])
        axes.tick_params(axis="y", labelcolor=INK)
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_xlim(*score_range(task))
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(score_title(task))

    left = min(0.05 + 0.0175 * longest, 0.42)
    margins = {"left": left, "bottom": 0.5 / height, "top": 1 - 0.06 / height}
    return svg_chart(draw, (_WIDE[0], height), margins)


def score_range(task: TaskResult) -> tuple[float, float]:
    """Return the range of scores to show: intervals that are very wide are cut.

    One unsteady method would otherwise leave no place for the differences of the others.
    """
    scale = task.score.points
    found = [e for e in (result.estimate for result in task.methods) if e.value is not None]
    values = [float(each.value or 0.0) for each in found]
    ends = [
        (each.low, each.high) for each in found if each.low is not None and each.high is not None
    ]
    usual = median(high - low for low, high in ends) if ends else 0.0
    shown = [end for pair in ends if pair[1] - pair[0] <= _WIDEST * usual for end in pair]
    low, high = min(values + shown) * scale, max(values + shown) * scale
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def _log_ticks(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axes.yaxis.set_major_locator(MaxNLocator(5))
    low, high = axes.get_xlim()
    few = math.log10(high / low) < 2
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0) if few else (1.0,), numticks=6))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count_words(value)))


def count_words(value: float) -> str:
    """Write a number of any size in a few characters: 300, 3k, 2M, 0.001."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}" if value >= 1e-3 else f"{value:.0e}".replace("e-0", "e-")


def rates_chart(task: TaskResult, method: str) -> str | None:
    """Draw the scores of a method's trials by learning rate; None without trials.

    All methods of a task have the same vertical axis.

    Args:
        task: the results.
        method: the method to show.
    """
    result, points = task.find(method), task.score.points
    steps = sorted({record.cell.steps for record in result.trials})
    if not steps:
        return None

    def draw(axes: Any) -> None:
        from matplotlib.ticker import FuncFormatter

        low, high = _selected_range(task)
        margin = 0.07 * (high - low) or 1.0
        axes.set_ylim(low - margin, high + margin)
        for number, count in enumerate(steps):
            trials = [record for record in result.trials if record.cell.steps == count]
            done = [(r.cell.rate, value) for r in trials if (value := _selected(r)) is not None]
            whole = number == len(steps) - 1
            colour = FIRST if whole else MUTED
            style = {"color": colour, "marker": "o" if whole else "s", "markersize": 4}
            axes.plot(*_columns(done, points), linewidth=0, **style)
            axes.plot(*_columns(_means(done), points), linewidth=1.4, color=colour)
            failed = [r.cell.rate for r in trials if _selected(r) is None]
            axes.plot(failed, [low] * len(failed), "x", color=SECOND, markersize=6)
        axes.set_xscale("log")
        rates = [record.cell.rate for record in result.trials]
        axes.set_xlim(min(rates) / 1.8, max(rates) * 1.8)
        if result.rate is not None:
            axes.axvline(
                result.rate, color=SECOND, linewidth=1.6, linestyle=(0, (4, 2)), zorder=1.5
            )
        _log_ticks(axes)
        axes.xaxis.set_major_locator(_some_ticks(sorted(set(rates))))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: rate_words(rate)))
        axes.set_xlabel("learning rate")

    return svg_chart(draw)


def _means(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the mean of the values at each place, in the order of the places."""
    values: dict[float, list[float]] = {}
    for place, value in points:
        values.setdefault(place, []).append(value)
    return [(place, fmean(values[place])) for place in sorted(values)]


def _some_ticks(values: Sequence[float]) -> Any:
    """Return the values themselves as ticks, at most five of them."""
    from matplotlib.ticker import FixedLocator

    return FixedLocator(values[:: -(-len(values) // 5)])


def _selected(record: CellRecord) -> float | None:
    return record.selected.get(record.metric) if record.status == "done" else None


def _selected_range(task: TaskResult) -> tuple[float, float]:
    """Return the lowest and the highest score of all trials of a task."""
    found = [v for each in task.methods for r in each.trials if (v := _selected(r)) is not None]
    points = task.score.points
    return min(found, default=0.0) * points, max(found, default=1.0) * points


def _columns(points: Iterable[tuple[float, float]], scale: float) -> list[list[float]]:
    """Return x and y of points in their order, without those that have no finite score."""
    kept = sorted((x, y) for x, y in points if math.isfinite(y))
    return [[x for x, _ in kept], [y * scale for _, y in kept]]


def rows_chart(tasks: Sequence[TaskResult]) -> str | None:
    """Draw the score of each method by the number of training rows; None for one number.

    Args:
        tasks: the results of one task, with different numbers of rows.
    """
    lines = _by_rows(tasks)
    if not lines:
        return None

    def draw(axes: Any) -> None:
        ends, colours = {}, []
        for number, (name, points) in enumerate(lines.items()):
            colour = SERIES[number % len(SERIES)]
            marker = MARKERS[number % len(MARKERS)]
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4.5)
            ends[name] = points[-1]
            colours.append(colour)
        axes.set_xscale("log")
        rows = sorted({task.rows for task in tasks})
        _log_ticks(axes)
        axes.xaxis.set_major_locator(_some_ticks(rows))
        axes.set(xlabel="training rows", ylabel=score_title(tasks[0]))
        label_ends(axes, ends, colours)

    return svg_chart(
        draw, _WIDE, {"left": 0.13, "bottom": 0.15, "right": room_for(lines, _WIDE[0])}
    )


def _by_rows(tasks: Sequence[TaskResult]) -> Mapping[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for task in sorted(tasks, key=lambda task: task.rows):
        for result in task.methods:
            if result.estimate.value is not None:
                value = result.estimate.value * task.score.points
                found.setdefault(result.method, []).append((task.rows, value))
    several = {name: points for name, points in found.items() if len(points) > 1}
    return several if len(tasks) > 1 else {}
