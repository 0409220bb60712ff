"""A study from its options to its records: nothing twice, nothing selected by what tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from adapterhub.bench.cells import Cell
from adapterhub.bench.conduct import StudyState, run_study
from adapterhub.bench.records import CellRecord
from adapterhub.bench.results import study_results
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


def test_a_killed_study_continues_and_repeats_no_cell(finished, tmp_path):
    methods = ("head", "lora(sites=[nowhere])")
    study = replace(finished.study, bench=replace(finished.study.bench, methods=methods))
    whole = [facts(each) for each in finished.state.records if each.cell.method in methods]
    plan, folder, engine = planned(study, tmp_path / "again")

    class Killed(Exception):
        pass

    def kill(record: CellRecord, left: int) -> None:
        if len(list(folder.all())) == 4:
            raise Killed

    with pytest.raises(Killed):
        run_study(plan, folder, engine, kill)
    before = {record.key for record in folder.all()}
    new: list[str] = []
    plan, folder, engine = planned(study, tmp_path / "again")
    state = run_study(plan, folder, engine, lambda record, left: new.append(record.key))
    assert [facts(record) for record in state.records] == whole
    assert not before & set(new)
    assert len(before) + len(new) == len(whole)


def test_records_of_another_machine_are_taken_as_they_are(finished, tmp_path):
    folder = finished.folder
    other, merged, _ = planned(finished.study, tmp_path / "other")
    for record in folder.all():
        merged.write(record)

    class Refusing:
        def run(self, cells: Sequence[Cell]) -> Iterator[CellRecord]:
            raise AssertionError(cells)

    state = run_study(other, merged, Refusing())
    assert len(state.records) == len(list(folder.all()))
    assert StudyState(other, merged).records == state.records


def test_numbers_of_rows_are_compared_by_the_metric_that_selects(study, tmp_path):
    recipe = replace(study.recipe, train=replace(study.recipe.train, best_metric="matthews"))
    bench = replace(study.bench, rows=(20, 10_000), methods=("head",), rates=1, seeds=1)
    plan, folder, engine = planned(replace(study, recipe=recipe, bench=bench), tmp_path)
    assert [group.rows for group in plan.groups] == [20, 104]
    state = run_study(plan, folder, engine)
    assert {record.cell.rows for record in state.records} == {20, 104}
    assert {record.metric for record in state.records} == {"matthews"}
    assert all("matthews" in r.selected.keys() & r.tested.keys() for r in state.records)


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
