"""Steps that fit into a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from studies import planned

from adapterhub.bench import budget
from adapterhub.bench.budget import StepTime, _step_time
from adapterhub.bench.execute import TaskContext
from adapterhub.bench.study import Study
from adapterhub.bench.study_folder import as_begun, keep_study
from adapterhub.training.stop_signals import Stopped


def test_a_budget_becomes_steps(study: Study, tmp_path: Path) -> None:
    bench = replace(study.bench, steps=None, methods=("head", "lora"), budget="1000h")
    generous = planned(replace(study, bench=bench), tmp_path)[0]
    assert {group.steps for group in generous.groups} == {generous.study.bench.steps}
    assert generous.study.bench.steps is not None
    tight = planned(replace(study, bench=replace(bench, budget="1s")), tmp_path / "b")[0]
    assert {group.steps for group in tight.groups} == {20}
    assert any("allows fewer" in note for note in tight.notes)
    assert tight.study.bench.steps == 20


def test_methods_that_all_fail_have_a_plan(study: Study, tmp_path: Path) -> None:
    bench = replace(study.bench, steps=None, budget="1m", methods=("lora(sites=[nowhere])",))
    bench = replace(bench, baseline=None)
    plan, _, _ = planned(replace(study, bench=bench), tmp_path)
    assert plan.study.bench.steps is not None
    assert plan.groups


def test_a_signal_while_steps_are_measured_stops_the_study(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped run is an error like those of methods that fail, which take no time."""

    def stopped(*_: object, **__: object) -> None:
        raise Stopped("stopped by a signal after step 2 of 6; the state is saved")

    monkeypatch.setattr(budget, "run", stopped)
    bench = replace(study.bench, steps=None, budget="1m")
    with pytest.raises(Stopped, match="while the steps of head were measured") as error:
        planned(replace(study, bench=bench), tmp_path)
    assert error.value.hint == "run the same command again"


def test_the_time_of_a_step_is_that_of_its_whole_batch(study: Study, tmp_path: Path) -> None:
    """The batch size that is left open follows from the rows: 16 here."""
    plan, _, engine = planned(study, tmp_path)
    context, group = plan.contexts["train"], plan.groups[0]
    assert context.recipe.train.batch_size is None
    accumulated = replace(context.recipe.train, gradient_accumulation=8)
    other = replace(context, recipe=replace(context.recipe, train=accumulated))

    def fastest(each: TaskContext) -> float:  # of three: other processes may be running
        return min(_step_time(group, each, engine.loader, tmp_path).step for _ in range(3))

    assert fastest(other) > 2 * fastest(context)


def test_slow_evaluations_leave_fewer_rows_to_select(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "FEWEST_SELECTING", 3)
    monkeypatch.setattr(budget, "_step_time", lambda *_: StepTime(0.001, 1.0))
    bench = replace(study.bench, steps=None, methods=("head", "lora"), time=False)
    plan = planned(replace(study, bench=replace(bench, budget="2m")), tmp_path)[0]
    selecting = len(plan.contexts["train"].data.run.evaluation)
    unlimited = planned(replace(study, bench=bench), tmp_path / "all")[0]
    every = len(unlimited.contexts["train"].data.run.evaluation)
    assert 3 <= selecting < every
    assert plan.study.bench.select_rows == selecting
    assert f"{selecting} rows select, of {every}" in " ".join(plan.notes)
    again = as_begun(replace(study, bench=replace(bench, budget="2m")), tmp_path / "study")
    assert again.bench.select_rows == bench.select_rows  # nothing was begun there
    keep_study(plan.study, tmp_path / "study")
    begun = as_begun(replace(plan.study, bench=replace(bench, budget="2m")), tmp_path / "study")
    assert begun.bench.select_rows == selecting


def test_a_study_with_time_selects_by_all_rows(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "FEWEST_SELECTING", 3)
    monkeypatch.setattr(budget, "_step_time", lambda *_: StepTime(0.001, 0.01))
    bench = replace(study.bench, steps=None, methods=("head", "lora"), budget="1h")
    plan = planned(replace(study, bench=bench), tmp_path)[0]
    assert plan.study.bench.select_rows >= len(plan.contexts["train"].data.run.evaluation)
