"""What a study plans to run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from adapterhub.bench import plan as plan_module
from adapterhub.bench.study import Study
from adapterhub.training.loading import KernelChoice
from tests.kit.studies import planned


def test_the_kernels_of_the_first_time_are_kept(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = replace(study, recipe=replace(study.recipe, dtype=None))
    first = KernelChoice("bf16", "eager", "measured")
    monkeypatch.setattr(plan_module, "choose_kernels", lambda *rest: first)
    plan, _, _ = planned(study, tmp_path)
    assert (plan.study.recipe.dtype, plan.study.recipe.attention) == ("bf16", "eager")
    monkeypatch.setattr(plan_module, "choose_kernels", lambda *rest: KernelChoice("fp32", None))
    again, _, _ = planned(plan.study, tmp_path)
    assert again.study.to_yaml() == plan.study.to_yaml()
    assert again.contexts["train"].recipe == plan.contexts["train"].recipe
