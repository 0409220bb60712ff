"""`report.md`: the tables of a study in Markdown, with all columns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from adapterhub.bench.columns import failure_word, study_columns
from adapterhub.bench.results import TaskResult
from adapterhub.bench.study import Study
from adapterhub.bench.wording import comparison_sentence, difference_text, points_text
from adapterhub.errors import one_line
from adapterhub.files.markdown import code_block, literal

_FEWEST_TIES = 3  # that are named in one sentence
_NUMBERS = re.compile(r"[a-zA-Z0-9 ±.,%()=<+/:-]*")

LIMITS = (
    "All runs have the same split of the data: another split would move all scores.",
    "Times and memory are those of the machine and the kernels of this study.",
    "Nothing but the learning rate was tuned: sizes and other options are those of the methods.",
)


def study_markdown(
    study: Study, results: Sequence[TaskResult], commands: Mapping[tuple[str, int], str]
) -> str:
    """Return the report of a study as Markdown.

    Args:
        study: the study.
        results: what it found.
        commands: by task and rows, the command that trains the recommended method.
    """
    lines = [f"# {literal(study_title(study))}", "", literal(study_subtitle(study, results)), ""]
    if len(results) > 1:
        lines += ["## All tasks", "", *_summary(results), ""]
    for task in results:
        lines += _task_lines(task, commands.get((task.task, task.rows)))
    lines += ["## What this study does not know", "", *(f"- {line}" for line in LIMITS), ""]
    return "\n".join(lines)


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


def result_title(task: TaskResult, results: Sequence[TaskResult]) -> str:
    """Name a task, and its training rows where the study has several numbers of them."""
    several = len({other.rows for other in results if other.task == task.task}) > 1
    return f"{task.task}, {task.rows:,} rows" if several else task.task


def summary_rows(results: Sequence[TaskResult]) -> list[tuple[str, list[str]]]:
    """Return, for each method, its score on each task."""
    methods = dict.fromkeys(result.method for task in results for result in task.methods)
    return [(method, [_short_score(task, method) for task in results]) for method in methods]


def _short_score(task: TaskResult, method: str) -> str:
    result = next((each for each in task.methods if each.method == method), None)
    if result is None:
        return ""
    found = result.estimate
    if found.value is None:
        return failure_word(result)
    mark = "*" if method in task.advice.tied else ""
    spread = f" ± {points_text(found.sd, found.points)}" if found.sd is not None else ""
    return f"{points_text(found.value, found.points)}{spread}{mark}"


def summary_note() -> str:
    """Say what the star in the summary means."""
    return "* cannot be told apart from the best on this task, or is the best."


def _summary(results: Sequence[TaskResult]) -> Iterator[str]:
    titles = [f"{result_title(task, results)} ({task.score.name})" for task in results]
    yield from table_lines(["method", *titles], [[m, *cells] for m, cells in summary_rows(results)])
    yield ""
    yield summary_note().replace("*", "\\*")


def _task_lines(task: TaskResult, command: str | None) -> Iterator[str]:
    title = f"{task.task}: {task.rows:,} training rows, {task.test_rows:,} test rows"
    yield from (f"## {literal(title)}", "")
    first, *others = (*task.advice.reasons, *task.advice.unknown)
    yield from (literal(first), "")
    yield from (f"- {literal(sentence)}" for sentence in others)
    yield ""
    if command:
        yield from (code_block("bash", [one_line(command, 10_000)]), "")
    columns = study_columns(task)
    rows = [[r.method, *(c.cell(r).text for c in columns)] for r in task.methods]
    yield from table_lines(["method", *(column.title for column in columns)], rows)
    yield ""
    for line in comparison_lines(task):
        yield f"- {literal(line)}"
    for line in failure_lines(task):
        yield f"- {literal(line)}"
    yield ""
    for column in columns:
        yield f"- {literal(column.title)}: {literal(column.meaning)}"
    yield ""


def comparison_lines(task: TaskResult) -> list[str]:
    """Return a sentence for each method about how it compares with the baseline; one for ties."""
    found = [r.comparison for r in task.methods if r.comparison is not None]
    ties = [each for each in found if each.verdict == "tied" and not any(each.failed)]
    if len(ties) < _FEWEST_TIES:
        return [comparison_sentence(each) for each in found]
    named = ", ".join(f"{each.method} ({difference_text(each)})" for each in ties)
    tied = f"{len(ties)} methods cannot be told apart from {task.baseline}: {named}."
    return [*(comparison_sentence(each) for each in found if each not in ties), tied]


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


def table_lines(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table, of which the first column has names, the others numbers."""
    yield f"| {' | '.join(map(literal, titles))} |"
    yield f"|{'|'.join(['---', *['---:'] * (len(titles) - 1)])}|"
    for name, *cells in rows:
        yield f"| {' | '.join([literal(name), *map(_cell, cells)])} |"


def _cell(text: str) -> str:
    """Leave numbers readable, which a table does not read as lists or headings."""
    return text if _NUMBERS.fullmatch(text) else literal(text)
