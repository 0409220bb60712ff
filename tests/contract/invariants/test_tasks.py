"""Each method trains each task from a recipe; the saved adapter predicts like the trained model."""

import math
import os
from contextlib import nullcontext

import pytest
import torch

from adapterhub.errors import AttachError, SiteError
from adapterhub.inference.open import open_adapter
from adapterhub.loop.engine import model_loss
from adapterhub.loop.report import Reporter
from adapterhub.methods import METHODS
from adapterhub.methods.common.base import dump_methods
from adapterhub.recipe.recipe import read
from adapterhub.tasks import TASKS
from adapterhub.tasks.common.batches import measuring, model_inputs
from adapterhub.training import run as running
from tests.kit import matrix, tiny_models
from tests.kit.matrix import AT_EMBEDDINGS, OF_TEXTS, REFUSED, example, representatives
from tests.kit.selection import cases_of, long_table
from tests.kit.task_cases import CASES

STEPS = 16
# A bottleneck, a low-rank update, and virtual tokens; all of the first, and of the others in turn.
CORE_METHODS = ("lora", "pfeiffer", "prompt")
# Backbones without token embeddings.
TOKENLESS = {
    (method, backbone)
    for method in (*AT_EMBEDDINGS, *OF_TEXTS)
    for backbone in ("vit", "wav2vec2", "speech-ctc")
}
# A language model's head belongs to the backbone.
HEADLESS = {("head", task) for task in ("causal-lm", "seq2seq", "span-corruption", "denoising")}
HEADLESS |= {("head", task) for task in ("speech-recognition", "image-text-to-text")}
HEADLESS |= {("head", task) for task in ("embedding", "grpo", "preference", "unified-qa")}
SITELESS = {
    (m, t)
    for m in METHODS
    for t, case in CASES.items()
    if (m, case.backbone) in REFUSED.keys() | TOKENLESS
}
# A pipeline of diffusers has a file of its own: tests/tasks/test_text_to_image.py.
NAMES = sorted(TASKS.keys() - {"text-to-image"})
ALL = [(method, task) for method in sorted(METHODS) for task in NAMES]
UNSUPPORTED = sorted(SITELESS | HEADLESS)
CELLS = [
    (method, task)
    for method, task in ALL
    if (method, task) not in UNSUPPORTED
    and (
        tiny_models.FULL_MATRIX
        or method in CORE_METHODS
        or task == "tagging"
        or (task == "image-classification" and method == representatives()[method])
    )
]
# tests/tasks/test_end_to_end.py trains each task, too.
SIGNATURES = [(method, "tagging") for method in matrix.one_of_each_signature()]
CERTAIN = cases_of([cell for cell in CELLS if cell in SIGNATURES], 16, nightly=16)
CERTAIN += cases_of([cell for cell in CELLS if cell[0] == "lora" and cell not in CERTAIN], 6)
RUN = CERTAIN + cases_of([cell for cell in CELLS if cell not in CERTAIN], 24, nightly=24)


def test_the_matrix_covers_every_method_and_task():
    assert sorted(CASES) == NAMES
    assert {method for method, _ in CELLS} == METHODS.keys()
    assert {task for _, task in CELLS} == {*NAMES}
    assert set(UNSUPPORTED) < set(ALL)


@pytest.fixture
def recipe(backbones, tmp_path):
    """Return a function that makes the recipe of a cell: a few steps, each on all data."""

    def recipe_of(method, task):
        case = CASES[task]
        file = str(case.data(tmp_path))
        flags = {
            "backbone": str(backbones(case.backbone)), "output": str(tmp_path / "run"),
            "method": dump_methods([example(method)]), "task": case.task,
            "data": {"train": file, "eval": file},
        }  # fmt: skip
        options = (
            f"max_steps={STEPS}", f"eval_every={STEPS}", "batch_size=256", "learning_rate=1e-2",
            "tensorboard=false", "report=false",
            "frozen_cache=off",  # it is in bf16: evaluations are equal up to its rounding
        )  # fmt: skip
        return read(None, [f"train.{option}" for option in options], flags)

    return recipe_of


def loss(model, encoded):
    """Compute the loss on all training data, or minus the mean reward of texts sampled for it."""
    model.eval()
    if encoded.task.on_policy:
        with measuring() as measured:
            encoded.task.rollout(model, encoded, range(len(encoded.rows)), 0, nullcontext)
        return -measured["reward"][0].item()
    of_output = encoded.task.loss(encoded) or model_loss
    batch = encoded.batch(range(len(encoded.rows)))
    with torch.no_grad():
        return of_output(model(**model_inputs(batch)), batch).item()


@pytest.mark.parametrize(("method", "task"), RUN)
def test_a_saved_adapter_predicts_like_the_trained_model(method, task, recipe, monkeypatch):
    captured = []

    def prepare(recipe, *others, **options):
        ready = original_prepare(recipe, *others, **options)
        captured.extend([ready, loss(ready.model, ready.train)])
        return ready

    original_prepare = running.prepare
    monkeypatch.setattr(running, "prepare", prepare)
    outcome = running.run(recipe(method, task), Reporter())
    ready, before = captured
    after = loss(ready.model, ready.train)
    # A reward has a small gradient, which some methods hardly follow in a few steps.
    assert after < before or (ready.data.task.on_policy and method not in CORE_METHODS)
    metric = ready.data.task.main_metric
    assert math.isfinite(outcome.metrics[metric])
    opened = open_adapter(outcome.folder.parent)
    assert opened.model is not ready.model
    assert loss(opened.model, ready.train) == pytest.approx(after, rel=1e-5)
    trained = ready.data.task.predict(ready.model, ready.evaluation, 64)
    assert list(map(str, opened.predict(ready.data.evaluation))) == list(map(str, trained))
    evaluated = opened.evaluate(ready.data.evaluation)
    assert evaluated == pytest.approx(outcome.metrics, abs=1e-5, nan_ok=True)


@long_table(("method", "task"), UNSUPPORTED, 4, nightly=2)
def test_a_refused_cell_names_the_method(method, task, recipe, record_property):
    cell = recipe(method, task)
    kind = SiteError if (method, task) in SITELESS else AttachError
    with pytest.raises(kind) as error:
        running.run(cell, Reporter())
    record_property("reason", error.value.problem)
    assert method in error.value.problem
    assert not os.path.exists(cell.output)
