"""Run what is not done yet of a planned study, and read how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from adapterhub.bench.cells import Cell, Group, Shard
from adapterhub.bench.claims import Claims
from adapterhub.bench.execute import TaskContext, run_cell
from adapterhub.bench.plan import PlannedStudy
from adapterhub.bench.records import CellRecord, RecordFolder
from adapterhub.bench.search import RateChoice, ScoreOf, final_cell, next_cells, runs_left
from adapterhub.bench.study import BenchOptions
from adapterhub.bench.study_folder import CLAIMS
from adapterhub.training.loading import BackboneLoader

POLL = 2.0  # seconds between two looks at what other processes have done


class CellEngine(Protocol):
    """Runs cells that do not depend on each other."""

    def run(self, cells: Iterable[Cell]) -> Iterator[CellRecord]:
        """Yield the record of each cell when it has ended.

        A cell is taken from `cells` only when it can begin at once.
        """


class LocalEngine:
    """Runs cells one after the other, in this process."""

    def __init__(
        self, contexts: dict[str, TaskContext], loader: BackboneLoader, work: Path
    ) -> None:
        self.contexts, self.loader, self.work = contexts, loader, work

    def run(self, cells: Iterable[Cell]) -> Iterator[CellRecord]:
        """Yield the record of each cell when it has ended."""
        for cell in cells:
            yield run_cell(cell, self.contexts[cell.task], self.loader, self.work)


class Scores:
    """The scores of the cells that are done, from the records in a folder."""

    def __init__(self, planned: PlannedStudy, folder: RecordFolder) -> None:
        self.planned, self.folder = planned, folder
        self.read: dict[str, CellRecord] = {}

    def record(self, cell: Cell) -> CellRecord | None:
        """Return the record of a cell, if it is done."""
        key = self.planned.key(cell)
        if key not in self.read and (record := self.folder.read(key)) is not None:
            self.read[key] = record
        return self.read.get(key)

    def __call__(self, cell: Cell) -> float | None:
        """Return what selects: larger is better, -inf for a cell without a score."""
        record = self.record(cell)
        return None if record is None else record.selects


@dataclass(frozen=True)
class StudyState:
    """How far a study is: the choices that are made, and all its records, other programs' too."""

    choices: dict[Group, RateChoice]
    records: tuple[CellRecord, ...]


def run_study(
    planned: PlannedStudy,
    folder: RecordFolder,
    engine: CellEngine,
    done: Callable[[CellRecord, int], None] = lambda record, left: None,
    shard: Shard | None = None,
) -> StudyState:
    """Run every cell that has no record yet; other processes may run others in the same folder.

    Args:
        planned: the study.
        folder: its records.
        engine: runs the cells.
        done: called with each new record, and the number of runs that are left.
        shard: which cells to run. Without it all of them; those that other processes run are then
            waited for.

    Raises:
        Stopped: a signal stopped the study; what is done is recorded.
    """
    with Claims(folder.folder.with_name(CLAIMS)) as claims:
        turn = _Turn(planned, folder, claims, shard or Shard())
        while cells := turn.left():
            new = 0
            for record in engine.run(turn.claimed(cells)):
                folder.write(record)
                claims.release(record.key)
                new += 1
                done(record, turn.runs_left())
            if not new and shard is not None:
                break
            if not new:
                time.sleep(POLL)
    return study_state(planned, folder)


@dataclass
class _Turn:
    """The cells that this process may run."""

    planned: PlannedStudy
    folder: RecordFolder
    claims: Claims
    shard: Shard

    def __post_init__(self) -> None:
        self.score = Scores(self.planned, self.folder)

    def left(self) -> list[Cell]:
        """Return the cells that can run now, in any process."""
        return _next(self.planned, self.score)[0]

    def runs_left(self) -> int:
        """Return how many runs are left in all, in any process."""
        bench = self.planned.study.bench
        counts = bench.rates, bench.seeds, self.score, bench.tuning_seeds
        return runs_left(self.planned.groups, *counts)

    def claimed(self, cells: Iterable[Cell]) -> Iterator[Cell]:
        """Claim the cells one after the other, and yield those that no other process has."""
        for cell in cells:
            key = self.planned.key(cell)
            if not self.shard.has(key) or not self.claims.take(key):
                continue
            if self.score.record(cell) is None:
                yield cell
            else:
                self.claims.release(key)


def cells_left(planned: PlannedStudy, folder: RecordFolder) -> int:
    """Return the number of cells that can run now; none if the study is complete."""
    return len(_next(planned, Scores(planned, folder))[0])


def _next(planned: PlannedStudy, score: ScoreOf) -> tuple[list[Cell], dict[Group, RateChoice]]:
    """Return the cells of a study that can run now, and the rates that are chosen."""
    bench = planned.study.bench
    return next_cells(planned.groups, bench.rates, bench.seeds, score, bench.tuning_seeds)


def study_state(planned: PlannedStudy, folder: RecordFolder) -> StudyState:
    """Return what is done of a study."""
    score = Scores(planned, folder)
    bench = planned.study.bench
    _, choices = _next(planned, score)
    cells: list[Cell] = []
    for group, choice in choices.items():
        cells += choice.trials
        if choice.rate is not None:
            cells += [final_cell(group, choice.rate, n) for n in range(1, bench.seeds + 1)]
    records = (*_present(score.record(cell) for cell in cells), *_recorded(bench, folder))
    return StudyState(choices, records)


def _recorded(bench: BenchOptions, folder: RecordFolder) -> Iterator[CellRecord]:
    """Yield the records that other programs wrote; without such methods, no file is read."""
    every = folder.all() if bench.recorded else iter(())
    return (record for record in every if record.cell.method in bench.recorded)


def _present(records: Iterable[CellRecord | None]) -> Iterator[CellRecord]:
    return (record for record in records if record is not None)
