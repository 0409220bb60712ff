"""Steps that fit into a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from studies import planned

from adapterhub.bench.budget import _step_time
from adapterhub.bench.study import Study


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


def test_the_time_of_a_step_is_that_of_its_whole_batch(study: Study, tmp_path: Path) -> None:
    """The batch size that is left open follows from the rows: 16 here."""
    plan, _, engine = planned(study, tmp_path)
    context, group = plan.contexts["train"], plan.groups[0]
    assert context.recipe.train.batch_size is None
    accumulated = replace(context.recipe.train, gradient_accumulation=8)
    other = replace(context, recipe=replace(context.recipe, train=accumulated))
    times = [_step_time(group, each, engine.loader, tmp_path).step for each in (context, other)]
    assert times[1] > 2 * times[0]
