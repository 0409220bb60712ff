"""The progress of `adapterhub bench`, and what it prints at its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from adapterhub.bench.baselines import Constant, constant_of, write_constants
from adapterhub.bench.cells import Shard
from adapterhub.bench.conduct import CellEngine, LocalEngine, run_study
from adapterhub.bench.execute import TaskContext
from adapterhub.bench.plan import PlannedStudy, plan_study
from adapterhub.bench.ray_engine import RayEngine
from adapterhub.bench.records import CellRecord, RecordFolder
from adapterhub.bench.study import RECORDS, WORK, Study, as_begun, keep_study
from adapterhub.cli._format import say, seconds_text
from adapterhub.cli._study import conclude_study
from adapterhub.ray_cluster import import_ray
from adapterhub.status import Display, showing
from adapterhub.training.loading import BackboneLoader, SharedLoader

LEFT = 3  # the exit code where cells are left to other processes


@dataclass(frozen=True)
class RunsOn:
    """Where cells run: an engine, local or ray, its workers and its address; and which of them."""

    engine: str = "local"
    workers: int | None = None
    address: str | None = None
    shard: Shard | None = None


def bench_study(study: Study, *, quiet: bool, runs_on: RunsOn) -> None:
    """Run what is missing of a study, print its table, and write its reports.

    It exits where cells are left to other shards.

    Args:
        study: the study.
        quiet: print no progress.
        runs_on: where its cells run.
    """
    if runs_on.engine == "ray":
        import_ray()  # before a backbone is loaded
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

    with engine_for(runs_on, planned.contexts, loader, work) as engine, showing(Display()):
        state = run_study(planned, folder, engine, done, runs_on.shard)
    if left := len(state.next()[0]):
        say(f"at least {left} runs are left to other shards; run them, then this one again")
        sys.exit(LEFT)
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


@contextmanager
def engine_for(
    runs_on: RunsOn, contexts: dict[str, TaskContext], loader: BackboneLoader, work: Path
) -> Iterator[CellEngine]:
    """Start what runs the cells, and stop it.

    Args:
        runs_on: the options.
        contexts: the tasks.
        loader: loads the backbone in this process.
        work: the folder for checkpoints.
    """
    if runs_on.engine == "local":
        yield LocalEngine(contexts, loader, work)
        return
    with RayEngine(contexts, work.absolute(), runs_on.workers, runs_on.address) as engine:
        yield engine


def _result(record: CellRecord) -> str:
    if record.status != "done":
        return f"{record.status}: {record.error.splitlines()[0]}"
    scores = record.tested or record.selected
    return f"{record.metric} {scores.get(record.metric, float('nan')):.4f}"
