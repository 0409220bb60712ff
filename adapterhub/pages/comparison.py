"""Comparison of runs: main numbers, significance of differences, and one page for all runs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from adapterhub.errors import ConfigError
from adapterhub.files.atomic import replace_file
from adapterhub.files.shown_table import ScoreError, ShownTable, TableCell, score_text
from adapterhub.pages.figures import Chart, ChartGroup, Points, overlay_chart
from adapterhub.pages.page import (
    Line,
    RunFiles,
    framed_page,
    lower_is_better,
    number_text,
    points_by_step,
    read_run,
    submapping,
)
from adapterhub.pages.row_scores import Difference, difference

RUNS_PAGE = "runs.html"
_HEAD = "head"  # parameters of a task head, in the learning rates of a step


@dataclass(frozen=True)
class RunSummary:
    """The numbers of one run; None where its files lack them."""

    name: str
    method: str
    backbone: str
    main_metric: str
    metrics: dict[str, float]
    trained: int | None
    size: int | None
    seconds: float | None
    memory: int | None
    rows: int | None
    evaluation_rows: int | None
    errors: dict[str, ScoreError] = field(default_factory=dict)


def summary(run: RunFiles, name: str) -> RunSummary:
    """Collect the numbers of a run."""
    data = submapping(run.record, "data")
    methods = run.manifest.methods if run.manifest else ()
    return RunSummary(
        name=name,
        method="+".join(next(iter(method), "") for method in methods),
        backbone=run.manifest.backbone.fingerprint if run.manifest else "",
        main_metric=run.main_metric,
        metrics=run.metrics,
        trained=run.trained or None,
        size=run.size or None,
        seconds=run.timings[-1]["seconds"] if run.timings else None,
        memory=max((line["peak_memory"] for line in run.timings), default=None),
        rows=_whole(data.get("train")),
        evaluation_rows=_whole(data.get("eval")),
        errors=run.errors,
    )


def check_comparable(runs: Sequence[RunFiles], names: Sequence[str]) -> None:
    """Check that the evaluation data of runs are not known to differ.

    Raises:
        ConfigError: two runs were evaluated on different data, or have different tasks.
    """
    known = [(n, run.predictions) for n, run in zip(names, runs, strict=True) if run.predictions]
    if len({(file.data, file.kind) for _, file in known}) > 1:
        raise ConfigError(
            "these runs were evaluated on different data, so their metrics do not compare",
            expected="runs with the same evaluation data (data.eval) and kind of task",
            hint="adapterhub eval RUN --data FILE for each, or compare --list to list them anyway",
            offenders=[
                f"{name}: {file.task}, {len(file.rows):,} rows, sha256 {file.data[:12]}"
                for name, file in known
            ],
        )


def pairwise(runs: Sequence[RunFiles]) -> list[tuple[int, Difference]]:
    """Compare each run with the first one, if both have predictions."""
    first = runs[0].predictions
    return [
        (i, difference(first, run.predictions))
        for i, run in enumerate(runs)
        if i and first and run.predictions
    ]


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def write_runs_page(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Write the page of several runs, and return its path.

    The default is `runs.html` in their common folder; `output` overrides it.

    Raises:
        FileError: a folder does not contain a run, or one of its files is broken.
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
    """Return the folder's name for each run, with the parent's name to resolve duplicates."""
    folders = [run.folder.absolute() for run in runs]
    counts = Counter(folder.name for folder in folders)
    return [f.name if counts[f.name] == 1 else f"{f.parent.name}/{f.name}" for f in folders]


def _note(runs: Sequence[RunFiles]) -> str:
    data = {run.predictions.data for run in runs if run.predictions}
    if len(data) > 1:
        return "The runs were evaluated on different data, so their metrics do not compare."
    return "adapterhub compare tests which differences are more than chance."


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


def _cells(summary: RunSummary, metrics: Sequence[str]) -> list[TableCell]:
    scores = [(summary.metrics.get(name), summary.errors.get(name)) for name in metrics]
    return [
        TableCell(summary.method or "-"),
        *(TableCell(score_text(number_text(v), error), v) for v, error in scores),
        _number(summary.trained, "{:,}"),
        _number(summary.size, "{:.2f}", 1e6),
        _number(summary.seconds, "{:,.1f}"),
        _number(summary.memory, "{:.2f}", 1e9),
        _number(summary.rows, "{:,}"),
    ]


def _number(value: float | None, form: str, unit: float = 1) -> TableCell:
    if value is None:
        return TableCell("-")
    return TableCell(form.format(value / unit if unit != 1 else value), value)


def _chart_groups(runs: Sequence[RunFiles], names: Sequence[str]) -> Iterator[ChartGroup]:
    """Yield the charts of loss, metrics and rates, then of speed and memory."""
    metrics = list(dict.fromkeys(n for run in runs for e in run.evaluations for n in e["metrics"]))
    learning = {
        "Training loss": [points_by_step(run.training, lambda line: line["loss"]) for run in runs]
    }
    for metric in metrics:
        title = f"Evaluation: {metric}"
        learning[title] = [points_by_step(r.evaluations, _metric(metric)) for r in runs]
    learning["Learning rate"] = [points_by_step(run.training, _rate) for run in runs]
    yield from _charts("Curves", learning, names)
    speed = [[line for line in run.timings if line["event"] == "train"] for run in runs]
    costs = {
        "Examples per second": [
            points_by_step(each, lambda line: line["examples_per_second"]) for each in speed
        ],
        "Peak memory so far, GB": [
            points_by_step(each, lambda line: line["peak_memory"] / 1e9) for each in speed
        ],
    }
    yield from _charts("Speed and memory", costs, names)


def _metric(name: str) -> Callable[[Line], Any]:
    return lambda line: line["metrics"].get(name)


def _rate(line: Line) -> float | None:
    """Return the highest learning rate of a step, excluding the head if there are others."""
    rates = {name: rate for name, rate in line["learning_rate"].items() if rate is not None}
    others = [rate for name, rate in rates.items() if name != _HEAD]
    return max(others or rates.values(), default=None)


def _charts(
    title: str, charts: dict[str, list[Points]], names: Sequence[str]
) -> Iterator[ChartGroup]:
    drawn = []
    for name, lines in charts.items():
        if any(y is not None for points in lines for _, y in points):
            svg = overlay_chart(dict(zip(names, lines, strict=True)), "step")
            note = "lower is better" if lower_is_better(name.partition(": ")[2]) else ""
            drawn.append(Chart(name, Markup(svg), note))
    if drawn:
        yield ChartGroup(title, "", drawn, wide=True)
