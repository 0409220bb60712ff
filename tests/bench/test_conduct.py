"""A study from its options to its records: each cell once, and nothing selected by what tests."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from adapterhub.bench.cells import Cell, Shard, next_cells
from adapterhub.bench.conduct import Claims, StudyState, run_study
from adapterhub.bench.results import study_results
from adapterhub.bench.study import Study, keep_study
from adapterhub.errors import OutputError
from adapterhub.loop.report import Reporter
from adapterhub.training.run import run
from tests.kit.studies import facts, planned


def test_a_study_runs_every_cell_once_and_tells_of_methods_that_fail(finished):
    plan, folder, state = finished.plan, finished.folder, finished.state
    assert len(list(folder.all())) == len(state.records)
    finals = [record for record in state.records if record.cell.stage == "final"]
    assert {record.cell.method for record in finals} == {"head", "lora(rank=2)"}
    assert all(record.tested and record.trained and record.rows for record in finals)
    assert all(len(r.rows.outcomes()) == len(plan.contexts["train"].data.test)
               for r in finals if r.rows)  # fmt: skip
    failed = [record for record in state.records if record.status == "failed"]
    assert {record.cell.method for record in failed} == {"lora(sites=[nowhere])"}
    assert "nowhere" in failed[0].error
    costs = [record.costs for record in finals]
    assert all(each.train_seconds > 0 and each.peak_memory > 0 for each in costs)
    assert all(each.file_bytes > 0 and each.all_trained > 0 for each in costs)
    searches = [record for record in state.records if record.cell.stage == "search"]
    assert not any(record.tested or record.rows for record in searches), "tests select nothing"
    assert not list(finished.work.iterdir()), "checkpoints are left"


def test_records_of_another_machine_are_taken_as_they_are(finished, tmp_path):
    folder = finished.folder
    other, merged, _ = planned(finished.study, tmp_path / "other")
    for record in folder.all():
        merged.write(record)

    refusing = SimpleNamespace(run=lambda cells: pytest.fail(f"{cells} are run again"))
    state = run_study(other, merged, refusing)
    assert len(state.records) == len(list(folder.all()))
    assert StudyState(other, merged).records == state.records


def test_records_of_other_programs_are_those_of_the_study_and_change_no_key(study, tmp_path):
    bench = replace(study.bench, methods=("head",), rates=1, seeds=1)
    plan, folder, engine = planned(replace(study, bench=bench), tmp_path)
    (own,) = run_study(plan, folder, engine).records
    cell = replace(own.cell, method="theirs")
    other = replace(own, key="0" * 32, cell=cell)
    folder.write(other)
    assert StudyState(plan, folder).records == (own,), "nobody named it"
    named, _, _ = planned(replace(study, bench=replace(bench, recorded=("theirs",))), tmp_path)
    assert [group.method for group in named.groups] == ["head"]
    assert named.key(own.cell) == own.key
    assert StudyState(named, folder).records == (own, other)


def test_a_method_may_start_from_a_trained_adapter(study, tmp_path):
    recipe = replace(
        study.recipe,
        method="lora(rank=2)",
        output=str(tmp_path / "first"),
        train=replace(study.recipe.train, max_steps=4, report=False, tensorboard=False),
    )
    first = run(recipe, Reporter()).folder
    label = f"from {first}"
    methods = ("lora(rank=2)", label)
    bench = replace(study.bench, methods=methods, baseline=None, rates=1, seeds=1)
    plan, folder, engine = planned(replace(study, bench=bench), tmp_path)
    cells = [Cell("train", method, 90, 4, 1e-3, 1, "final") for method in methods]
    keys = [plan.key(cell) for cell in cells]
    assert keys[0] != keys[1]
    state = run_study(plan, folder, engine)
    assert [record.status for record in state.records] == ["done", "done"]
    assert state.records[0].costs.trained == state.records[1].costs.trained
    results = study_results(plan.study, state.records, {})
    assert [each.method for each in results[0].methods] == list(methods)
    other = run(replace(recipe, output=str(tmp_path / "second"), seed=9), Reporter()).folder
    again = (methods[0], f"from {other}")
    plan = planned(replace(study, bench=replace(bench, methods=again)), tmp_path / "b")[0]
    assert plan.key(cells[0]) == keys[0]
    assert plan.key(replace(cells[1], method=again[1])) != keys[1]


# Claims: one process at a time has a cell, and none has it for ever.


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
    (tmp_path / f"{KEY}.1").touch()
    with Claims(tmp_path) as claims:
        assert not claims.take(KEY), "it is being written"
    with Claims(tmp_path / f"{KEY}.1") as claims, pytest.raises(OutputError, match="be written"):
        claims.take(KEY)


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


def facts_of(finished: Any, *methods: str) -> list[Any]:
    """Return the facts of the cells of some methods, which one process has run alone."""
    return [facts(r) for r in finished.state.records if r.cell.method in methods]


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
