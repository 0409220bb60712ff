"""Methods timed in turns, in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from studies import planned

from adapterhub.bench import in_turns
from adapterhub.bench.execute import TaskContext
from adapterhub.bench.in_turns import can_be_timed, seconds_in_turns, time_groups, time_tasks
from adapterhub.bench.study import Study
from adapterhub.bench.timings import TimingFolder


def test_methods_are_timed_once_and_those_that_fail_have_no_times(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = replace(study.bench, methods=("head", "lora(rank=2)", "full", "lora(sites=[nowhere])"))
    plan, _, engine = planned(replace(study, bench=bench), tmp_path)
    place = (plan.contexts, plan.groups, tmp_path / "timings", engine.loader, tmp_path / "work")
    time_tasks(*place)
    (found,) = TimingFolder(tmp_path / "timings").all()
    assert [each.method for each in found.methods] == ["head", "lora(rank=2)", "full"]
    head, lora, full = found.methods
    assert head.replayed is not None, "its frozen layers are computed once"
    assert lora.replayed is full.replayed is None
    assert all(0 < each.step < 10 and each.tokens > 0 for each in found.methods)
    assert all(each.attached and each.load_seconds for each in found.methods)
    assert (bool(lora.routed), full.routed) == (True, None)
    assert head.per_epoch == -(-104 // 16)
    assert not [*(tmp_path / "work").iterdir()], "adapters or claims are left"
    assert found.origin["device"].startswith(("cpu", "cuda"))
    monkeypatch.setattr(in_turns, "time_groups", lambda *rest: pytest.fail("timed again"))
    time_tasks(*place)


def test_memory_grows_with_what_trains(study: Study, tmp_path: Path) -> None:
    """Of a backbone of some size: the optimizer of all its weights takes three times as much."""
    bench = replace(study.bench, methods=("head", "full"), baseline=None)
    plan, _, engine = planned(replace(study, bench=bench), tmp_path)
    head, full = time_groups(plan.contexts["train"], plan.groups, engine.loader, tmp_path / "work")
    if head.added_memory is None or full.added_memory is None:
        pytest.skip("the system does not tell")
    assert full.added_memory > head.added_memory


def test_numbers_of_rows_with_equal_batches_are_timed_once(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = replace(study.bench, methods=("head",), rows=(40, 80))
    plan, _, engine = planned(replace(study, bench=bench), tmp_path)
    turns, turn = [], in_turns._Timer.turn

    def counted(self: in_turns._Timer, *, is_last: bool) -> None:
        turns.append(self.group.rows)
        turn(self, is_last=is_last)

    monkeypatch.setattr(in_turns._Timer, "turn", counted)
    context = plan.contexts["train"]
    found = time_groups(context, plan.groups, engine.loader, tmp_path / "work")
    assert turns == [80] * in_turns.ROUNDS
    assert [(each.rows, each.per_epoch) for each in found] == [(40, 3), (80, 5)]
    assert found[0].step == found[1].step


def test_compiled_layers_are_not_timed(study: Study, tmp_path: Path) -> None:
    plan, _, _ = planned(study, tmp_path)
    context: TaskContext = plan.contexts["train"]
    assert can_be_timed(context)
    compiled = replace(context.recipe, train=replace(context.recipe.train, compile=True))
    assert not can_be_timed(replace(context, recipe=compiled))


def test_a_budget_knows_what_it_takes() -> None:
    assert seconds_in_turns(0.1) == pytest.approx(3 * (4 + 3) * 0.1)
