"""The progress of `adapterhub bench`, and what it prints at its end."""

from __future__ import annotations

import time
from pathlib import Path

from adapterhub.bench.conduct import (
    RECORDS,
    WORK,
    LocalEngine,
    keep_study,
    plan_study,
    run_study,
)
from adapterhub.bench.records import CellRecord, RecordFolder
from adapterhub.bench.study import Study
from adapterhub.cli._format import say, seconds_text
from adapterhub.status import Display, showing
from adapterhub.training.loading import SharedLoader


def bench_study(study: Study, *, quiet: bool) -> None:
    """Run what is missing of a study, and print its table.

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
    say(f"{len(state.records)} records in {folder.folder}")


def _result(record: CellRecord) -> str:
    if record.status != "done":
        return f"{record.status}: {record.error.splitlines()[0]}"
    scores = record.tested or record.selected
    return f"{record.metric} {scores.get(record.metric, float('nan')):.4f}"
