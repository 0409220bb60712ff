"""Run the unfinished cells of a planned study, and read its progress.

Several processes may share a folder. A claim marks the cell that a process is running: a file that
the process creates exclusively, and touches as long as it lives. The claim of a dead process
expires. The next claim has a higher number, so that only one process gets it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from adapterhub.bench.cells import Cell, Group, RateChoice, Shard, next_cells, runs_left
from adapterhub.bench.execute import TaskContext, run_cell
from adapterhub.bench.plan import PlannedStudy
from adapterhub.bench.records import CellRecord, RecordFolder
from adapterhub.bench.study import CLAIMS
from adapterhub.recipe.output_folder import writing
from adapterhub.training.loading import BackboneLoader

EXPIRES = 300.0  # seconds until a claim without updates expires; clocks of machines differ by less
BEAT = 20.0  # seconds between two updates of a claim
POLL = 2.0  # seconds between two checks for the results of other processes


class CellEngine(Protocol):
    """Runs cells that do not depend on each other."""

    def run(self, cells: Iterable[Cell]) -> Iterator[CellRecord]:
        """Yield the record of each cell when it ends.

        A cell is taken from `cells` only when it can begin at once.
        """


class LocalEngine:
    """Runs cells one after the other, in this process."""

    def __init__(
        self, contexts: dict[str, TaskContext], loader: BackboneLoader, work: Path
    ) -> None:
        self.contexts, self.loader, self.work = contexts, loader, work

    def run(self, cells: Iterable[Cell]) -> Iterator[CellRecord]:
        """Yield the record of each cell when it ends."""
        for cell in cells:
            yield run_cell(cell, self.contexts[cell.task], self.loader, self.work)


class StudyState:
    """The progress of a planned study, according to the records in a folder."""

    def __init__(self, planned: PlannedStudy, folder: RecordFolder) -> None:
        self.planned, self.folder, self.bench = planned, folder, planned.study.bench
        self.read: dict[str, CellRecord] = {}

    def record(self, cell: Cell) -> CellRecord | None:
        """Return the record of a cell, if it is finished."""
        key = self.planned.key(cell)
        if key not in self.read and (record := self.folder.read(key)) is not None:
            self.read[key] = record
        return self.read.get(key)

    def _score(self, cell: Cell) -> float | None:
        """Return the selection score: larger is better, -inf for a cell without a score."""
        record = self.record(cell)
        return None if record is None else record.selects

    def next(self) -> tuple[list[Cell], dict[Group, RateChoice]]:
        """Return the cells that can run now, in any process, and the chosen rates."""
        bench = self.bench
        counts = bench.rates, bench.seeds, self._score, bench.tuning_seeds
        return next_cells(self.planned.groups, *counts)

    def runs_left(self) -> int:
        """Return the total number of remaining runs, in any process."""
        bench = self.bench
        counts = bench.rates, bench.seeds, self._score, bench.tuning_seeds
        return runs_left(self.planned.groups, *counts)

    @property
    def records(self) -> tuple[CellRecord, ...]:
        """The finished records, followed by records that other programs wrote."""
        cells: list[Cell] = []
        for group, choice in self.next()[1].items():
            cells += choice.trials
            if choice.rate is not None:
                cells += group.finals(choice.rate, self.bench.seeds)
        own = [record for cell in cells if (record := self.record(cell)) is not None]
        named = self.bench.recorded  # without such methods, files are not read
        others = [r for r in self.folder.all() if r.cell.method in named] if named else []
        return (*own, *others)


def run_study(
    planned: PlannedStudy,
    folder: RecordFolder,
    engine: CellEngine,
    done: Callable[[CellRecord, int], None] = lambda record, left: None,
    shard: Shard | None = None,
) -> StudyState:
    """Run every cell without a record; other processes may run other cells in the same folder.

    Without a shard, wait for the cells that other processes run. `done` receives each new record,
    and the number of remaining runs.

    Raises:
        Stopped: a signal stopped the study; finished cells are recorded.
    """
    state = StudyState(planned, folder)
    with Claims(folder.folder.with_name(CLAIMS)) as claims:
        while cells := state.next()[0]:
            new = 0
            for record in engine.run(_claimed(cells, state, claims, shard or Shard())):
                folder.write(record)
                claims.release(record.key)
                new += 1
                done(record, state.runs_left())
            if not new and shard is not None:
                break
            if not new:
                time.sleep(POLL)
    return state


def _claimed(
    cells: Iterable[Cell], state: StudyState, claims: Claims, shard: Shard
) -> Iterator[Cell]:
    """Claim the cells one after the other, and yield those that were still free."""
    for cell in cells:
        key = state.planned.key(cell)
        if not shard.has(key) or not claims.take(key):
            continue
        if state.record(cell) is None:
            yield cell
        else:
            claims.release(key)


class Claims:
    """The claims of this process in a folder, `KEY.NUMBER` each; a context that releases them."""

    def __init__(self, folder: Path, expires: float = EXPIRES, beat: float = BEAT) -> None:
        self.folder, self.expires, self.beat = folder, expires, beat
        self.held: dict[str, Path] = {}
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._live, name="claims", daemon=True)

    def __enter__(self) -> Claims:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()
        for key in list(self.held):
            self.release(key)

    def take(self, key: str) -> bool:
        """Claim a cell; return whether the claim succeeded.

        Check afterwards whether the cell has a record: another process may have finished it just
        now.

        Raises:
            OutputError: the folder cannot be written.
        """
        last = max(self._numbers(key), default=0)
        if last and not self._is_stale(self._path(key, last)):
            return False
        path = self._path(key, last + 1)
        with writing(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                with path.open("x", encoding="utf-8") as file:
                    json.dump({"place": _place(), "pid": os.getpid()}, file)
            except FileExistsError:
                return False
        self.held[key] = path
        return True

    def release(self, key: str) -> None:
        """Release a claim."""
        own = self.held.pop(key)
        for number in sorted(self._numbers(key)):
            if (path := self._path(key, number)).name != own.name:
                path.unlink(missing_ok=True)
        own.unlink(missing_ok=True)

    def _path(self, key: str, number: int) -> Path:
        return self.folder / f"{key}.{number}"

    def _numbers(self, key: str) -> list[int]:
        return [int(path.suffix[1:]) for path in self.folder.glob(f"{key}.*")]

    def _is_stale(self, path: Path) -> bool:
        """Return whether the process of a claim is dead, or has not updated it for too long."""
        try:
            if time.time() - path.stat().st_mtime > self.expires:
                return True
            owner = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # just released, or being written
            return False
        return owner["place"] == _place() is not None and not _is_running(owner["pid"])

    def _live(self) -> None:
        while not self.ended.wait(self.beat):
            for path in list(self.held.values()):
                with contextlib.suppress(OSError):
                    os.utime(path)


def _place() -> str | None:
    """Return an id of the machine's process numbers; None if it is unknown."""
    try:
        return f"{platform.node()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
