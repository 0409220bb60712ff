"""What a study plans to run, and the steps that fit into a time."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adapterhub.bench import plan as planning
from adapterhub.bench.cells import LEAST_STEPS, Cell, Group, next_cells, runs_left
from adapterhub.bench.execute import EVALUATIONS, TaskContext, TaskData
from adapterhub.bench.plan import StepTime, _step_time, affordable
from adapterhub.bench.study import BenchOptions, as_begun, keep_study
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError
from adapterhub.loop.processes import Stopped
from adapterhub.tasks import parse_task
from adapterhub.training.loading import KernelChoice, SharedLoader
from adapterhub.training.run_data import RunData
from tests.kit.studies import planned


def test_a_budget_becomes_steps(study, tmp_path):
    bench = replace(study.bench, steps=None, methods=("head", "lora"), budget="1000h")
    generous = planned(replace(study, bench=bench), tmp_path)[0]
    assert {group.steps for group in generous.groups} == {generous.study.bench.steps}
    assert generous.study.bench.steps is not None
    with pytest.raises(ConfigError, match="the shortest runs of this study"):
        planned(replace(study, bench=replace(bench, budget="1s")), tmp_path / "b")


TIMES = StepTime(0.3, 0.2, 0.5)
ROWS = RunData(parse_task("classification"), (), [0] * 1000, [0] * 100, DataOptions())
CONTEXTS: Any = {"mine": SimpleNamespace(data=TaskData(ROWS, [0] * 100, ()))}


def took(groups: list[Group], bench: BenchOptions, steps: int, best: float) -> float:
    """Return the time of a study as its search makes it; each final run has six evaluations."""
    own, done = [replace(group, steps=steps) for group in groups], dict[Cell, float]()
    counts = bench.rates, bench.seeds, done.get, bench.tuning_seeds
    left = runs_left(own, *counts)
    while cells := next_cells(own, *counts)[0]:
        for cell in cells:
            done[cell] = -abs(math.log10(cell.rate / best))
            now = runs_left(own, *counts)
            assert left - 1 <= now <= left, "a rate beyond the edge adds one"
            left = now
    assert left == 0
    evaluations = len(done) * EVALUATIONS + len(groups) * bench.seeds * 6
    return sum(0.3 * cell.steps + 0.5 for cell in done) + 0.2 * evaluations


@pytest.mark.parametrize("best", [1e-3, 1.0])
@pytest.mark.parametrize(
    ("methods", "rates", "seeds", "tuning"),
    [(6, 5, 3, 2), (2, 5, 3, 2), (3, 2, 2, 1), (2, 1, 2, 1)],
)
def test_a_budget_is_kept_within_a_quarter_or_refused(
    monkeypatch, methods, rates, seeds, tuning, best
):
    """What is refused would take more, and what is proposed in its place fits."""
    monkeypatch.setattr(planning, "_step_time", lambda *_: TIMES)
    names = [f"lora(rank={n})" for n in range(1, methods + 1)]
    groups = [Group("mine", name, 1000, 270, 1e-3) for name in names]
    bench = BenchOptions(tuple(names), rates=rates, seeds=seeds, tuning_seeds=tuning)
    kept = set()
    for minutes in (1, 2, 4, 8, 15, 30, 60, 600):
        seconds = 60.0 * minutes
        try:
            own = replace(bench, budget=f"{minutes}m")
            found, _ = affordable(groups, CONTEXTS, own, SharedLoader(), Path())
        except ConfigError as error:
            hint = str(error.hint)
        else:
            kept.add(found.steps)
            assert took(groups, bench, found.steps, best) <= 1.25 * seconds
            assert found.steps == 270 or took(groups, bench, found.steps + 60, 1.0) > seconds
            continue
        assert took(groups, bench, LEAST_STEPS, 1.0) > seconds
        if fewer := re.search(r"--rates (\d+) --seeds (\d+)", hint):
            smaller = replace(bench, rates=int(fewer[1]), seeds=int(fewer[2]))
            assert took(groups, smaller, LEAST_STEPS, best) <= 1.25 * seconds
        if named := re.search("--methods '(.*)'", hint):
            few = [group for group in groups if group.method in named[1]]
            assert 2 <= len(few) < len(groups)
            assert took(few, bench, LEAST_STEPS, best) <= 1.25 * seconds
    assert 270 in kept


def test_methods_that_all_fail_have_a_plan(study, tmp_path):
    bench = replace(study.bench, steps=None, budget="1m", methods=("lora(sites=[nowhere])",))
    bench = replace(bench, baseline=None)
    plan, _, _ = planned(replace(study, bench=bench), tmp_path)
    assert plan.study.bench.steps is not None
    assert plan.groups


def test_a_signal_while_steps_are_measured_stops_the_study(study, tmp_path, monkeypatch):
    """A stopped run is an error like those of methods that fail, which take no time."""

    def stopped(*_: object, **__: object) -> None:
        raise Stopped("stopped by a signal after step 2 of 6; the state is saved")

    monkeypatch.setattr(planning, "run", stopped)
    bench = replace(study.bench, steps=None, budget="1m")
    with pytest.raises(Stopped, match="while the steps of head were measured") as error:
        planned(replace(study, bench=bench), tmp_path)
    assert error.value.hint == "run the same command again"


def test_the_time_of_a_step_is_that_of_its_whole_batch(study, tmp_path):
    """The batch size that is left open follows from the rows: 16 here."""
    plan, _, engine = planned(study, tmp_path)
    context, group = plan.contexts["train"], plan.groups[0]
    assert context.recipe.train.batch_size is None
    accumulated = replace(context.recipe.train, gradient_accumulation=8)
    other = replace(context, recipe=replace(context.recipe, train=accumulated))

    def fastest(each: TaskContext) -> float:  # of three: other processes may be running
        return min(_step_time(group, each, engine.loader, tmp_path).step for _ in range(3))

    assert fastest(other) > 1.5 * fastest(context)


def test_slow_evaluations_leave_fewer_rows_to_select(study, tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "FEWEST_SELECTING", 3)
    monkeypatch.setattr(planning, "_step_time", lambda *_: StepTime(0.001, 1.0))
    bench = replace(study.bench, steps=None, methods=("head", "lora"))
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
    monkeypatch.setattr(planning, "_step_time", lambda *_: StepTime(0.001, 0.01))
    plan = planned(replace(study, bench=replace(bench, budget="1h")), tmp_path / "long")[0]
    assert plan.study.bench.select_rows >= every


def test_the_kernels_of_the_first_time_are_kept(study, tmp_path, monkeypatch):
    study = replace(study, recipe=replace(study.recipe, dtype=None))
    first = KernelChoice("bf16", "eager", "measured")
    monkeypatch.setattr(planning, "choose_kernels", lambda *rest: first)
    plan, _, _ = planned(study, tmp_path)
    assert (plan.study.recipe.dtype, plan.study.recipe.attention) == ("bf16", "eager")
    monkeypatch.setattr(planning, "choose_kernels", lambda *rest: KernelChoice("fp32", None))
    again, _, _ = planned(plan.study, tmp_path)
    assert again.study.to_yaml() == plan.study.to_yaml()
    assert again.contexts["train"].recipe == plan.contexts["train"].recipe
