"""Run a study for `adapterhub bench`, print its table and write its reports."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adapterhub.bench.baselines import (
    BagOfWords,
    bag_of_words,
    constant_of,
    read_bags_of_words,
    read_constants,
    write_baselines,
)
from adapterhub.bench.cells import Shard
from adapterhub.bench.conduct import CellEngine, LocalEngine, run_study
from adapterhub.bench.plan import PlannedStudy, plan_study
from adapterhub.bench.ray_engine import RayEngine
from adapterhub.bench.records import CellRecord, RecordFolder
from adapterhub.bench.report import failure_lines, write_study_reports
from adapterhub.bench.results import TaskResult, study_results
from adapterhub.bench.study import (
    RECORDS,
    STUDY,
    WORK,
    Study,
    as_begun,
    keep_study,
    read_study,
    start_of,
)
from adapterhub.bench.tables import result_title, task_table
from adapterhub.cli._format import print_table, say, say_wrapped, seconds_text
from adapterhub.cli.train import FLAGS, MULTIPLE
from adapterhub.config.options import to_dict
from adapterhub.errors import FileError
from adapterhub.files.atomic import replace_file
from adapterhub.recipe.recipe import Recipe
from adapterhub.status import Display, showing
from adapterhub.training.loading import SharedLoader

LEFT = 3  # the exit code if cells are left to other processes
_IN_THE_REPORT = ("seeds", "fit gap", "files", "peak memory")
_OPTIONAL = ("training", "trained", "rate")
_FLAG_OF = {path: flag for flag, path in FLAGS.items() if flag not in MULTIPLE}


@dataclass(frozen=True)
class RunsOn:
    """The engine that runs cells (local or ray), its workers and address, and the shard to run."""

    engine: str = "local"
    workers: int | None = None
    address: str | None = None
    shard: Shard | None = None


def bench_study(study: Study, *, quiet: bool, runs_on: RunsOn) -> None:
    """Run the missing cells of a study, print its table, and write its reports.

    The process exits if cells are left to other shards.
    """
    output = Path(study.recipe.output)
    study = as_begun(study, output)
    loader, work = SharedLoader(), output / WORK
    planned = plan_study(study, loader, work)
    planned = replace(planned, study=keep_study(planned.study, output))
    for note in planned.notes:
        say(note, err=True)
    began = time.monotonic()
    folder = RecordFolder(output / RECORDS)

    def done(record: CellRecord, left: int) -> None:
        if not quiet:
            spent = seconds_text(time.monotonic() - began)
            say(f"{record.cell.describe()}: {_result(record)}  ({spent}, {left} left)", err=True)

    with _engine(runs_on, planned, loader, work) as engine, showing(Display()):
        state = run_study(planned, folder, engine, done, runs_on.shard)
    if left := len(state.next()[0]):
        say(f"at least {left} runs are left to other shards; run them, then this one again")
        sys.exit(LEFT)
    _write_baselines(output, planned)
    _conclude(output, planned.study, state.records)


def _write_baselines(output: Path, planned: PlannedStudy) -> None:
    """Fit the baselines of each task that has any, and write their predictions."""
    constants, words, known = {}, {}, dict[str, BagOfWords]()
    with suppress(FileError):  # rewritten
        known = read_bags_of_words(output)
    for name, context in planned.contexts.items():
        data, kind = context.data, context.data.run.task.outcomes
        if kind and (constant := constant_of(kind, data.run.train)):
            constants[name] = constant
        numbers = {group.rows for group in planned.groups if group.task == name}
        # With the rows of the first seed.
        drawn = {rows: data.of(rows, 1).train for rows in sorted(numbers)}
        if kind and (baseline := bag_of_words(kind, drawn, data.test, known.get(name))):
            words[name] = baseline
    write_baselines(output, constants, words)


def _engine(
    runs_on: RunsOn, planned: PlannedStudy, loader: SharedLoader, work: Path
) -> AbstractContextManager[CellEngine]:
    """Return the engine that runs the cells; `work` is the folder for checkpoints."""
    if runs_on.engine == "local":
        return nullcontext(LocalEngine(planned.contexts, loader, work))
    return RayEngine(planned.contexts, work.absolute(), runs_on.workers, runs_on.address)


def _result(record: CellRecord) -> str:
    if record.status != "done":
        return f"{record.status}: {record.error.splitlines()[0]}"
    scores = record.tested or record.selected
    return f"{record.metric} {scores.get(record.metric, float('nan')):.4f}"


def report_study(folder: Path, output: Path | None = None) -> Path:
    """Rewrite the reports of the study in a folder from its records; return the page.

    The page is also written to `output`.

    Raises:
        FileError: the study lacks a tested run, or a file is broken.
        OSError: a file cannot be written.
    """
    study = read_study(folder / STUDY)
    records = tuple(RecordFolder(folder / RECORDS).all())
    results = results_of(folder, study, records)
    commands = train_commands(study, results, folder)
    page, _ = write_study_reports(folder, study, results, commands)
    if output is None:
        return page
    replace_file(output, page.read_bytes())
    return output


def _conclude(folder: Path, study: Study, records: Sequence[CellRecord]) -> None:
    """Write the reports of a finished study, and print its table.

    Raises:
        FileError: none of the runs has a score.
        OSError: a file cannot be written.
    """
    results = results_of(folder, study, records)
    commands = train_commands(study, results, folder)
    for task in results:
        _print_task(task, results, commands.get((task.task, task.rows)))
    for path in write_study_reports(folder, study, results, commands):
        say(f"{'report':12} {path}")


def results_of(folder: Path, study: Study, records: Sequence[CellRecord]) -> tuple[TaskResult, ...]:
    """Collect the results of the study in a folder.

    Raises:
        FileError: none of the runs has a score.
    """
    results = study_results(study, records, read_constants(folder), read_bags_of_words(folder))
    if not results:
        errors = [f"{r.cell.method}: {r.error}" for r in records if r.error]
        raise FileError(
            f"the study in {folder} has no tested run",
            expected=f"at least one in {folder / RECORDS} that did not fail",
            offenders=list(dict.fromkeys(errors))[:5],
            hint=f"adapterhub bench --output {folder} to continue it",
        )
    return results


def _print_task(task: TaskResult, results: Sequence[TaskResult], command: str | None) -> None:
    title = f"{result_title(task, results)}: {task.test_rows:,} test rows"
    table = replace(task_table(task).without(*_IN_THE_REPORT), title=title)
    print_table(table, _OPTIONAL, "in the report")
    for line in (*task.advice.reasons, *failure_lines(task)):
        say_wrapped(line)
    if command:
        say("")
        say(command)
    say("")


def train_commands(
    study: Study, results: Sequence[TaskResult], output: Path
) -> dict[tuple[str, int], str]:
    """Return, by task and rows, the command that trains the recommended method on all rows.

    Only the largest number of rows of a task has a command: a learning rate for fewer rows does not
    suit all rows.
    """
    commands, several = {}, len({task.task for task in results}) > 1
    for task in {task.task: task for task in results}.values():  # the last one has the most rows
        if (words := _words(study, task, output, several)) is not None:
            commands[task.task, task.rows] = shlex.join(["adapterhub", "train", *words])
    return commands


def _words(study: Study, task: TaskResult, output: Path, several: bool) -> list[str] | None:
    """Return the words of a command; None if no trained method is recommended.

    After runs too short for a recommendation, the command uses the usual learning rate.
    """
    advice, bench = task.advice, study.bench
    if (method := advice.method or advice.candidate) not in study.labels():
        return None
    result = task.find(str(method))
    if result.rate is None:
        return None
    recipe, spec = study.tasks()[task.task], study.labels()[str(method)]
    place = output / (f"best-{task.task}" if several else "best")
    start = start_of(spec)
    method_spec = spec if isinstance(spec, str) else json.dumps(spec)
    decided = {
        **({"method": method_spec} if start is None else {"from": start}),
        "train.learning_rate": f"{result.rate:g}",
        "train.max_steps": str(result.finals[0].cell.steps),
        "output": str(place),
    }
    if bench.steps is None or bench.budget is not None:
        del decided["train.max_steps"]  # the steps of the command, actual or recommended
    if advice.method is None:
        del decided["train.learning_rate"]
    own = {path: text for path, text in _given(recipe) if path not in (*decided, "seed", "name")}
    chosen = {"backbone": str(recipe.backbone), **decided, **own}
    order = [path for path in FLAGS.values() if path in chosen and path in _FLAG_OF]
    flags = [word for path in order for word in (f"--{_FLAG_OF[path]}", chosen[path])]
    return flags + [f"{path}={text}" for path, text in chosen.items() if path not in _FLAG_OF]


def _given(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield the options of a recipe that differ from their defaults, by path."""
    for path, value in differing_options(to_dict(recipe), to_dict(Recipe())):
        yield path, value if isinstance(value, str) else json.dumps(value)


def differing_options(
    options: Mapping[str, Any], usual: Mapping[str, Any], above: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each option that differs from the default."""
    for name, value in options.items():
        path, default = f"{above}{name}", usual.get(name)
        if isinstance(value, Mapping) and isinstance(default, Mapping) and default:
            yield from differing_options(value, default, f"{path}.")
        elif value != default:
            yield path, value
