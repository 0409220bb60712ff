"""Methods timed in turns, in one process."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
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


@pytest.mark.apart
def test_memory_is_that_of_what_trains_and_repeatable(
    study: Study, backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_turns, "STEPS", 1)
    large = tmp_path / "large"
    shutil.copytree(backbone, large)
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 1024}
    config = transformers.AutoConfig.from_pretrained(backbone, **sizes, num_attention_heads=4)
    transformers.AutoModel.from_config(config).save_pretrained(large)
    recipe = replace(study.recipe, backbone=str(large))
    bench = replace(study.bench, methods=("head", "lora", "full"), baseline=None)
    plan, _, engine = planned(replace(study, recipe=recipe, bench=bench), tmp_path)
    place = plan.contexts["train"], plan.groups, engine.loader, tmp_path / "work"
    once, again = ([each.added_memory for each in time_groups(*place)] for _ in range(2))
    if None in (*once, *again):
        pytest.skip("the system does not tell")
    head, lora, full = map(float, once)  # type: ignore[arg-type]
    weights = 4 * 2 * (4 * 256 * 256 + 2 * 256 * 1024)
    assert head < lora < full
    assert full > 3 * weights, "gradients, and two numbers of the optimizer for each weight"
    assert again[2] == pytest.approx(full, rel=0.1)


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
