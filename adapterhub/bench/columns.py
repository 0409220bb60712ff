"""The columns of a study's table, as texts, and as the numbers that it is sorted by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from adapterhub.bench.records import Costs
from adapterhub.bench.results import MethodResult, TaskResult
from adapterhub.bench.wording import p_text, points_text, time_words, without_negative_zero
from adapterhub.files.shown_table import TableCell

NONE = "-"  # what was not measured, or does not exist
_UNKNOWN = "not known"


@dataclass(frozen=True)
class StudyColumn:
    """A column: its title, what it means, and its entry for a method."""

    title: str
    meaning: str
    cell: Callable[[MethodResult], TableCell]


def study_columns(task: TaskResult) -> list[StudyColumn]:
    """Return the columns of the table of one task; those without any entry are left out."""
    columns = [
        *_score_columns(task),
        *_rate_columns(task),
        *_training_columns(task),
        *_inference_columns(),
    ]
    return [
        column
        for column in columns
        if any(column.cell(result).text != NONE for result in task.methods)
    ]


def score_title(task: TaskResult) -> str:
    """Return the name of the score, with its direction where a smaller one is better."""
    return f"{task.score.name}{', lower is better' if task.score.lower_is_better else ''}"


def _score_columns(task: TaskResult) -> list[StudyColumn]:
    points = task.score.points
    unit = "points" if points > 1 else task.score.name

    def score(result: MethodResult) -> TableCell:
        found = result.estimate
        if found.value is None:
            return TableCell(failure_word(result))
        spread = f" ± {points_text(found.sd, points)}" if found.sd is not None else ""
        return TableCell(points_text(found.value, points) + spread, found.value)

    def interval(result: MethodResult) -> TableCell:
        found = result.estimate
        if found.low is None or found.high is None:
            return TableCell(NONE)
        ends = [points_text(end, points) for end in (found.low, found.high)]
        over = "" if found.covers_seeds else ", over rows only"
        return TableCell(f"{ends[0]} to {ends[1]}{over}", found.low)

    def against(result: MethodResult) -> TableCell:
        return TableCell(verdict_text(task, result), _difference(result))

    def seeds(result: MethodResult) -> TableCell:
        return TableCell(seeds_text(result), len(result.estimate.scores))

    def gap(result: MethodResult) -> TableCell:
        if result.gap is None:
            return TableCell(NONE)
        text = f"{result.gap * points:+.{1 if points > 1 else 3}f}"
        return TableCell(without_negative_zero(text), result.gap)

    title = f"against {task.baseline}"
    tied = "tied: cannot be told apart by these rows and seeds"
    return [
        StudyColumn(score_title(task), "mean of the seeds on the test rows ± sd over seeds", score),
        StudyColumn("95 % interval", "of the mean, over test rows and seeds", interval),
        StudyColumn(
            title, f"difference in {unit}, and whether it is more than chance; {tied}", against
        ),
        StudyColumn("seeds", "runs with the chosen rate, and those that failed", seeds),
        StudyColumn("fit gap", f"{unit} that it is better on training rows than on test rows", gap),
        StudyColumn(
            "calibration error",
            "expected distance of probability and accuracy",
            lambda result: _optional(result.calibration, "{:.3f}"),
        ),
    ]


def _difference(result: MethodResult) -> float | None:
    return result.comparison.value if result.comparison else None


def verdict_text(task: TaskResult, result: MethodResult) -> str:
    """Say how a method compares with the baseline: the difference, the verdict and the p-value."""
    found = result.comparison
    if found is None:
        return "baseline" if result.method == task.baseline else NONE
    if found.value is None:
        return NONE
    digits = 1 if found.points > 1 else 3
    number = without_negative_zero(f"{found.value * found.points:+.{digits}f}")
    if found.corrected is None:
        return f"{number}, {_UNKNOWN}"
    return f"{number}, {found.verdict} ({p_text(found.corrected)})"


def failure_word(result: MethodResult) -> str:
    """Name why a method has no score: diverged, failed, or not run yet."""
    found = {record.status for record in result.failures}
    return " and ".join(sorted(found)) if found else "not run"


def seeds_text(result: MethodResult) -> str:
    """Count the seeds, and those that failed or diverged."""
    if not result.finals:
        return NONE
    failed = [record.status for record in result.finals if record.status != "done"]
    counts = [f"{failed.count(status)} {status}" for status in sorted(set(failed))]
    done = len(result.finals) - len(failed)
    return f"{done} of {len(result.finals)} ({', '.join(counts)})" if failed else str(done)


def rate_words(rate: float | None) -> str:
    """Write a learning rate with two digits: 1e-3, 3.2e-3."""
    if rate is None:
        return NONE
    mantissa, exponent = f"{rate:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def _rate_columns(task: TaskResult) -> list[StudyColumn]:
    def rate(result: MethodResult) -> TableCell:
        edge = " (edge)" if result.at_edge else ""
        return TableCell(rate_words(result.rate) + edge, result.rate)

    def trials(result: MethodResult) -> TableCell:
        count = len(result.trials)
        return TableCell(str(count), count) if count else TableCell(NONE)

    def width(result: MethodResult) -> TableCell:
        good = result.good
        if good is None:
            return TableCell(NONE)
        least = "at least " if good.open_ends else ""
        if good.low == good.high:
            return TableCell(f"{rate_words(good.low)} alone", 0.0)
        ends = f"{rate_words(good.low)} to {rate_words(good.high)}"
        return TableCell(f"{least}{good.decades:.1f} decades ({ends})", good.decades)

    return [
        StudyColumn(
            "learning rate", "the best on the selection rows; edge: no further one was tried", rate
        ),
        StudyColumn("trials", "runs that chose the rate", trials),
        StudyColumn("good rates", "rates within a point, or an sd, of the best", width),
    ]


IN_TURNS = "measured in turns with the other methods"
BY_RUNS = "as the runs measured it, each when and where it ran"


def _memory_column(task: TaskResult) -> StudyColumn:
    if task.in_turns:
        meaning = f"peak of training, beside the loaded backbone; {IN_TURNS}"
        return StudyColumn(
            "added memory",
            meaning,
            _of_costs(lambda c: size_words(c.added_memory or 0), lambda c: c.added_memory),
        )
    return StudyColumn(
        "peak memory",
        "of the process",
        _of_costs(lambda c: size_words(c.peak_memory), lambda c: c.peak_memory or None),
    )


def _of_costs(
    text: Callable[[Costs], str], number: Callable[[Costs], float | None]
) -> Callable[[MethodResult], TableCell]:
    """Return the cell of a column, by the text and the number of a method's costs."""

    def cell(result: MethodResult) -> TableCell:
        costs = result.costs
        if costs is None or number(costs) is None:
            return TableCell(NONE)
        return TableCell(text(costs), number(costs))

    return cell


def _training_columns(task: TaskResult) -> list[StudyColumn]:
    how = IN_TURNS if task.in_turns else BY_RUNS
    return [
        StudyColumn(
            "trained",
            "parameters, with the task head",
            _of_costs(lambda c: f"{_trained(c):,}", _trained),
        ),
        StudyColumn("of backbone", "trained share", _of_costs(_share_text, _share)),
        StudyColumn(
            "files",
            "of the adapter",
            _of_costs(lambda c: size_words(c.file_bytes), lambda c: c.file_bytes or None),
        ),
        StudyColumn(
            "training",
            f"time of a run, without evaluations; {how}",
            _of_costs(lambda c: time_words(c.train_seconds), lambda c: c.train_seconds),
        ),
        _memory_column(task),
        StudyColumn(
            "tokens/s",
            "in training",
            _of_costs(
                lambda c: f"{c.tokens_per_second:,.0f}", lambda c: c.tokens_per_second or None
            ),
        ),
        StudyColumn(
            "forgetting",
            "rise of the loss per token of the held text over the bare backbone, in nats",
            _of_costs(lambda c: f"{c.forgetting or 0:+.3f}", lambda c: c.forgetting),
        ),
    ]


def _inference_columns() -> list[StudyColumn]:
    return [
        StudyColumn(
            "attached",
            "time of a forward pass, relative to the bare backbone",
            _of_costs(lambda c: f"{c.attached or 0:.2f}x", lambda c: c.attached),
        ),
        StudyColumn(
            "routed",
            "the same, if half of the rows of a batch have the adapter",
            _of_costs(lambda c: f"{c.routed or 0:.2f}x", lambda c: c.routed),
        ),
        StudyColumn(
            "merged",
            "the same, after merging",
            _of_costs(lambda c: "1x" if c.merges else "cannot be merged", _merged),
        ),
        StudyColumn(
            "loading",
            "the adapter, on a backbone in memory",
            _of_costs(lambda c: f"{1000 * (c.load_seconds or 0):.0f} ms", lambda c: c.load_seconds),
        ),
    ]


def _trained(costs: Costs) -> int:
    return costs.all_trained


def _share(costs: Costs) -> float | None:
    return costs.all_trained / costs.backbone if costs.backbone else None


def _share_text(costs: Costs) -> str:
    share = 100 * (_share(costs) or 0.0)
    return f"{share:.0f} %" if share >= 10 else f"{share:.2g} %"


def _merged(costs: Costs) -> float | None:
    return None if costs.merges is None else 1.0 + (not costs.merges)


def _optional(value: float | None, form: str) -> TableCell:
    return TableCell(NONE) if value is None else TableCell(form.format(value), value)


def size_words(size: float) -> str:
    """Write bytes with two or three digits: 1.5 MB."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2g} GB" if size < 100 else f"{size:,.0f} GB"
