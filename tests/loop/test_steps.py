"""A step is a step: loss and gradients do not depend on how its rows are divided."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from adapterhub.loop import engine
from adapterhub.loop.engine import Engine, LazyBatches
from adapterhub.loop.report import Reporter
from adapterhub.recipe.recipe import read
from adapterhub.tasks.common import language_models
from adapterhub.tasks.common.batches import IGNORED
from adapterhub.training.run import PreparedRun, prepare, training_session
from tests.kit.data import mixed_recipe, write_json_lines
from tests.kit.selection import long_table
from tests.kit.task_cases import CASES

ROWS = 8
WHOLE, ONE_BY_ONE, UNEVEN = [ROWS], [1] * ROWS, [2, 5, 1]
# The in-batch negatives of `multiple-negatives` and the order of `cosent` are of a whole batch.
TASKS = {name: (name, case.task) for name, case in CASES.items() if name != "embedding"}
TASKS |= {
    "weighted": ("classification", "classification(class_weights={pos: 3, neg: 0.5})"),
    "weightless": ("classification", "classification(class_weights={pos: 3, neg: 0})"),
    "weighted-tagging": ("tagging", "tagging(class_weights=balanced)"),
    "weighted-images": ("image-classification", "image-classification(class_weights={'1': 3})"),
    "packed": ("causal-lm", "causal-lm(pack=true)"),
    "text": ("masked-lm", "causal-lm(data=text)"),
    "generating": ("prompted", "prompted(model=causal-lm, template='{text} is {mask}', "
                   "words={'pos': 'good', 'neg': 'bad'})"),
    "orpo": ("preference", "preference(loss_type=orpo)"),
    "triplet": ("embedding", "embedding(loss_type=triplet)"),
}  # fmt: skip
BACKBONES = {"text": "llama", "generating": "llama"}


def divided(prepared: PreparedRun, sizes: Sequence[int], world: int) -> list[torch.Tensor]:
    """Return loss and gradients of a step on all rows, in batches of some sizes."""
    order, start = [], 0
    for size in sizes:
        order.append(list(range(start, start + size)))
        start += size
    found: list[list[torch.Tensor]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_update", lambda self, done: torch.zeros(()))
        session = training_session(prepared, Reporter(), resume=False)
        one, tensors = session.engine, session.trainee.tensors()
        prepared.model.eval()  # heads have dropout
        batches = LazyBatches(order, lambda indices: prepared.train.batch(indices))
        window = range(len(order))
        items = sum(one.items(batches[n]) for n in window)
        patch.setattr(engine, "total", lambda number: items)
        for one.rank in range(world):
            one.world = world
            one.step(batches, window, 1.0)
            gradients = [tensor.grad for tensor in tensors.values()]
            found.append([one.unread[-1][0], *(g.clone() for g in gradients if g is not None)])
            for tensor in tensors.values():
                tensor.grad = None
    return [torch.stack(each).mean(0) for each in zip(*found, strict=True)]


def prepared_run(case: str, task: str, backbone: Path, folder: Path) -> PreparedRun:
    """Prepare a run on some rows, one of which has no labels where that is possible."""
    file = str(CASES[case].data(folder))
    if "triplet" in task:
        rows = map(json.loads, Path(file).read_text().splitlines())
        write_json_lines(Path(file), [row | {"negative": f"the {row['anchor']}"} for row in rows])
    flags = {
        "backbone": str(backbone), "output": str(folder / "run"), "task": task,
        "method": "lora(rank=2)", "data": {"train": file, "eval": file},
    }  # fmt: skip
    options = ("train.tensorboard=false", "train.report=false", "train.frozen_cache=off")
    prepared = prepare(read(None, options, flags))
    rows: Any = prepared.train.rows
    labels = rows[0].get("labels") if isinstance(rows, list) else None
    if isinstance(labels, list) and isinstance(labels[0], int) and case != "speech-recognition":
        rows[0]["labels"] = [IGNORED] * len(labels)
    return prepared


@long_table("name", TASKS, 3)
def test_a_step_is_the_same_however_its_rows_are_divided(
    name: str, backbones: Any, tmp_path: Path
) -> None:
    case, task = TASKS[name]
    backbone = backbones(BACKBONES.get(name, CASES[case].backbone))
    prepared = prepared_run(case, task, backbone, tmp_path)
    expected = divided(prepared, WHOLE, 1)
    assert 0 < expected[0] < math.inf
    # Of three batches, two processes compute one twice.
    for sizes, world in ((ONE_BY_ONE, 1), (UNEVEN, 2)):
        for found, wanted in zip(divided(prepared, sizes, world), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["causal-lm", "seq2seq", "masked-lm", "image-text-to-text"])
def test_the_loss_below_the_head_and_in_evaluation_is_divided_alike(
    name: str, backbones: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_models, "_WORTHWHILE", 0)
    monkeypatch.setattr(language_models, "_CHUNK", {"cpu": 300})
    case = CASES[name]
    prepared = prepared_run(name, case.task, backbones(case.backbone), tmp_path)
    expected = divided(prepared, WHOLE, 1)
    for found, wanted in zip(divided(prepared, UNEVEN, 1), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=1e-5)
    task, model = prepared.data.task, prepared.model
    losses = [task.evaluate(model, prepared.train, size)["loss"] for size in (1, ROWS)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_steps_of_a_mixture_are_divided_alike(backbone: Path, tmp_path: Path) -> None:
    prepared = prepare(mixed_recipe(backbone, tmp_path))
    expected = divided(prepared, WHOLE, 1)
    for found, wanted in zip(divided(prepared, UNEVEN, 2), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=1e-5)
