"""Evaluations are divided where there are several processes; see test_fsdp.py for such runs."""

from __future__ import annotations

import pytest

from adapterhub.loop import processes
from adapterhub.loop.processes import divided_evaluation
from adapterhub.tasks.common.batches import in_step, results


def test_a_single_process_computes_all_batches() -> None:
    with divided_evaluation(sharded=True):
        assert results(range(3), str) == ["0", "1", "2"]
        assert not in_step()


@pytest.mark.parametrize("sharded", [True, False])
def test_a_process_of_several_computes_its_own(sharded, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(processes, "join_processes", lambda: None)
    monkeypatch.setattr(processes, "everyone_s", lambda own: [["other's 0", "other's 2"], own])
    with divided_evaluation(sharded=sharded):
        assert in_step() == sharded
        assert results(range(3), str) == ["other's 0", "1", "other's 2"]
    assert not in_step()
