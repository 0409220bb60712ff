"""Tables of a study: the methods of one task, and the scores on all tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from adapterhub.bench.advice import (
    p_text,
    points_text,
    rate_words,
    signed_text,
    size_words,
    time_words,
)
from adapterhub.bench.results import MethodResult, TaskResult
from adapterhub.files.shown_table import ShownTable, TableCell

Entry = Callable[[TaskResult, MethodResult], TableCell]
NONE = "-"  # not measured, or does not exist


def task_table(task: TaskResult) -> ShownTable:
    """Return the table of one task: a row for each method, without empty columns."""
    columns = [
        ((title, meaning), [entry(task, result) for result in task.methods])
        for title, meaning, entry in _columns(task)
    ]
    shown = [(head, cells) for head, cells in columns if any(c.text != NONE for c in cells)]
    rows: list[list[str | TableCell]] = [
        [result.method, *(cells[place] for _, cells in shown)]
        for place, result in enumerate(task.methods)
    ]
    return ShownTable(
        ["method", *(title for (title, _), _ in shown)],
        rows,
        numbers=True,
        meanings=["", *(meaning for (_, meaning), _ in shown)],
        taken=[i for i, each in enumerate(task.methods) if each.method == task.advice.method],
    )


def summary_table(results: Sequence[TaskResult]) -> ShownTable:
    """Return the table of all tasks: the score of each method on each of them."""
    methods = dict.fromkeys(result.method for task in results for result in task.methods)
    return ShownTable(
        ["method", *(result_title(task, results) for task in results)],
        [[name, *(_score_in(task, name) for task in results)] for name in methods],
        numbers=True,
        meanings=["", *map(score_title, results)],
    )


def result_title(task: TaskResult, results: Sequence[TaskResult]) -> str:
    """Return the title of a task, with its training rows if their number varies."""
    several = len({other.rows for other in results if other.task == task.task}) > 1
    return f"{task.task}, {task.rows:,} rows" if several else task.task


def score_title(task: TaskResult) -> str:
    """Return the name of the score, with its direction if smaller is better."""
    return f"{task.score.name}{', lower is better' if task.score.lower_is_better else ''}"


def failure_word(result: MethodResult) -> str:
    """Return a word for the missing score of a method: diverged, failed, or not run yet."""
    statuses = {record.status for record in result.failures}
    return " and ".join(sorted(statuses)) if statuses else "not run"


def _score_in(task: TaskResult, method: str) -> TableCell:
    results = [result for result in task.methods if result.method == method]
    return _score(task, results[0]) if results else TableCell("")


def _columns(task: TaskResult) -> Iterator[tuple[str, str, Entry]]:
    """Yield the title, the meaning and the entries of each column."""
    unit = "points" if task.score.points > 1 else task.score.name
    yield score_title(task), "mean of the seeds on the test rows ± sd over seeds", _score
    yield "95 %", "interval of the mean, over test rows and seeds", _interval
    yield (
        f"against {task.baseline}",
        f"difference in {unit}; tied: these rows and seeds cannot tell the two apart",
        _against,
    )
    yield "seeds", "runs with the chosen rate, and those that failed", _seeds
    yield "fit gap", f"{unit} that it is better on training rows than on test rows", _gap
    yield (
        "rate",
        "learning rate, the best on the selection rows; edge: none beyond was tried",
        _rate,
    )
    yield "trained", "parameters, with the task head", _cost("all_trained", "{:,}".format)
    yield "files", "of the adapter", _cost("file_bytes", size_words)
    yield (
        "training",
        "time of a run without evaluations, when and where it ran",
        _cost("train_seconds", time_words),
    )
    yield "peak memory", "of the process", _cost("peak_memory", size_words)


def _score(task: TaskResult, result: MethodResult) -> TableCell:
    estimate, points = result.estimate, task.score.points
    if estimate.value is None:
        return TableCell(failure_word(result))
    spread = f" ± {points_text(estimate.sd, points)}" if estimate.sd is not None else ""
    return TableCell(points_text(estimate.value, points) + spread, estimate.value)


def _interval(task: TaskResult, result: MethodResult) -> TableCell:
    estimate = result.estimate
    if estimate.low is None or estimate.high is None:
        return TableCell(NONE)
    low, high = (points_text(end, task.score.points) for end in (estimate.low, estimate.high))
    over = "" if estimate.covers_seeds else ", over rows only"
    return TableCell(f"{low} to {high}{over}", estimate.low)


def _against(task: TaskResult, result: MethodResult) -> TableCell:
    """Describe how a method compares with the baseline: difference, verdict and p-value."""
    pair = result.comparison
    if pair is None:
        return TableCell("baseline" if result.method == task.baseline else NONE)
    if pair.value is None:
        return TableCell(NONE)
    number = signed_text(pair.value, pair.points)
    if pair.corrected is None:
        return TableCell(f"{number}, not known", pair.value)
    return TableCell(f"{number}, {pair.verdict} ({p_text(pair.corrected)})", pair.value)


def _seeds(task: TaskResult, result: MethodResult) -> TableCell:
    if not result.finals:
        return TableCell(NONE)
    failed = [record.status for record in result.finals if record.status != "done"]
    counts = [f"{failed.count(status)} {status}" for status in sorted(set(failed))]
    done = len(result.finals) - len(failed)
    text = f"{done} of {len(result.finals)} ({', '.join(counts)})" if failed else str(done)
    return TableCell(text, done)


def _gap(task: TaskResult, result: MethodResult) -> TableCell:
    if result.gap is None:
        return TableCell(NONE)
    return TableCell(signed_text(result.gap, task.score.points), result.gap)


def _rate(task: TaskResult, result: MethodResult) -> TableCell:
    return TableCell(f"{rate_words(result.rate)}{' edge' * result.at_edge}", result.rate)


def _cost(name: str, text: Callable[[float], str]) -> Entry:
    """Return the entries of a cost column; 0 means not measured."""

    def entry(task: TaskResult, result: MethodResult) -> TableCell:
        value = getattr(result.costs, name) if result.costs else 0
        return TableCell(text(value), value) if value else TableCell(NONE)

    return entry
