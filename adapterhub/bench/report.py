"""The reports of a study, `report.html` and `report.md`: the recommendation, tables and charts."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from markupsafe import Markup

from adapterhub.bench.advice import rate_words
from adapterhub.bench.records import CellRecord
from adapterhub.bench.results import TaskResult
from adapterhub.bench.study import Study
from adapterhub.bench.tables import (
    failure_word,
    result_title,
    score_title,
    summary_table,
    task_table,
)
from adapterhub.errors import one_line
from adapterhub.files.atomic import replace_file
from adapterhub.files.shown_table import ShownTable, code_block, literal
from adapterhub.pages.figures import (
    FIRST,
    GRID,
    INK,
    MARKERS,
    MUTED,
    SECOND,
    SERIES,
    Chart,
    ChartGroup,
    label_ends,
    room_for,
    short_name,
    svg_chart,
)
from adapterhub.pages.page import PAGE, framed_page

STUDY_MARKDOWN = "report.md"
Commands = Mapping[tuple[str, int], str]
"""The command that trains the recommended method, by task and training rows."""
_WIDE = (4.6, 3.2)
_WIDEST = 4  # times the usual width: wider intervals are cut
_MOST_DOTS = 40  # of an axis with names
LIMITS = (
    "All runs have the same split of the data: another split would move all scores.",
    "Times and memory depend on the machine and the kernels of each run.",
    "Nothing but the learning rate was tuned: sizes and other options are those of the methods.",
)


@dataclass(frozen=True)
class TaskSection:
    """The content of the page for one task."""

    title: str
    note: str
    advice: Sequence[str]
    command: str
    table: ShownTable
    lines: Sequence[str]
    groups: Sequence[ChartGroup]


def write_study_reports(
    folder: Path, study: Study, results: Sequence[TaskResult], commands: Commands
) -> tuple[Path, Path]:
    """Write `report.html` and `report.md` in the folder of a study; return both paths.

    Raises:
        OSError: a file cannot be written.
    """
    page, markdown = folder / PAGE, folder / STUDY_MARKDOWN
    replace_file(page, study_page(study, results, commands).encode())
    replace_file(markdown, study_markdown(study, results, commands).encode())
    return page, markdown


def study_markdown(study: Study, results: Sequence[TaskResult], commands: Commands) -> str:
    """Return the report of a study as Markdown."""
    lines = [f"# {literal(study_title(study))}", "", literal(study_subtitle(study, results)), ""]
    if len(results) > 1:
        lines += ["## All tasks", "", summary_table(results).markdown(), ""]
    for task in results:
        lines += _task_lines(task, commands.get((task.task, task.rows)))
    lines += ["## Limits of this study", "", *(f"- {line}" for line in LIMITS), ""]
    return "\n".join(lines)


def _task_lines(task: TaskResult, command: str | None) -> Iterator[str]:
    title = f"{task.task}: {task.rows:,} training rows, {task.test_rows:,} test rows"
    yield from (f"## {literal(title)}", "")
    first, *others = task.advice.reasons
    yield from (literal(first), "")
    yield from (f"- {literal(sentence)}" for sentence in others)
    yield ""
    if command:
        yield from (code_block("bash", [one_line(command, 10_000)]), "")
    table = task_table(task)
    yield from (table.markdown(), "")
    if failed := failure_lines(task):
        yield from (*(f"- {literal(line)}" for line in failed), "")
    yield from (
        f"- {literal(name)}: {literal(meaning)}"
        for name, meaning in [*zip(table.columns, table.meanings, strict=True)][1:]
    )
    yield ""


def study_page(study: Study, results: Sequence[TaskResult], commands: Commands) -> str:
    """Return the page of a study."""
    return framed_page(
        "study.html",
        name=study_title(study),
        subtitle=study_subtitle(study, results),
        summary=summary_table(results) if len(results) > 1 else None,
        tasks=[_section(task, results, commands) for task in results],
        limits=LIMITS,
        facts=[*_facts(study, results)],
    )


def _section(task: TaskResult, results: Sequence[TaskResult], commands: Commands) -> TaskSection:
    return TaskSection(
        result_title(task, results),
        f"{task.rows:,} training rows, {task.test_rows:,} test rows that selected nothing",
        task.advice.reasons,
        commands.get((task.task, task.rows), ""),
        task_table(task),
        failure_lines(task),
        [*_groups(task, results)],
    )


def _groups(task: TaskResult, results: Sequence[TaskResult]) -> Iterator[ChartGroup]:
    same = [other for other in results if other.task == task.task]
    scores = {
        "Seeds, mean and 95 % interval": seeds_chart(task),
        "By number of training rows": rows_chart(same) if task is same[-1] else None,
    }
    note = "Dots are seeds, ticks their mean, bars 95 % intervals."
    yield from _group("Scores on the test rows", note, scores, wide=True)
    yield from _group(
        "Learning rates, on the selection rows",
        "Grey: the first trials, with a part of the steps. Blue: all steps, a dot for each seed "
        "and a line through their means. The dashed line is the rate that was chosen; a cross is "
        "a run that failed or diverged.",
        {result.method: rates_chart(task, result.method) for result in task.methods},
        notes={r.method: f"rate {rate_words(r.rate)}" for r in task.methods if r.rate},
    )


def _group(
    title: str,
    note: str,
    charts: Mapping[str, str | None],
    *,
    wide: bool = False,
    notes: Mapping[str, str] | None = None,
) -> Iterator[ChartGroup]:
    """Yield a group of the existing charts, if there are any."""
    drawn = [
        Chart(name, Markup(svg), (notes or {}).get(name, ""))
        for name, svg in charts.items()
        if svg is not None
    ]
    if drawn:
        yield ChartGroup(title, note, drawn, wide)


def _facts(study: Study, results: Sequence[TaskResult]) -> Iterator[tuple[str, str]]:
    records = [record for task in results for each in task.methods
               for record in (*each.trials, *each.finals)]  # fmt: skip
    states = Counter(record.status for record in records)
    yield "backbone", str(study.recipe.backbone)
    yield "weights", _all(record.origin.get("backbone") for record in records)
    yield "methods", ", ".join(study.labels())
    if study.bench.recorded:
        yield "recorded by another program", ", ".join(study.bench.recorded)
    for task in results:
        data = next((r.origin.get("data") for e in task.methods for r in e.finals), None)
        if isinstance(data, Mapping):
            digests = ", ".join(f"{part} {str(digest)[:12]}" for part, digest in data.items())
            yield f"data of {result_title(task, results)}", f"sha256 {digests}"
    yield "runs", ", ".join(f"{count:,} {status}" for status, count in states.items())
    yield "time of all runs", f"{sum(r.costs.seconds for r in records) / 60:,.1f} min"
    yield "devices", _all(record.origin.get("device") for record in records)
    yield "kernels", _all(_kernels(record) for record in records)
    yield "versions", _all(_versions(record) for record in records)


def _kernels(record: CellRecord) -> str:
    recipe = record.origin.get("recipe")
    names = ("dtype", "attention", "quantize")
    values = [str(recipe[n]) for n in names if recipe.get(n)] if isinstance(recipe, dict) else []
    return ", ".join(values)


def _versions(record: CellRecord) -> str:
    versions = record.origin.get("versions")
    return ", ".join(f"{n} {v}" for n, v in versions.items()) if isinstance(versions, dict) else ""


def _all(values: Iterable[object]) -> str:
    """Join the distinct values, in their order."""
    return "; ".join(dict.fromkeys(str(value) for value in values if value))


def study_title(study: Study) -> str:
    """Return the title of a study: the name of its folder."""
    folder = str(study.recipe.output or "study").rstrip("/\\")
    return re.split(r"[/\\]", folder)[-1] or "study"


def study_subtitle(study: Study, results: Sequence[TaskResult]) -> str:
    """Return one line that summarizes the comparison."""
    methods, recorded = len(study.labels()), len(study.bench.recorded)
    tasks = len({task.task for task in results})
    parts = [
        str(study.recipe.backbone),
        f"{methods} method{'s' * (methods != 1)}"
        + (f" and {recorded} recorded" if recorded else ""),
        *([f"{tasks} tasks"] if tasks > 1 else []),
        f"{study.bench.rates} learning rates and {study.bench.seeds} seeds each",
    ]
    return " · ".join(parts)


def failure_lines(task: TaskResult) -> list[str]:
    """Return a line for each method with failed or diverged runs: number and first error."""
    lines = []
    for result in task.methods:
        if failures := result.failures:
            runs = len(result.trials) + len(result.finals)
            first = one_line(next(iter(failures[0].error.splitlines()), ""))
            word = failure_word(result)
            lines.append(f"{result.method}: {len(failures)} of {runs} runs {word}: {first}")
    return lines


def seeds_chart(task: TaskResult) -> str:
    """Draw, for each method, its seeds as dots, their mean, and its interval."""
    shown = [result for result in task.methods if result.estimate.value is not None]
    longest = max((len(short_name(result.method)) for result in shown), default=0)
    height = max(0.75 + 0.24 * min(len(shown), _MOST_DOTS), _WIDE[1])

    def draw(axes: Any) -> None:
        for y, result in enumerate(shown):
            estimate, points = result.estimate, task.score.points
            value = (estimate.value or 0.0) * points
            if estimate.low is not None and estimate.high is not None:
                ends = [estimate.low * points, estimate.high * points]
                axes.plot(ends, [y, y], color=GRID, linewidth=5, solid_capstyle="butt")
            scores = [score * points for score in estimate.scores]
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
    """Return the range of scores to show; very wide intervals are cut.

    One unsteady method would otherwise leave no space for the differences of the others.
    """
    scale = task.score.points
    estimates = [e for e in (result.estimate for result in task.methods) if e.value is not None]
    values = [float(each.value or 0.0) for each in estimates]
    ends = [
        (each.low, each.high)
        for each in estimates
        if each.low is not None and each.high is not None
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
    """Format a number of any size in a few characters: 300, 3k, 2M, 0.001."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}" if value >= 1e-3 else f"{value:.0e}".replace("e-0", "e-")


def rates_chart(task: TaskResult, method: str) -> str | None:
    """Draw the scores of a method's trials by learning rate; None without trials.

    All methods of a task have the same vertical axis.
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
    """Return the mean of the values at each x, in the order of x."""
    values: dict[float, list[float]] = {}
    for place, value in points:
        values.setdefault(place, []).append(value)
    return [(place, fmean(values[place])) for place in sorted(values)]


def _some_ticks(values: Sequence[float]) -> Any:
    """Return the values as ticks, at most five of them."""
    from matplotlib.ticker import FixedLocator

    return FixedLocator(values[:: -(-len(values) // 5)])


def _selected(record: CellRecord) -> float | None:
    return record.selected.get(record.metric) if record.status == "done" else None


def _selected_range(task: TaskResult) -> tuple[float, float]:
    """Return the lowest and the highest score of all trials of a task."""
    scores = [v for each in task.methods for r in each.trials if (v := _selected(r)) is not None]
    points = task.score.points
    return min(scores, default=0.0) * points, max(scores, default=1.0) * points


def _columns(points: Iterable[tuple[float, float]], scale: float) -> list[list[float]]:
    """Return x and y of points in their order, skipping points without a finite score."""
    kept = sorted((x, y) for x, y in points if math.isfinite(y))
    return [[x for x, _ in kept], [y * scale for _, y in kept]]


def rows_chart(tasks: Sequence[TaskResult]) -> str | None:
    """Draw the score of each method by the number of training rows; None for a single number."""
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
    by_method: dict[str, list[tuple[float, float]]] = {}
    for task in sorted(tasks, key=lambda task: task.rows):
        for result in task.methods:
            if result.estimate.value is not None:
                value = result.estimate.value * task.score.points
                by_method.setdefault(result.method, []).append((task.rows, value))
    several = {name: points for name, points in by_method.items() if len(points) > 1}
    return several if len(tasks) > 1 else {}
