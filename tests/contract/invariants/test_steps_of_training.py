"""Methods that take part in training, or start from the data: killed and resumed to the byte."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import adapterhub as ah
from adapterhub.loop import checkpoint
from adapterhub.loop.engine import Engine, LazyBatches
from adapterhub.loop.loop import TrainingSession, train
from adapterhub.loop.report import Reporter
from adapterhub.loop.trainee import AdapterTrainee
from adapterhub.methods import METHODS
from adapterhub.recipe.recipe import RunOptions
from tests.kit import tiny_models
from tests.kit.matrix import example, interactions
from tests.kit.selection import long_table

TAKING_PART = [
    name for name, method in METHODS.items() if method.takes_steps() or method.data_start
]
CELLS = interactions((m, a) for m in TAKING_PART for a in tiny_models.ARCHITECTURES)
STEPS = 5
OPTIONS = RunOptions(
    max_steps=STEPS, batch_size=6, eval_every=1, learning_rate=0.01, tensorboard=False
)


class Killed(Exception):
    """Simulates a kill: no code of the package handles it."""


def trained(
    method: str, architecture: str, output: Path, *, kill_at: int = 0, resume: bool = False
) -> dict[str, bytes]:
    """Train by our loop, and return the bytes of the last checkpoint."""
    model = tiny_models.usual_model(architecture, **tiny_models.NO_DROPOUT)
    torch.manual_seed(0)
    adapter = ah.attach(model, example(method))
    batch = tiny_models.labelled_batch(model)
    if (init := METHODS[method].data_start) and not resume:
        ah.calibrate(adapter, [batch], init)  # type: ignore[arg-type]

    def evaluate() -> Mapping[str, float]:
        if session.progress.step == kill_at:
            raise Killed
        return {"loss": float(model(**batch).loss)}

    session: Any = TrainingSession(
        Engine(AdapterTrainee(adapter), OPTIONS),
        lambda epoch: LazyBatches([[0]], lambda rows: batch),
        evaluate, output=output, seed=0, main_metric="loss", resume=resume, run={},
        reporter=Reporter(),
    )  # fmt: skip
    result = train(session)
    assert result.last["loss"] <= result.history[0]["loss"]  # equal: a bounded prompt
    assert METHODS[method].example().ready(1.0)
    tensors = checkpoint.load_checkpoint(checkpoint.folder_of(output, "last")).tensors
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


@long_table(("method", "architecture"), CELLS, 6, nightly=2)
def test_killed_and_resumed_it_ends_with_the_same_bytes(
    method: str, architecture: str, tmp_path: Path
) -> None:
    whole = trained(method, architecture, tmp_path / "whole")
    with pytest.raises(Killed):
        trained(method, architecture, tmp_path / "parts", kill_at=3)
    assert trained(method, architecture, tmp_path / "parts", resume=True) == whole


def test_there_are_such_methods() -> None:
    assert {"adalora", "lora-ga"} <= set(TAKING_PART)
