"""The reference of a run: of new adapters, of started ones, and after a resume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from adapterhub.inference.open import open_adapter
from adapterhub.loop.report import Reporter
from adapterhub.recipe.recipe import read
from adapterhub.training.run import prepare, run
from tests.kit.task_cases import CASES

WORDS = ("train.tensorboard=false", "train.report=false", "train.learning_rate=1e-2")


@pytest.fixture
def recipe_of(backbones, tmp_path):
    case = CASES["preference"]
    file = str(case.data(tmp_path))

    def recipe(output, *words, **flags):
        flags |= {
            "backbone": str(backbones(case.backbone)), "output": str(tmp_path / output),
            "task": case.task, "data": {"train": file, "eval": file},
        }  # fmt: skip
        return read(None, [*WORDS, *words], flags)

    return recipe


def references(prepared):
    return [row["reference"] for row in prepared.train.rows]


def test_the_reference_of_a_new_and_of_a_started_adapter(recipe_of):
    new = recipe_of("new", "train.max_steps=6", method="lora")
    bare = references(prepare(new))
    outcome = run(new, Reporter())
    evaluated = open_adapter(outcome.folder).evaluate(prepare(new).data.evaluation)
    assert evaluated == pytest.approx(outcome.metrics, abs=1e-4)
    started = prepare(recipe_of("again", **{"from": str(outcome.folder)}))
    assert np.abs(np.array(references(started)) - np.array(bare)).max() > 0.1
    margin = started.data.task.evaluate(started.model, started.evaluation, 64)["margin"]
    assert margin == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_resumed_run_has_the_reference_of_its_start(method, recipe_of):
    half = recipe_of("part", "train.max_steps=4", "train.schedule=constant", method=method)
    run(half, Reporter())
    longer = recipe_of("part", "train.max_steps=8", "train.schedule=constant", method=method)
    resumed = run(longer, Reporter(), resume=True)
    alone = run(
        recipe_of("alone", "train.max_steps=8", "train.schedule=constant", method=method),
        Reporter(),
    )
    tensors = [(Path(r.folder) / "adapter.safetensors").read_bytes() for r in (resumed, alone)]
    assert tensors[0] == tensors[1]
