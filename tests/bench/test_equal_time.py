"""Methods with as many steps as take the time of the baseline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from studies import planned

from adapterhub.bench import plan as planning
from adapterhub.bench.cells import Group
from adapterhub.bench.equal_time import equal_time_steps, steps_within
from adapterhub.bench.search import final_cell
from adapterhub.bench.study import EqualSteps, Study, read_study
from adapterhub.bench.study_folder import STUDY, as_begun, keep_study
from adapterhub.bench.timings import MethodTiming
from adapterhub.errors import ConfigError

SECONDS = {"lora(rank=2)": 1.0, "head": 0.5, "bitfit": 0.95, "full": 4.0}


def timing(method: str, rows: int = 100, replayed: float | None = None) -> MethodTiming:
    return MethodTiming(method, rows, 10, SECONDS[method], 50.0, replayed)


def group(method: str, steps: int = 40, rows: int = 100) -> Group:
    return Group("mine", method, rows, steps, 1e-3)


def test_steps_take_the_time_of_the_baseline() -> None:
    timings = [timing(name) for name in SECONDS]
    groups = [group(name) for name in SECONDS]
    chosen, notes = equal_time_steps(groups, timings, "lora(rank=2)")
    assert [(each.method, each.steps) for each in chosen] == [
        ("lora(rank=2)", 40), ("head", 80), ("full", 10),
    ]  # fmt: skip
    assert chosen[1].label == "head for 80 steps"
    assert notes[0] == "mine: 40 steps of lora(rank=2) take 40 s"
    assert len(notes) == 3, "bitfit is within a tenth"


def test_methods_that_fail_and_other_rows_are_left_out() -> None:
    groups = [group("lora(rank=2)"), group("head"), group("head", 20, 50)]
    chosen, _ = equal_time_steps(groups, [timing("lora(rank=2)"), timing("head", 50)],
                                 "lora(rank=2)")  # fmt: skip
    assert [each.method for each in chosen] == ["lora(rank=2)"]
    chosen, notes = equal_time_steps(groups, [timing("head")], "lora(rank=2)")
    assert chosen == []
    assert "lora(rank=2) fails" in notes[0]


def test_replayed_steps_are_many_and_limited() -> None:
    replayed = timing("head", replayed=0.01)
    assert steps_within(replayed, 4.0) == 8, "less than an epoch: nothing is replayed"
    assert steps_within(replayed, 6.0) == 110
    groups = [group("lora(rank=2)"), group("head")]
    chosen, notes = equal_time_steps(groups, [timing("lora(rank=2)"), replayed], "lora(rank=2)")
    assert chosen[1].steps == 400
    assert "its time would allow 3,510" in notes[1]


@given(st.floats(0.01, 10), st.floats(0.001, 1) | st.none(), st.integers(10, 5000))
def test_it_is_the_inverse_of_the_time(step: float, share: float | None, steps: int) -> None:
    replayed = None if share is None else step * share
    found = MethodTiming("a", 1, 10, step, 1.0, replayed)
    assert steps_within(found, found.training(steps)) == pytest.approx(steps, rel=0.01, abs=1)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []

    def time_groups(context: object, groups: list[Group], *rest: object) -> list[MethodTiming]:
        calls.append(len(groups))
        seconds = {"head": 0.5 / len(calls), "lora(rank=2)": 1.0}
        return [MethodTiming(g.method, g.rows, 100, seconds[g.method], 50.0) for g in groups]

    monkeypatch.setattr(planning, "time_groups", time_groups)
    return calls


def test_a_study_has_both_and_measures_once(
    study: Study, tmp_path: Path, planted: list[int]
) -> None:
    methods = ("head", "lora(rank=2)")
    given = replace(study, bench=replace(study.bench, methods=methods, baseline="lora(rank=2)",
                                         equal_time=True))  # fmt: skip
    plan, _, _ = planned(given, tmp_path)
    assert [(g.method, g.steps) for g in plan.groups] == [
        ("head", 6), ("lora(rank=2)", 6), ("head for 12 steps", 12),
    ]  # fmt: skip
    assert plan.study.labels()["head for 12 steps"] == "head"
    cell = final_cell(plan.groups[2], 1e-3, 1)
    assert plan.key(cell) == plan.key(replace(cell, method="head")), "a name decides no result"
    keep_study(plan.study, tmp_path / "study")
    kept = read_study(tmp_path / "study" / STUDY)
    for again in (kept, as_begun(given, tmp_path / "study")):
        assert planned(again, tmp_path)[0].groups == plan.groups
        keep_study(planned(again, tmp_path)[0].study, tmp_path / "study")
    assert planted == [2], "the steps are chosen once"


def test_another_study_is_not_taken_for_the_one_that_was_begun(
    study: Study, tmp_path: Path
) -> None:
    keep_study(study, tmp_path)
    other = replace(study, bench=replace(study.bench, seeds=7))
    assert as_begun(other, tmp_path) is other
    assert as_begun(other, tmp_path / "new") is other


def test_a_budget_that_was_planned_is_kept(study: Study, tmp_path: Path) -> None:
    given = replace(study, bench=replace(study.bench, steps=None, budget="1h"))
    begun = replace(given, bench=replace(given.bench, steps=33))
    keep_study(begun, tmp_path)
    assert as_begun(given, tmp_path).bench.steps == 33


@pytest.mark.parametrize("broken", ["head", {"task": "a"}, {**vars(EqualSteps("a", 1, "x", 1))}])
def test_broken_steps_are_named(study: Study, broken: object) -> None:
    with pytest.raises(ConfigError, match="equal_steps"):
        replace(study, bench=replace(study.bench, equal_steps=(broken,))).labels()


def test_compiled_layers_are_refused(study: Study, tmp_path: Path) -> None:
    recipe = replace(study.recipe, train=replace(study.recipe.train, compile=True))
    bench = replace(study.bench, methods=("head",), equal_time=True)
    with pytest.raises(ConfigError, match=r"train\.compile"):
        planned(replace(study, recipe=recipe, bench=bench), tmp_path)
