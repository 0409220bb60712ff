"""Evaluation by the processes of a run: each computes some of the batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from adapterhub.loop.processes import (
    everyone_s,
    join_processes,
    process_count,
    process_index,
)
from adapterhub.tasks._division import Division, dividing


@contextmanager
def divided_evaluation(*, sharded: bool = False, together: bool = False) -> Iterator[None]:
    """Divide the batches inside over the processes of the run; all get the same results.

    With `sharded`, each process holds a share of the parameters. Processes that compute each batch
    `together` (tensor parallelism) divide nothing.
    """
    if process_count() == 1 or together:
        yield
        return
    join_processes()
    with dividing(Division(process_index(), process_count(), everyone_s, in_step=sharded)):
        yield
