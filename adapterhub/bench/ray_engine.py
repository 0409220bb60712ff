"""Run the cells of a study on the workers of a Ray cluster, each with its own loaded backbone.

A worker is a Ray actor. The data are transferred once, through Ray's object store. The backbone is
not: each node needs its files. If a worker dies, only its cell is lost and runs again elsewhere.
"""

from __future__ import annotations

import os
import platform
import signal
import tempfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from adapterhub._version import __version__
from adapterhub.backbones.fingerprint import fingerprint
from adapterhub.bench.cells import Cell
from adapterhub.bench.execute import TaskContext, run_cell
from adapterhub.bench.records import CellRecord
from adapterhub.config.user_folders import is_folder
from adapterhub.errors import AdapterhubError, BackboneError, TrainingError
from adapterhub.loop.processes import Stopped
from adapterhub.ray_cluster import WorkerShare, connect_ray, import_ray, share_out
from adapterhub.status import doing
from adapterhub.training.loading import SharedLoader

MOST_TRIES = 3  # per cell, if its worker dies
STARTING = 600.0  # seconds until a worker responds; a busy or growing cluster takes minutes


class BenchWorker:
    """A Ray actor that runs cells in a process of a node."""

    def __init__(
        self, contexts: dict[str, TaskContext], work: Path, threads: int, driver: tuple[str, str]
    ) -> None:
        self.contexts, self.work, self.loader = contexts, work, SharedLoader()
        self.version, folder = driver
        torch.set_num_threads(threads)
        if is_folder(folder):  # the path of a backbone may be relative
            os.chdir(folder)

    def problem(self) -> str:
        """Return why cells cannot run on this node; "" if they can."""
        if self.version != __version__:
            return f"it has adapterhub {__version__}; the study was started with {self.version}"
        for context in self.contexts.values():
            backbone = context.recipe.backbone
            try:
                actual = fingerprint(backbone, revision=context.recipe.revision)
            except AdapterhubError as error:
                return error.problem
            if actual != context.backbone:
                return f"its files of the backbone {backbone!r} have other weights"
        return ""

    def run(self, cell: Cell) -> CellRecord:
        """Run a cell; continue it where it was killed, if the study's folder is shared."""
        with tempfile.TemporaryDirectory(prefix="adapterhub-bench-") as own:
            work = self.work if self.work.parent.is_dir() else Path(own)
            context = self.contexts[cell.task]
            record = run_cell(cell, context, self.loader, work)
        return replace(record, origin={**record.origin, "node": platform.node()})


@dataclass(frozen=True)
class _Job:
    """The work of a worker: a cell, or only starting."""

    cell: Cell | None = None
    tries: int = 1


class RayEngine:
    """Runs cells on a Ray cluster, each on the first free worker.

    A context manager: at exit, also after Ctrl-C, it stops its workers, and Ray if it was started
    here.
    """

    def __init__(
        self,
        contexts: dict[str, TaskContext],
        work: Path,
        workers: int | None = None,
        address: str | None = None,
    ) -> None:
        self.contexts, self.work, self.workers, self.address = contexts, work, workers, address
        self.ray = import_ray()
        self.actors: dict[Any, WorkerShare] = {}
        self.free: list[Any] = []
        self.running: dict[Any, tuple[Any, _Job]] = {}  # by the reference to the result
        self.started = False
        self.handler = signal.getsignal(signal.SIGTERM)

    def __enter__(self) -> RayEngine:
        """Connect to the cluster, or start Ray, and start the workers."""
        try:
            if not self.ray.is_initialized():
                self.started = True
                with doing("starting Ray"):
                    connect_ray(self.ray, self.address)
                if threading.current_thread() is threading.main_thread():
                    # Same as Ctrl-C: Ray's own handler would abort before the cleanup.
                    signal.signal(signal.SIGTERM, signal.default_int_handler)
            self.data = self.ray.put(self.contexts)
            for share in share_out(self.ray.nodes(), self.workers):
                self._hire(share, _Job())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the workers."""
        for actor in self.actors:
            self.ray.kill(actor)
        self.actors.clear()
        if self.started:
            self.ray.shutdown()
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, self.handler)

    def run(self, cells: Iterable[Cell]) -> Iterator[CellRecord]:
        """Yield the record of each cell when it ends; take the next one when a worker is free.

        Raises:
            BackboneError: a node cannot run the cells.
            TrainingError: no worker starts, or the workers of a cell died `MOST_TRIES` times.
        """
        jobs = (_Job(cell) for cell in cells)
        again: list[_Job] = []
        lost: list[_Job] = []
        while True:
            while self.free and (job := again.pop() if again else next(jobs, None)):
                self._submit(job)
            if self.free and not self._has_cells():
                break
            job, record = self._next()
            if record is not None:
                yield record
            elif job.cell:
                (again if job.tries < MOST_TRIES else lost).append(_retried(job))
        if lost:
            raise _lost(lost)

    def _has_cells(self) -> bool:
        return any(job.cell for _, job in self.running.values())

    def _hire(self, share: WorkerShare, job: _Job) -> None:
        """Start a worker; it is free once it has reported that it can run cells."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options = {
            "num_cpus": share.cpus,
            "num_gpus": share.gpus,
            # Soft: if its node is lost, the worker may start on another one.
            "scheduling_strategy": NodeAffinitySchedulingStrategy(share.node, soft=True),
        }
        kind = self.ray.remote(BenchWorker).options(**options)
        driver = __version__, os.getcwd()
        actor = kind.remote(self.data, self.work, max(1, share.cpus), driver)
        self.actors[actor] = share
        self.running[actor.problem.remote()] = actor, job

    def _submit(self, job: _Job) -> None:
        assert job.cell
        actor = self.free.pop()
        self.running[actor.run.remote(job.cell)] = actor, job

    def _next(self) -> tuple[_Job, CellRecord | None]:
        """Wait until a worker has finished a job; return that job, and the record of a cell."""
        ready, _ = self.ray.wait(list(self.running), num_returns=1, timeout=STARTING)
        if not ready:
            if self._has_cells():
                return _Job(), None
            raise TrainingError(
                f"no worker of the Ray cluster started within {STARTING:.0f} s",
                expected="free CPUs or GPUs",
                hint="ray status shows who has them",
            )
        actor, job = self.running.pop(ready[0])
        try:
            result = self.ray.get(ready[0])
        except Stopped:  # its node is shutting down
            self._replace(actor, job)
            return job, None
        except self.ray.exceptions.RayTaskError:
            raise
        except self.ray.exceptions.RayError:  # it died
            self._replace(actor, job)
            return job, None
        if not job.cell and result:
            raise BackboneError(
                f"a node of the Ray cluster cannot run the study: {result}",
                expected="the same release of adapterhub on every node, and the "
                "files of the backbone: in the same folder, or in the Hub's cache",
            )
        self.free.append(actor)
        return job, result if job.cell else None

    def _replace(self, actor: Any, job: _Job) -> None:
        """Start a replacement for a dead worker; drop workers that never start."""
        share = self.actors.pop(actor)
        self.ray.kill(actor)
        if not job.cell and job.tries >= MOST_TRIES:
            raise TrainingError(
                f"a worker died {job.tries} times when it started",
                expected="memory for a process with torch and the data of the study",
                hint="fewer --workers; Ray's logs, in /tmp/ray/session_latest/logs, have the cause",
            )
        self._hire(share, _Job() if job.cell else _retried(job))


def _retried(job: _Job) -> _Job:
    return replace(job, tries=job.tries + 1)


def _lost(jobs: list[_Job]) -> TrainingError:
    return TrainingError(
        f"the workers of these cells died, {MOST_TRIES} times each",
        offenders=[job.cell.describe() for job in jobs if job.cell],
        expected="memory for as many runs at once as there are workers on a node",
        hint="fewer --workers, or a smaller train.batch_size; all other cells are recorded",
    )
