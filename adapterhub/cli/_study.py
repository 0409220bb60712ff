"""How `adapterhub bench` prints a study, and writes its reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from adapterhub.bench.baselines import read_constants
from adapterhub.bench.records import CellRecord, RecordFolder
from adapterhub.bench.report import failure_lines, write_study_reports
from adapterhub.bench.results import TaskResult, study_results
from adapterhub.bench.study import RECORDS, STUDY, Study, read_study
from adapterhub.bench.tables import result_title, task_table
from adapterhub.cli._format import print_table, say, say_wrapped
from adapterhub.cli._train_command import train_commands
from adapterhub.errors import FileError
from adapterhub.files.atomic import replace_file

_IN_THE_REPORT = ("seeds", "fit gap", "files", "peak memory")
_OPTIONAL = ("training", "trained", "rate")


def report_study(folder: Path, output: Path | None = None) -> Path:
    """Write the reports of the study in a folder anew, from its records; return the page.

    Args:
        folder: the folder.
        output: where to write the page as well.

    Raises:
        FileError: the study has no tested run, or a file is broken.
        OSError: a file cannot be written.
    """
    study = read_study(folder / STUDY)
    records = tuple(RecordFolder(folder / RECORDS).all())
    page, _ = _write(folder, study, _results(folder, study, records))
    if output is None:
        return page
    replace_file(output, page.read_bytes())
    return output


def conclude_study(folder: Path, study: Study, records: Sequence[CellRecord]) -> None:
    """Write the reports of a study that is done, and print its table.

    Args:
        folder: the folder of the study.
        study: the study.
        records: all its records.

    Raises:
        FileError: no run has a score.
        OSError: a file cannot be written.
    """
    results = _results(folder, study, records)
    commands = train_commands(study, results, folder)
    for task in results:
        _print_task(task, results, commands.get((task.task, task.rows)))
    for path in _write(folder, study, results):
        say(f"{'report':12} {path}")


def _results(folder: Path, study: Study, records: Sequence[CellRecord]) -> tuple[TaskResult, ...]:
    results = study_results(study, records, read_constants(folder))
    if not results:
        errors = [f"{r.cell.method}: {r.error}" for r in records if r.error]
        raise FileError(
            f"the study in {folder} has no tested run",
            expected=f"at least one in {folder / RECORDS} that did not fail",
            offenders=list(dict.fromkeys(errors))[:5],
            hint=f"adapterhub bench --output {folder} to continue it",
        )
    return results


def _write(folder: Path, study: Study, results: Sequence[TaskResult]) -> tuple[Path, Path]:
    commands = train_commands(study, results, folder)
    return write_study_reports(folder, study, results, commands)


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
