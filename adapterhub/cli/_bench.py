"""The progress of `adapterhub bench`, and what it prints at its end."""

from __future__ import annotations

import time
from pathlib import Path

from adapterhub.bench.baselines import Constant, constant_of, write_constants
from adapterhub.bench.conduct import (
    RECORDS,
    WORK,
    LocalEngine,
    PlannedStudy,
    keep_study,
    plan_study,
    run_study,
)
from adapterhub.bench.records import CellRecord, RecordFolder
from adapterhub.bench.study import Study
from adapterhub.cli._format import say, seconds_text
from adapterhub.cli._study import conclude_study
from adapterhub.status import Display, showing
from adapterhub.training.loading import SharedLoader


def bench_study(study: Study, *, quiet: bool) -> None:
    """Run what is missing of a study, print its table, and write its reports.

    Args:
        study: the study.
        quiet: print no progress.
    """
    output = Path(study.recipe.output)
    loader, work = SharedLoader(), output / WORK
    planned = plan_study(study, loader, work)
    keep_study(planned.study, output)
    if not quiet:
        for note in planned.notes:
            say(note, err=True)
    began = time.monotonic()
    folder = RecordFolder(output / RECORDS)

    def done(record: CellRecord, left: int) -> None:
        if not quiet:
            spent = seconds_text(time.monotonic() - began)
            say(f"{record.cell.describe()}: {_result(record)}  ({spent}, {left} left)", err=True)

    with showing(Display()):
        state = run_study(planned, folder, LocalEngine(planned.contexts, loader, work), done)
    write_constants(output, _constants(planned))
    conclude_study(output, planned.study, state.records)


def _constants(planned: PlannedStudy) -> dict[str, Constant]:
    """Return the constant prediction of each task that has one."""
    found = {}
    for name, context in planned.contexts.items():
        kind = context.data.run.task.outcomes
        constant = constant_of(kind, context.data.run.train) if kind else None
        if constant is not None:
            found[name] = constant
    return found


def _result(record: CellRecord) -> str:
    if record.status != "done":
        return f"{record.status}: {record.error.splitlines()[0]}"
    scores = record.tested or record.selected
    return f"{record.metric} {scores.get(record.metric, float('nan')):.4f}"
