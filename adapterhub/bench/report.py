"""The reports of a study, `report.html` and `report.md`: the recommendation, tables and charts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from adapterhub.bench.charts import rates_chart, rows_chart, seeds_chart
from adapterhub.bench.records import CellRecord
from adapterhub.bench.results import TaskResult
from adapterhub.bench.study import Study
from adapterhub.bench.tables import failure_word, result_title, summary_table, task_table
from adapterhub.bench.wording import rate_words
from adapterhub.errors import one_line
from adapterhub.files.atomic import replace_file
from adapterhub.files.markdown import code_block, literal
from adapterhub.files.shown_table import ShownTable
from adapterhub.pages.framed import ChartGroup, framed_page
from adapterhub.pages.page import PAGE
from adapterhub.pages.sections import Chart

STUDY_MARKDOWN = "report.md"
Commands = Mapping[tuple[str, int], str]
"""By task and training rows, the command that trains the recommended method."""
LIMITS = (
    "All runs have the same split of the data: another split would move all scores.",
    "Times and memory are those of the machine and the kernels of each run.",
    "Nothing but the learning rate was tuned: sizes and other options are those of the methods.",
)


@dataclass(frozen=True)
class TaskSection:
    """What the page shows of one task."""

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


def study_markdown(study: Study, results: Sequence[TaskResult], commands: Commands) -> str:
    """Return the report of a study as Markdown.

    Args:
        study: the study.
        results: what it found.
        commands: by task and rows, the command that trains the recommended method.
    """
    lines = [f"# {literal(study_title(study))}", "", literal(study_subtitle(study, results)), ""]
    if len(results) > 1:
        lines += ["## All tasks", "", summary_table(results).markdown(), ""]
    for task in results:
        lines += _task_lines(task, commands.get((task.task, task.rows)))
    lines += ["## What this study does not know", "", *(f"- {line}" for line in LIMITS), ""]
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


def study_title(study: Study) -> str:
    """Return the name of a study: that of its folder."""
    folder = str(study.recipe.output or "study").rstrip("/\\")
    return re.split(r"[/\\]", folder)[-1] or "study"


def study_subtitle(study: Study, results: Sequence[TaskResult]) -> str:
    """Return one line that says what was compared."""
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
    """Return a line for each method with failed or diverged runs: how many, and the first error."""
    lines = []
    for result in task.methods:
        if failures := result.failures:
            runs = len(result.trials) + len(result.finals)
            first = one_line(next(iter(failures[0].error.splitlines()), ""))
            word = failure_word(result)
            lines.append(f"{result.method}: {len(failures)} of {runs} runs {word}: {first}")
    return lines
