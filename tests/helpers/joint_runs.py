"""Runs of a few steps on tiny backbones: alone, each on a model of its own, or together on one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny_models
import torch
from torch import Tensor
from transformers import PreTrainedModel

import adapterhub as ah
from adapterhub.adapters.adapter import Adapter
from adapterhub.errors import AdapterhubError
from adapterhub.tasks._losses import LOSSES
from adapterhub.training import checkpoint
from adapterhub.training.batching import LazyBatches, batch_order
from adapterhub.training.joint import train_together
from adapterhub.training.loop import TrainingResult, TrainingSession, train
from adapterhub.training.options import RunOptions
from adapterhub.training.report import Reporter, reporter_for
from adapterhub.training.trainee import AdapterTrainee

ROWS, LENGTH = 12, 7
OPTIONS: dict[str, Any] = {
    "epochs": 2,
    "batch_size": 4,
    "log_every": 1,
    "tensorboard": False,
    "learning_rate": 0.003,
    "head_learning_rate": 0.003,
}


@dataclass
class TinyRun:
    """One of several runs: its method and what else is its own."""

    method: Any
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 3
    evaluates: bool = True
    event: Callable[[], None] = lambda: None
    reporter: Reporter | None = None
    prepare: str = ""  # the method of an adapter that must be there before it

    def attach(self, model: PreTrainedModel, number: int) -> Adapter:
        """Attach the adapter of run `number`, with the values that it has in any model."""
        torch.manual_seed(number)
        adapter = ah.attach(model, self.method, name=f"run{number}")
        tiny_models.scramble(adapter, seed=number, std=0.05)
        return adapter

    def session(self, adapter: Adapter, output: Path, resume: bool = False) -> TrainingSession:
        """Return the session that trains the adapter."""
        options = RunOptions(**OPTIONS | self.options)
        inputs = tiny_models.batch(ROWS, LENGTH)
        language = adapter.model.config.model_type in tiny_models.WITHOUT_CLASSIFIER
        labels = inputs["input_ids"] if language else inputs["input_ids"][:, 0] % 3
        data = inputs | {"labels": labels}

        def collate(rows: list[int]) -> dict[str, Tensor]:
            self.event()
            return {name: tensor[rows] for name, tensor in data.items()}

        def batches(epoch: int) -> LazyBatches:
            order = batch_order([LENGTH] * ROWS, options.batch_size, epoch, self.seed, True)
            return LazyBatches(order, collate)

        def evaluate() -> dict[str, float]:
            assert not adapter.model.training
            return {"loss": float(adapter.model(**data).loss)}

        kind = "classification"
        if language:
            kind = "seq2seq" if adapter.model.config.is_encoder_decoder else "causal-lm"
        return TrainingSession(
            AdapterTrainee(adapter),
            batches,
            evaluate if self.evaluates else None,
            options,
            output=output,
            seed=self.seed,
            main_metric="loss",
            resume=resume,
            run={"recipe": str(self.method), "data": "abc"},
            reporter=self.reporter or reporter_for(output, options, quiet=True),
            loss_of_rows=LOSSES[kind],
        )


def model_for(architecture: str = "bert", **config: Any) -> PreTrainedModel:
    """Build the backbone; it has the dropout of its configuration."""
    return tiny_models.usual_model(architecture, **config)


def train_alone(
    runs: Sequence[TinyRun], output: Path, architecture: str = "bert", **config: Any
) -> list[TrainingResult | AdapterhubError]:
    """Train each run on a model of its own."""
    results: list[TrainingResult | AdapterhubError] = []
    for number, each in enumerate(runs):
        adapter = each.attach(model_for(architecture, **config), number)
        try:
            results.append(train(each.session(adapter, output / str(number))))
        except AdapterhubError as error:
            results.append(error)
    return results


def train_jointly(
    runs: Sequence[TinyRun],
    output: Path,
    architecture: str = "bert",
    *,
    resume: bool = False,
    order: Sequence[int] | None = None,
    most_tokens: int | None = None,
    **config: Any,
) -> list[TrainingResult | AdapterhubError]:
    """Train the runs together, in any order; results are in that of the runs."""
    model = model_for(architecture, **config)
    adapters = [each.attach(model, number) for number, each in enumerate(runs)]
    order = range(len(runs)) if order is None else order
    sessions = [runs[n].session(adapters[n], output / str(n), resume) for n in order]
    results = dict(zip(order, train_together(sessions, most_tokens=most_tokens), strict=True))
    return [results[number] for number in range(len(runs))]


def saved(output: Path, name: str = "last") -> checkpoint.State:
    """Return a checkpoint of a run."""
    return checkpoint.load_checkpoint(output / "checkpoints" / name)
