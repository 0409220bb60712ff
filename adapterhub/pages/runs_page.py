"""One page of several runs: their numbers in a table, and their curves over each other."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from adapterhub.errors import one_line
from adapterhub.files.atomic import replace_file
from adapterhub.files.shown_table import ShownTable, TableCell
from adapterhub.pages.comparison import RunSummary, summary
from adapterhub.pages.direct_labels import label_ends, room_for
from adapterhub.pages.figures import MARKERS, SERIES, Points, svg_chart, thinned
from adapterhub.pages.framed import ChartGroup, framed_page
from adapterhub.pages.page import number_text
from adapterhub.pages.run_files import Line, RunFiles, lower_is_better, read_run
from adapterhub.pages.sections import Chart

RUNS_PAGE = "runs.html"
_SIZE = (4.6, 2.8)
_HEAD = "head"  # the parameters of a task head, in the learning rates of a step
_FEW = 30  # points that have markers


def write_runs_page(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Write the page of several runs, and return its path.

    Args:
        folders: the run folders.
        output: the file to write; `runs.html` in the folder that they share by default.

    Raises:
        FileError: there is no run in a folder, or a file of it is broken.
        OSError: the file cannot be written.
    """
    runs = [read_run(folder) for folder in folders]
    shared = Path(os.path.commonpath([folder.absolute().parent for folder in folders]))
    path = output or shared / RUNS_PAGE
    replace_file(path, runs_page(runs).encode())
    return path


def runs_page(runs: Sequence[RunFiles]) -> str:
    """Return the page of several runs."""
    names = _names(runs)
    summaries = [summary(run, name) for run, name in zip(runs, names, strict=True)]
    return framed_page(
        "runs.html",
        name=f"{len(runs)} runs",
        subtitle=", ".join(names),
        table=_table(summaries),
        note=_note(runs),
        groups=[*_chart_groups(runs, names)],
        facts=[],
    )


def _names(runs: Sequence[RunFiles]) -> list[str]:
    """Return a name for each run: that of its folder, with the one above it if two are equal."""
    folders = [run.folder.absolute() for run in runs]
    counts = Counter(folder.name for folder in folders)
    return [f.name if counts[f.name] == 1 else f"{f.parent.name}/{f.name}" for f in folders]


def _note(runs: Sequence[RunFiles]) -> str:
    data = {run.predictions.data for run in runs if run.predictions}
    if len(data) > 1:
        return "The runs were evaluated on different data, so their metrics do not compare."
    return "adapterhub compare says which of the differences are more than chance."


def _table(summaries: Sequence[RunSummary]) -> ShownTable:
    metrics = list(dict.fromkeys(name for each in summaries for name in each.metrics))
    columns, meanings = zip(
        ("run", ""),
        ("method", ""),
        *((name, "lower is better" * lower_is_better(name)) for name in metrics),
        ("trained", "parameters, with the head"),
        ("adapter", "MB"),
        ("time", "seconds"),
        ("peak memory", "GB"),
        ("training rows", ""),
        strict=True,
    )
    rows = [[TableCell(s.name), *_cells(s, metrics)] for s in summaries]
    return ShownTable(columns, rows, numbers=True, meanings=meanings)


def _cells(found: RunSummary, metrics: Sequence[str]) -> list[TableCell]:
    scores = [found.metrics.get(name) for name in metrics]
    return [
        TableCell(found.method or "-"),
        *(TableCell(number_text(score), score) for score in scores),
        _number(found.trained, "{:,}"),
        _number(found.size, "{:.2f}", 1e6),
        _number(found.seconds, "{:,.1f}"),
        _number(found.memory, "{:.2f}", 1e9),
        _number(found.rows, "{:,}"),
    ]


def _number(value: float | None, form: str, unit: float = 1) -> TableCell:
    if value is None:
        return TableCell("-")
    return TableCell(form.format(value / unit if unit != 1 else value), value)


def _chart_groups(runs: Sequence[RunFiles], names: Sequence[str]) -> Iterator[ChartGroup]:
    """Yield loss, metrics and rates; then speed and memory."""
    metrics = list(dict.fromkeys(n for run in runs for e in run.evaluations for n in e["metrics"]))
    learning = {"Training loss": [_points(run.training, lambda line: line["loss"]) for run in runs]}
    for metric in metrics:
        title = f"Evaluation: {metric}"
        learning[title] = [_points(r.evaluations, _metric(metric)) for r in runs]
    learning["Learning rate"] = [_points(run.training, _rate) for run in runs]
    yield from _charts("Curves", learning, names)
    speed = [[line for line in run.timings if line["event"] == "train"] for run in runs]
    costs = {
        "Examples per second": [
            _points(each, lambda line: line["examples_per_second"]) for each in speed
        ],
        "Peak memory so far, GB": [
            _points(each, lambda line: line["peak_memory"] / 1e9) for each in speed
        ],
    }
    yield from _charts("Speed and memory", costs, names)


def _points(lines: Sequence[Line], value: Callable[[Line], Any]) -> Points:
    return [(line["step"], value(line)) for line in lines]


def _metric(name: str) -> Callable[[Line], Any]:
    return lambda line: line["metrics"].get(name)


def _rate(line: Line) -> float | None:
    """Return the highest rate of a step, without that of the head if there are others."""
    rates = {name: rate for name, rate in line["learning_rate"].items() if rate is not None}
    others = [rate for name, rate in rates.items() if name != _HEAD]
    return max(others or rates.values(), default=None)


def _charts(
    title: str, charts: dict[str, list[Points]], names: Sequence[str]
) -> Iterator[ChartGroup]:
    found = []
    for name, lines in charts.items():
        if any(y is not None for points in lines for _, y in points):
            svg = overlay_chart(dict(zip(names, lines, strict=True)), "step")
            note = "lower is better" if lower_is_better(name.partition(": ")[2]) else ""
            found.append(Chart(name, Markup(svg), note))
    if found:
        yield ChartGroup(title, "", found, wide=True)


def overlay_chart(lines: dict[str, Points], x: str) -> str:
    """Draw lines over each other, each in a colour with its name at its end.

    Args:
        lines: the points of each line, by name.
        x: the label of the horizontal axis.
    """

    def draw(axes: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        ends, colours = {}, []
        for number, (name, points) in enumerate(lines.items()):
            xs, ys = thinned(points)
            if not xs:
                continue
            colour = SERIES[number % len(SERIES)]
            marker = MARKERS[number % len(MARKERS)] if len(xs) < _FEW else ""
            dashes = "-" if number < len(SERIES) else "--"
            axes.plot(xs, ys, color=colour, marker=marker, markersize=3.5, linestyle=dashes)
            ends[name] = (xs[-1], ys[-1])
            colours.append(colour)
        axes.set_xlabel(one_line(x))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        label_ends(axes, ends, colours)

    return svg_chart(
        draw, _SIZE, {"right": room_for(lines, _SIZE[0]), "bottom": 0.17, "left": 0.14}
    )
