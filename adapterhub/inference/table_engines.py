"""Where the parts of a job on Parquet files are predicted: in this process, or on a Ray cluster.

The workers of a cluster read their rows and load their adapters themselves; the predictions come
back to the process that started the job, which alone writes. A worker that dies is started again,
and its part is predicted again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from adapterhub._version import __version__
from adapterhub.errors import AdapterhubError, TrainingError
from adapterhub.inference.table_job import TableJob, TablePart, TableWorker
from adapterhub.ray_cluster import connect_ray, import_ray, share_out
from adapterhub.status import doing

RESTARTS = 3  # of a worker


def predict_here(job: TableJob, parts: Iterable[TablePart]) -> Iterator[tuple[TablePart, Any]]:
    """Yield each part with its rows and predictions, in order."""
    worker = TableWorker(job)
    for part in parts:
        yield part, worker.predict(part)


def predict_on_ray(
    job: TableJob,
    parts: Iterable[TablePart],
    workers: int | None = None,
    address: str | None = None,
) -> Iterator[tuple[TablePart, Any]]:
    """Yield each part with its rows and predictions, as the workers of a cluster end them.

    By default there is a worker for each GPU, or for every 4 CPUs of a node. `address` is HOST:PORT
    of a running cluster; None: as Ray finds it, or this machine.

    Raises:
        ConfigError: Ray is not installed, or the cluster cannot be reached.
        TrainingError: workers died too often.
    """
    ray = import_ray()
    started = not ray.is_initialized()
    try:
        if started:
            with doing("starting Ray"):
                connect_ray(ray, address)
        yield from _collected(ray, job, list(parts), workers)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, AdapterhubError):
            raise error.cause from None
        raise
    except ray.exceptions.RayActorError as error:
        if isinstance(cause := getattr(error, "cause", None), AdapterhubError):
            raise cause from None
        raise TrainingError(
            f"a worker of the Ray cluster died more than {RESTARTS} times, or could not start",
            offenders=[_reason(error)],
            expected="memory for a process with torch and the adapters of the job",
            hint="fewer --workers; the same command goes on with the parts that are missing",
        ) from error
    finally:
        if started:
            ray.shutdown()


def _collected(
    ray: Any, job: TableJob, parts: list[TablePart], workers: int | None
) -> Iterator[tuple[TablePart, Any]]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actors = []
    shared = ray.put(job)
    for share in share_out(ray.nodes(), workers)[: len(parts)]:
        kind = ray.remote(TableWorker).options(
            num_cpus=share.cpus,
            num_gpus=share.gpus,
            max_restarts=RESTARTS,
            max_task_retries=RESTARTS,
            # Soft: the worker of a node that is lost may start on another one.
            scheduling_strategy=NodeAffinitySchedulingStrategy(share.node, soft=True),
        )
        actors.append(kind.remote(shared, max(1, share.cpus), (__version__, os.getcwd())))
    waiting, running = list(reversed(parts)), {}
    try:
        for actor in actors:
            part = waiting.pop()
            running[actor.predict.remote(part)] = actor, part
        while running:
            ready, _ = ray.wait(list(running), num_returns=1)
            actor, part = running.pop(ready[0])
            rows = ray.get(ready[0])
            if waiting:
                following = waiting.pop()
                running[actor.predict.remote(following)] = actor, following
            yield part, rows
    finally:
        for actor in actors:
            ray.kill(actor)


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
