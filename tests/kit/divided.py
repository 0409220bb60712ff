"""Threads in place of the processes that divide batches."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from adapterhub.tasks.common.batches import Division, dividing


def in_processes(count, compute, *, in_step=False):
    """Return what `compute` returns in each of several threads, which divide batches."""
    given, all_here = [None] * count, threading.Barrier(count, timeout=60)

    def gather(index, value):
        given[index] = value
        all_here.wait()
        every = list(given)
        all_here.wait()  # nobody gives something new before all have read
        return every

    def of(index):
        division = Division(index, count, lambda value: gather(index, value), in_step)
        with dividing(division):
            return compute()

    with ThreadPoolExecutor(count) as threads:
        return [*threads.map(of, range(count))]
