"""What a study plans, the steps that fit into a time, and from a cell to its record."""

import hashlib
import json
import math
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adapterhub.bench import execute
from adapterhub.bench import plan as planning
from adapterhub.bench.cells import LEAST_STEPS, Cell, Group, next_cells, runs_left
from adapterhub.bench.execute import EVALUATIONS, TaskData, read_task_data, run_cell
from adapterhub.bench.plan import StepTime, affordable
from adapterhub.bench.study import BenchOptions, as_begun, keep_study
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError
from adapterhub.loop.processes import Stopped
from adapterhub.recipe.recipe import Recipe, read_draft
from adapterhub.tasks import parse_task
from adapterhub.training.loading import KernelChoice, SharedLoader
from adapterhub.training.run_data import RunData
from tests.kit.data import sentences, write_tsv
from tests.kit.studies import facts, planned


def test_a_budget_becomes_steps(study, tmp_path):
    bench = replace(study.bench, steps=None, methods=("head", "lora"), budget="1000h")
    generous = planned(replace(study, bench=bench), tmp_path)[0]
    assert {group.steps for group in generous.groups} == {generous.study.bench.steps}
    assert generous.study.bench.steps is not None
    with pytest.raises(ConfigError, match="the shortest runs of this study"):
        planned(replace(study, bench=replace(bench, budget="1s")), tmp_path / "b")
    failing = replace(bench, budget="1m", methods=("lora(sites=[nowhere])",), baseline=None)
    plan = planned(replace(study, bench=failing), tmp_path / "c")[0]
    assert plan.study.bench.steps is not None, "though all methods fail"
    assert plan.groups


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


def test_a_signal_while_steps_are_measured_stops_the_study(study, tmp_path, monkeypatch):
    """A stopped run is an error like those of methods that fail, which take no time."""

    def stopped(*_: object, **__: object) -> None:
        raise Stopped("stopped by a signal after step 2 of 6; the state is saved")

    monkeypatch.setattr(planning, "run", stopped)
    bench = replace(study.bench, steps=None, budget="1m")
    with pytest.raises(Stopped, match="while the steps of head were measured") as error:
        planned(replace(study, bench=bench), tmp_path)
    assert error.value.hint == "run the same command again"


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


# Cells, and the rows of a study.


def test_a_cell_that_was_stopped_continues_from_its_checkpoint(study, tmp_path, monkeypatch):
    plan, _, engine = planned(study, tmp_path)
    context = plan.contexts["train"]
    cell = Cell("train", "head", 90, 8, 1e-3, 1, "final")
    whole = run_cell(cell, context, SharedLoader(), tmp_path / "whole")
    evaluate, calls = type(context.data.run.task).evaluate, []

    def stopping(self: object, *rest: object, **options: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(type(context.data.run.task), "evaluate", stopping)
    work = tmp_path / "work"
    with pytest.raises(Stopped, match="train: head, rate") as error:
        run_cell(cell, context, engine.loader, work)
    assert "the same command again" in str(error.value)
    assert "--resume" not in str(error.value)
    assert (work / context.key(cell)).is_dir()
    parts = run_cell(cell, context, engine.loader, work)
    assert facts(parts) == facts(whole)


def test_a_cell_that_was_killed_before_its_first_step_begins_anew(study, tmp_path):
    """Its folder is there, without the recipe that a run is continued by."""
    plan, _, engine = planned(study, tmp_path)
    context = plan.contexts["train"]
    cell = Cell("train", "head", 90, 4, 1e-3, 1, "search")
    folder = tmp_path / "work" / context.key(cell)
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("{", encoding="utf-8")
    record = run_cell(cell, context, engine.loader, tmp_path / "work")
    assert (record.status, record.error) == ("done", "")
    assert not folder.exists()


def test_a_new_option_that_changes_nothing_leaves_the_digest(study, tmp_path, monkeypatch):
    context = planned(study, tmp_path)[0].contexts["train"]
    cell = Cell("train", "head", 90, 8, 1e-3, 1, "final")
    key, to_dict = context.key(cell), execute.to_dict

    def with_more(obj: object) -> dict[str, object]:
        found = to_dict(obj)
        return {**found, "new": None, "train": {**found["train"], "newer": False, "newest": []}}

    monkeypatch.setattr(execute, "to_dict", with_more)
    assert context.key(cell) == key
    changed = replace(context.recipe, train=replace(context.recipe.train, weight_decay=0.5))
    assert replace(context, recipe=changed).key(cell) != key


def test_what_decides_a_cell_is_what_decided_it_in_earlier_versions():
    """New options have neutral values: records that were committed keep their keys."""
    data = DataOptions(train="t", text="x", label="y")
    context = execute.TaskContext(Recipe(backbone="a", output="o", data=data), None, {}, "")
    text = json.dumps(context._deciding(), sort_keys=True)
    found = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert found == "51aba3c2ac3a0e85", (
        "a new option with another default than null, false or none at all?"
    )


@pytest.fixture
def recipe(tmp_path):
    rows = [(f"{text} {n}", label) for n, (text, label) in enumerate(sentences(200))]
    source = write_tsv(tmp_path / "train.tsv", rows)
    return read_draft(None, (), {"data": {"train": str(source)}})


def test_three_parts_of_one_file_do_not_overlap(recipe):
    data = read_task_data(recipe, None, 1_000)
    parts = [data.run.train, data.run.evaluation, data.test]
    texts = {example.text for part in parts for example in part}
    assert sum(map(len, parts)) == len(texts) == 200
    assert len(data.test) == pytest.approx(execute.TEST_SHARE * 180, abs=1)
    assert "144 rows train, 20 select, 36 test" in data.notes
    assert len(set(data.digests.values())) == 3
    assert read_task_data(replace(recipe, seed=7), None, 1_000).digests == data.digests
    shares = [sum(each.label == "pos" for each in part) / len(part)
              for part in (data.run.train, data.test)]  # fmt: skip
    assert shares[0] == pytest.approx(shares[1], abs=0.03)


def test_given_test_data_are_used_whole_and_what_is_trained_as_well_is_told(recipe, tmp_path):
    train = (tmp_path / "train.tsv").read_text().splitlines()
    (tmp_path / "test.tsv").write_text("\n".join([train[0], *train[1:31]]) + "\n")
    data = read_task_data(recipe, str(tmp_path / "test.tsv"), 10)
    assert len(data.test) == 30
    assert len(data.run.evaluation) == 10
    assert any("test rows" in note and "also training rows" in note for note in data.notes)


def test_a_run_has_its_own_draw_of_rows(recipe):
    data = read_task_data(recipe, None, 1_000)
    one, same, other = data.of(20, 1), data.of(20, 1), data.of(20, 2)
    assert one.train == same.train != other.train
    assert len(one.train) == 20
    assert one.evaluation == data.run.evaluation
    assert data.of(10_000, 1).train == data.run.train


def test_no_evaluation_and_test_rows_of_a_run_are_refused(recipe):
    without = replace(recipe, data=replace(recipe.data, eval="none"))
    with pytest.raises(ConfigError, match="selects"):
        read_task_data(without, None, 1_000)
    with pytest.raises(ConfigError, match=r"data\.test=0\.1 in a study"):
        read_task_data(replace(recipe, data=replace(recipe.data, test=0.1)), None, 10)


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
