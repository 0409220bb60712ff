"""What the card of an adapter says about the study in which its method was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from adapterhub.bench.columns import study_columns
from adapterhub.bench.markdown import table_lines
from adapterhub.bench.records import RecordFolder
from adapterhub.bench.results import MethodResult, TaskResult, read_results
from adapterhub.bench.study import Study, read_study, start_of
from adapterhub.bench.study_folder import RECORDS, STUDY
from adapterhub.bench.wording import comparison_sentence
from adapterhub.errors import ConfigError
from adapterhub.files.manifest import Manifest
from adapterhub.files.markdown import literal
from adapterhub.methods._spec import dump_methods, parse_methods

_BESIDE = ("head", "full")  # shown for orientation, with the best method and the baseline
_COLUMNS = 3  # of the study's columns: score, interval, comparison; then those named below
_FURTHER = ("learning rate", "trained", "files")


def study_section(folder: Path, manifest: Manifest, task: str | None = None) -> str:
    """Return the section of a card that shows an adapter's method among those of a study.

    Args:
        folder: the folder of the study.
        manifest: that of the adapter.
        task: the task of the study that the adapter was trained on; needed if it has several.

    Raises:
        ConfigError: the study has no such task, no such method, or another backbone.
        FileError: the study is broken.
    """
    study = read_study(folder / STUDY)
    records = RecordFolder(folder / RECORDS).all()
    results = read_results(folder, study, records)
    found = _task(folder, results, task)
    result = found.find(_label(study, manifest, folder))
    _check_backbone(result, manifest, folder)
    return "\n".join([*_sentences(study, found, result), "", *_table(found, result)])


def _task(folder: Path, results: Sequence[TaskResult], task: str | None) -> TaskResult:
    """Return the results on a task, with the most rows."""
    names = list(dict.fromkeys(result.task for result in results))
    chosen = names[0] if task is None and len(names) == 1 else task
    if chosen not in names:
        given = "has several tasks" if task is None else f"has no task {task!r}"
        raise ConfigError(
            f"the study in {folder} {given}",
            expected=f"one of {', '.join(names) or 'none, since no run is done'}",
            hint="--study-task NAME",
        )
    return [result for result in results if result.task == chosen][-1]


def _label(study: Study, manifest: Manifest, folder: Path) -> str:
    """Return the name in the study of an adapter's method."""
    for label, spec in study.labels().items():
        if _start_name(manifest) != start_of(spec):
            continue
        if start_of(spec) is not None or dump_methods(parse_methods(spec)) == manifest.methods:  # type: ignore[arg-type]
            return label
    raise ConfigError(
        f"the study in {folder} has not compared the method of this adapter, with its options",
        expected=f"one of {', '.join(study.labels())}",
        hint="train with the command that the report of the study ends with",
    )


def _start_name(manifest: Manifest) -> str | None:
    """Return the name of the adapter that an adapter started from."""
    start = manifest.training.get("from")
    return str(start.get("name")) if isinstance(start, dict) else None


def _check_backbone(result: MethodResult, manifest: Manifest, folder: Path) -> None:
    fingerprints = {record.origin.get("backbone") for record in result.finals}
    if fingerprints - {manifest.backbone.fingerprint}:
        raise ConfigError(f"the study in {folder} has another backbone than this adapter")


def _sentences(study: Study, task: TaskResult, result: MethodResult) -> list[str]:
    tested = f"tested on {task.test_rows:,} rows that selected nothing"
    seeds = f"with {len(result.estimate.scores)} seeds each"
    compared = (
        f"{len(study.labels())} methods were compared on {literal(task.task)}: the learning rate "
        f"of each was tuned, all with equal trials, and the chosen one trained {seeds}, "
        f"{tested}. The first row is this adapter's method; its score is the mean of those "
        "runs, not that of this file."
    )
    lines = [compared]
    if result.comparison is not None:
        lines += ["", literal(comparison_sentence(result.comparison))]
    if task.advice.method == result.method:
        lines += ["", "It is the method that the study recommends."]
    return lines


def _table(task: TaskResult, result: MethodResult) -> list[str]:
    columns = study_columns(task)
    shown = [*columns[:_COLUMNS], *(c for c in columns[_COLUMNS:] if c.title in _FURTHER)]
    named = (result.method, task.advice.best, task.baseline, *_BESIDE)
    rows = {n: r for n in named for r in task.methods if r.method == n}
    rows |= {r.method: r for r in task.methods if not r.finals and not r.trials}  # constants
    cells = [[name, *(c.cell(each).text for c in shown)] for name, each in rows.items()]
    return list(table_lines(["method", *(column.title for column in shown)], cells))
