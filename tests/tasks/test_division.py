"""Batches that processes divide: each is computed once, and all get all results."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from adapterhub.tasks.common.batches import in_step, results
from tests.kit.runs import in_processes


@given(batches=st.integers(0, 9), processes=st.integers(1, 5))
def test_each_batch_is_computed_once_and_all_get_all_results(batches, processes):
    computed, lock = [], threading.Lock()

    def compute(batch):
        with lock:
            computed.append(batch)
        return -batch

    found = in_processes(processes, lambda: results(iter(range(batches)), compute))
    assert found == [[-batch for batch in range(batches)]] * processes
    assert sorted(computed) == [*range(batches)]


@given(batches=st.integers(0, 9), processes=st.integers(1, 5))
def test_in_step_all_compute_as_often(batches, processes):
    """With sharded parameters, each batch is computed with the help of all processes."""

    def compute():
        own = []
        every = results(range(batches), lambda batch: own.append(batch) or batch)
        return len(own), every

    found = in_processes(processes, compute, in_step=True)
    assert found == [(-(-batches // processes), [*range(batches)])] * processes


def test_two_divisions_one_after_the_other_keep_their_results_apart():
    def compute():
        return results(range(3), str), results(range(4), float)

    assert in_processes(2, compute) == [(["0", "1", "2"], [0.0, 1.0, 2.0, 3.0])] * 2


def test_only_processes_that_share_parameters_are_in_step():
    assert not in_step()
    assert in_processes(2, in_step) == [False, False]
    assert in_processes(2, in_step, in_step=True) == [True, True]
    assert not in_step()
