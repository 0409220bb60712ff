"""`report.html` and `report.md` of a study: the recommendation first, then tables and charts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from adapterhub.bench.charts import (
    cost_chart,
    learning_chart,
    rates_chart,
    rows_chart,
    seeds_chart,
)
from adapterhub.bench.columns import rate_words, study_columns
from adapterhub.bench.markdown import (
    LIMITS,
    comparison_lines,
    failure_lines,
    result_title,
    study_markdown,
    study_subtitle,
    study_title,
    summary_note,
    summary_rows,
)
from adapterhub.bench.records import CellRecord, Costs
from adapterhub.bench.results import TaskResult
from adapterhub.bench.study import Study
from adapterhub.files.atomic import replace_file
from adapterhub.files.shown_table import ShownTable, TableCell
from adapterhub.pages.framed import ChartGroup, framed_page
from adapterhub.pages.page import PAGE
from adapterhub.pages.sections import Chart

STUDY_MARKDOWN = "report.md"
Commands = Mapping[tuple[str, int], str]
"""By task and training rows, the command that trains the recommended method."""
_NOTE = "This trains it on all rows:"


@dataclass(frozen=True)
class TaskSection:
    """What the page shows of one task."""

    title: str
    note: str
    advice: Sequence[str]
    command: str
    command_note: str
    table: ShownTable
    lines: Sequence[str]
    groups: Sequence[ChartGroup]


def write_study_reports(
    folder: Path, study: Study, results: Sequence[TaskResult], commands: Commands
) -> tuple[Path, Path]:
    """Write `report.html` and `report.md` in the folder of a study; return both paths.

    Args:
        folder: the folder.
        study: the study.
        results: what it found.
        commands: by task and rows, the command that trains the recommended method.

    Raises:
        OSError: a file cannot be written.
    """
    page, markdown = folder / PAGE, folder / STUDY_MARKDOWN
    replace_file(page, study_page(study, results, commands).encode())
    replace_file(markdown, study_markdown(study, results, commands).encode())
    return page, markdown


def study_page(study: Study, results: Sequence[TaskResult], commands: Commands) -> str:
    """Return the page of a study.

    Args:
        study: the study.
        results: what it found.
        commands: by task and rows, the command that trains the recommended method.
    """
    return framed_page(
        "study.html",
        name=study_title(study),
        subtitle=study_subtitle(study, results),
        summary=_summary(results) if len(results) > 1 else None,
        summary_note=summary_note(),
        tasks=[_section(task, results, commands) for task in results],
        limits=LIMITS,
        facts=[*_facts(study, results)],
    )


def _summary(results: Sequence[TaskResult]) -> ShownTable:
    titles = [result_title(task, results) for task in results]
    meanings = ["", *(task.score.name for task in results)]
    values = {
        (each.method, place): each.estimate.value
        for place, task in enumerate(results)
        for each in task.methods
    }
    rows = [
        [
            TableCell(method),
            *(TableCell(text, values.get((method, place))) for place, text in enumerate(texts)),
        ]
        for method, texts in summary_rows(results)
    ]
    return ShownTable(["method", *titles], rows, numbers=True, meanings=meanings)


def _section(task: TaskResult, results: Sequence[TaskResult], commands: Commands) -> TaskSection:
    columns = study_columns(task)
    table = ShownTable(
        ["method", *(column.title for column in columns)],
        [[result.method, *(column.cell(result) for column in columns)] for result in task.methods],
        numbers=True,
        meanings=["", *(column.meaning for column in columns)],
        taken=[i for i, each in enumerate(task.methods) if each.method == task.advice.method],
    )
    return TaskSection(
        result_title(task, results),
        f"{task.rows:,} training rows, {task.test_rows:,} test rows that selected nothing",
        (*task.advice.reasons, *task.advice.unknown),
        commands.get((task.task, task.rows), ""),
        _NOTE,
        table,
        [*comparison_lines(task), *failure_lines(task)],
        [*_groups(task, results)],
    )


def _groups(task: TaskResult, results: Sequence[TaskResult]) -> Iterator[ChartGroup]:
    same = [other for other in results if other.task == task.task]
    rows = rows_chart(same) if task is same[-1] else None
    memory = "added" if task.in_turns else "peak"
    scores = {
        "Seeds, mean and 95 % interval": seeds_chart(task),
        "Against trained parameters": cost_chart(
            task, lambda c: c.all_trained, "trained parameters", log=True
        ),
        "Against training time": cost_chart(task, lambda c: c.train_seconds, "seconds of a run"),
        f"Against {memory} memory": cost_chart(task, _gigabytes, "GB"),
        "By number of training rows": rows,
    }
    note = (
        "Dots are seeds, ticks their mean, bars and lines 95 % intervals. Filled points are on the "
        "Pareto front: no other method is better and cheaper."
    )
    yield from _group("Scores on the test rows", note, scores, wide=True)
    yield from _group(
        "Learning rates, on the selection rows",
        "Grey: the first trials, with a part of the steps. Blue: all steps, a dot for each seed "
        "and a line through their means. The dashed line is the rate that was chosen; a cross is "
        "a run that failed or diverged.",
        {result.method: rates_chart(task, result.method) for result in task.methods},
        notes={r.method: f"rate {rate_words(r.rate)}" for r in task.methods if r.rate},
    )
    yield from _group(
        "Learning curves, on the selection rows",
        "Each line is a seed with the chosen rate; grey ones are those of the other methods.",
        {result.method: learning_chart(task, result.method) for result in task.methods},
    )


def _gigabytes(costs: Costs) -> float | None:
    size = costs.added_memory if costs.in_turns else costs.peak_memory
    return None if size is None else size / 1e9


def _group(
    title: str,
    note: str,
    charts: Mapping[str, str | None],
    *,
    wide: bool = False,
    notes: Mapping[str, str] | None = None,
) -> Iterator[ChartGroup]:
    """Yield a group of the charts that exist, if there is one."""
    found = [
        Chart(name, Markup(svg), (notes or {}).get(name, ""))
        for name, svg in charts.items()
        if svg is not None
    ]
    if found:
        yield ChartGroup(title, note, found, wide)


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
    """Join the different values, in their order."""
    return "; ".join(dict.fromkeys(str(value) for value in values if value))
