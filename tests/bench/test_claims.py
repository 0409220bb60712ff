"""Claims: one process at a time has a cell, and none has it for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest

from adapterhub.bench.cells import Shard, next_cells
from adapterhub.bench.conduct import Claims, StudyState, run_study
from adapterhub.bench.study import Study, keep_study
from adapterhub.errors import OutputError
from tests.kit.studies import facts, planned

KEY = "0" * 32


def with_methods(study: Study, *methods: str, rates: int = 2) -> Study:
    return replace(study, bench=replace(study.bench, methods=methods, rates=rates))


def test_a_cell_is_claimed_once_until_it_is_given_back(tmp_path):
    with Claims(tmp_path / "claims") as first, Claims(tmp_path / "claims") as second:
        assert first.take(KEY)
        assert not second.take(KEY)
        assert not first.take(KEY)
        assert second.take("1" * 32)
        first.release(KEY)
        assert second.take(KEY)
    assert not list((tmp_path / "claims").iterdir())


def test_the_claim_of_a_dead_process_is_free_at_once(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    with Claims(tmp_path) as claims:
        claims.take(KEY)
        path = claims.held[KEY]
        path.write_text(json.dumps({**json.loads(path.read_text()), "pid": dead.pid}))
        with Claims(tmp_path) as other, Claims(tmp_path) as third:
            assert other.take(KEY)
            assert not third.take(KEY)
    assert not list(tmp_path.iterdir())


def test_a_silent_claim_of_another_machine_expires_and_a_living_one_does_not(tmp_path):
    path = tmp_path / f"{KEY}.1"
    path.write_text(json.dumps({"place": "elsewhere", "pid": os.getpid()}))
    with Claims(tmp_path, expires=60) as claims:
        assert not claims.take(KEY)
        os.utime(path, (time.time() - 100,) * 2)
        assert claims.take(KEY)
    with Claims(tmp_path, expires=0.4, beat=0.05) as living, Claims(tmp_path, 0.4) as other:
        assert living.take(KEY)
        time.sleep(0.8)
        assert not other.take(KEY)


def test_a_claim_that_is_being_written_is_not_taken(tmp_path):
    (tmp_path / f"{KEY}.1").touch()
    with Claims(tmp_path) as claims:
        assert not claims.take(KEY)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with Claims(tmp_path / "file") as claims, pytest.raises(OutputError, match="cannot be written"):
        claims.take(KEY)


def facts_of(finished: Any, *methods: str) -> list[Any]:
    """Return the facts of the cells of some methods, which one process has run alone."""
    return [facts(r) for r in finished.state.records if r.cell.method in methods]


def test_shards_in_turns_run_every_cell_once(finished, tmp_path):
    methods = ("head", "lora(sites=[nowhere])")
    study, expected = with_methods(finished.study, *methods), facts_of(finished, *methods)
    plan, folder, engine = planned(study, tmp_path / "shards")
    ran: list[tuple[str, int]] = []
    for turn in range(20):
        shard = Shard(turn % 2 + 1, 2)
        state = run_study(
            plan, folder, engine, lambda r, left, s=shard: ran.append((r.key, s.number)), shard
        )
        if not state.next()[0]:
            break
    assert [facts(record) for record in state.records] == expected
    assert len({key for key, _ in ran}) == len(ran) == len(expected)
    assert all(Shard(number, 2).has(key) for key, number in ran)
    assert {number for _, number in ran} == {1, 2}


@pytest.mark.apart
def test_two_processes_at_once_run_every_cell_once(finished, tmp_path):
    """A command, and this process from the moment at which the command claims a cell."""
    study, expected = with_methods(finished.study, "head"), facts_of(finished, "head")
    shared = tmp_path / "study"
    plan, folder, engine = planned(study, tmp_path)
    keep_study(plan.study, shared)
    command = [sys.executable, "-m", "adapterhub", "bench", "--output", str(shared)]
    ran: list[str] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not any((shared / "claims").glob("*")):
            time.sleep(0.002)
        run_study(plan, folder, engine, lambda record, left: ran.append(record.key))
        told = process.communicate(timeout=240)[1]
    assert process.returncode == 0, told
    assert [facts(record) for record in StudyState(plan, folder).records] == expected
    assert len(list(folder.all())) == len(expected)
    lines = [line for line in told.splitlines() if " left)" in line]
    assert len(lines) + len(ran) == len(expected), (told, ran)
    assert ran, "it was over before this process began"
    assert lines, "the command ran nothing"


def test_a_study_waits_for_the_cells_of_a_process_that_then_dies(study, tmp_path, monkeypatch):
    study = with_methods(study, "head", rates=1)
    plan, folder, engine = planned(study, tmp_path)
    claims = folder.folder.with_name("claims")
    other = Claims(claims)
    first = next_cells(plan.groups, 1, 1, lambda cell: None)[0][0]
    assert other.take(plan.key(first))
    ended = run_study(plan, folder, engine, shard=Shard())
    assert first not in [record.cell for record in ended.records]
    assert len(ended.next()[0]) == 1
    looks: list[float] = []

    def dies(seconds: float) -> None:
        looks.append(seconds)
        other.release(plan.key(first))

    monkeypatch.setattr("adapterhub.bench.conduct.time.sleep", dies)
    assert run_study(plan, folder, engine).next()[0] == []
    assert len(looks) == 1
