"""Steps that fit into a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from studies import planned

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
