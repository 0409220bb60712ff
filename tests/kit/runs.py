"""Runs of the training loop on a tiny network that learns in milliseconds, for several tests."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from adapterhub.loop import checkpoint
from adapterhub.loop.engine import Engine, LazyBatches, batch_order
from adapterhub.loop.loop import TrainingResult, TrainingSession, train
from adapterhub.loop.report import Reporter, reporter_for
from adapterhub.recipe.recipe import RunOptions

torch.set_num_threads(1)

EXAMPLES, BATCH = 30, 4
OPTIONS = RunOptions(
    epochs=2, batch_size=BATCH, gradient_accumulation=3, log_every=2, tensorboard=False
)
ACCURACIES = (0.5, 0.9, 0.7, 0.6, 0.8, 0.4)


class Net(nn.Module):
    """Two layers and dropout, so that the random state matters."""

    body: nn.Sequential

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> SimpleNamespace:
        logits = self.body(x)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SimpleNamespace(loss=loss, logits=logits)


class Learner:
    """A trainee whose parameters all train."""

    def __init__(self, model: nn.Module | None = None, lr: float = 0.01) -> None:
        self.model = Net() if model is None else model
        self.lr = lr

    def param_groups(self, options: RunOptions) -> list[dict[str, Any]]:
        params = [p for p in self.model.parameters() if p.requires_grad]
        return [{"name": "all", "lr": options.learning_rate or self.lr, "params": params}]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    staged = False

    def enter(self, epoch: int, improved: Sequence[bool], done: float) -> bool:
        return False

    by_share = ""

    def penalty(self) -> torch.Tensor | None:
        return None

    def stepped(self, done: float) -> None:
        pass

    def ready(self, done: float) -> bool:
        return True

    def train_mode(self, dropout: bool) -> None:
        self.model.train()


class Data:
    """A separable task that counts collated batches and calls `event` before each one."""

    def __init__(self, event: Callable[[], None] = lambda: None) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(EXAMPLES, 6, generator=generator)
        self.labels = (self.x[:, 0] + self.x[:, 1] > 0).long()
        self.event = event
        self.collated = 0
        self.epochs: list[int] = []

    def __call__(self, epoch: int) -> LazyBatches:
        self.epochs.append(epoch)
        return LazyBatches(batch_order([1] * EXAMPLES, BATCH, epoch, 5, True), self.collate)

    def collate(self, indices: list[int]) -> dict[str, torch.Tensor]:
        self.event()
        self.collated += 1
        return {"x": self.x[indices], "labels": self.labels[indices]}

    def score(self, model: nn.Module) -> dict[str, float]:
        self.event()
        assert not model.training
        assert not torch.is_grad_enabled()
        out = model(x=self.x, labels=self.labels)
        right = (out.logits.argmax(-1) == self.labels).float().mean()
        return {"accuracy": float(right), "loss": float(out.loss)}


def fit(
    output: Path,
    options: RunOptions = OPTIONS,
    *,
    trainee: Learner | None = None,
    data: Data | None = None,
    evaluate: Callable[[], Mapping[str, float]] | None = None,
    resume: bool = False,
    metric: str = "loss",
    reporter: Reporter | None = None,
    evaluation: bool = True,
) -> TrainingResult:
    """Train the tiny network, with or without evaluation."""
    trainee, data = trainee or Learner(), data or Data()
    session = TrainingSession(
        Engine(trainee, options),
        data,
        (evaluate or (lambda: data.score(trainee.model))) if evaluation else None,
        output=output,
        seed=3,
        main_metric=metric,
        resume=resume,
        run={"recipe": {"rank": 8}, "data": "abc"},
        reporter=reporter or reporter_for(output, options, quiet=True),
    )
    return train(session)


def scores(values: tuple[float, ...] = ACCURACIES) -> Callable[[], Mapping[str, float]]:
    """An evaluation that returns these accuracies, one per call."""
    left = iter(values)
    return lambda: {"accuracy": next(left)}


def bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """The bytes of each tensor."""
    return {name: t.detach().numpy().tobytes() for name, t in tensors.items()}


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def final_bytes(output: Path) -> tuple[bytes, ...]:
    """The files that two equal runs share to the byte: tensors, and records without wall times.

    The adapter has the name of its folder, which two runs do not share.
    """
    last, best = (output / "checkpoints" / name for name in ("last", "best"))
    progress = json.loads((best / "progress.json").read_bytes())
    del progress["files"], progress["sha256"]  # digests of the card, the manifest and the record
    records = [progress]
    tensors = [folder / "tensors.safetensors" for folder in (last, best)]
    if (best / "adapter").exists():  # that of a sharded run is not in one place
        tensors += [folder / "adapter/adapter.safetensors" for folder in (last, best)]
        manifest = json.loads((best / "adapter/adapter.json").read_bytes())
        del manifest["name"], manifest["sha256"]
        records.append(manifest)
    return (
        *(path.read_bytes() for path in tensors),
        *(json.dumps(record).encode() for record in records),
        (output / "metrics.jsonl").read_bytes(),
    )


class Ticks:
    """Send this process a signal at the n-th event: a batch, an evaluation, a file operation."""

    def __init__(self, at: int, number: int = signal.SIGKILL) -> None:
        self.at, self.number, self.count = at, number, 0

    def __call__(self) -> None:
        if self.count == self.at:
            os.kill(os.getpid(), self.number)
        self.count += 1

    def watch_files(self, patch: pytest.MonkeyPatch) -> None:
        watched = (os, "fsync"), (os, "replace"), (checkpoint, "put_in_place"), (shutil, "rmtree")
        for owner, name in watched:
            patch.setattr(owner, name, self._before(getattr(owner, name)))

    def _before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            self()
            return function(*args, **options)

        return called
