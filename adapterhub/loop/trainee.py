"""What a run trains: the interface that the training loop needs, and an adapter behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from adapterhub.adapters.adapter import Adapter, ParameterGroup
from adapterhub.adapters.parts import HEAD
from adapterhub.loop import stages
from adapterhub.methods._base import Method
from adapterhub.recipe.options import TrainOptions

HEAD_LEARNING_RATE = 5e-3


class Trainee(Protocol):
    """A model whose output has a `loss`, and the tensors of it that train."""

    @property
    def model(self) -> torch.nn.Module:
        """The model, called as `model(**batch)`."""

    def param_groups(self, options: TrainOptions) -> list[dict[str, Any]]:
        """Return the parameter groups for the optimizer, each with "name", "lr" and "params".

        In a group without "weight_decay", matrices decay by `options.weight_decay` and 1-D
        parameters do not decay.
        """

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the live trained tensors by name; a checkpoint is restored by copying into them.

        Tensors that do not require a gradient yet (a later stage) are included.
        """

    @property
    def staged(self) -> bool:
        """Whether `enter` ever changes which tensors train."""

    def enter(self, epoch: int, improved: Sequence[bool], done: float) -> bool:
        """Set `requires_grad` for the current stage; return whether that changed any tensor.

        Called before the first step of a session, and after each step. The result must depend on
        the arguments alone: `epoch` is the epoch of the next step, `improved` tells for each
        evaluation so far whether it was the best until then, and `done` is the share of the steps
        that are done.
        """

    def train_mode(self, dropout: bool) -> None:
        """Set the modules to training mode; the frozen part only if `dropout`."""


@dataclass(frozen=True)
class AdapterTrainee:
    """An adapter as a `Trainee`: each method's parameters train at the method's learning rate."""

    adapter: Adapter

    @property
    def model(self) -> PreTrainedModel:
        """The model that the adapter is attached to."""
        return self.adapter.model

    def param_groups(self, options: TrainOptions) -> list[dict[str, Any]]:
        """Return one group per method and learning-rate factor, and one for the task head.

        If only the head trains, its rate is `options.learning_rate`, unless it has its own.
        """
        groups = self.adapter.groups()
        if not any(group.method for group in groups):
            head_rate = options.head_learning_rate or options.learning_rate
            options = replace(options, head_learning_rate=head_rate)
        return [
            {
                "name": _group_name(group),
                "params": [parameter for _, parameter in group.named],
                "lr": _learning_rate(group.method, options) * group.rate,
            }
            for group in groups
        ]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the adapter's live tensors by name."""
        return self.adapter.tensors()

    @property
    def staged(self) -> bool:
        """Whether a method of the adapter trains in stages."""
        return any(changed.stage for changed in self.adapter.changed)

    def enter(self, epoch: int, improved: Sequence[bool], done: float) -> bool:
        """Enter the stage that each method's schedule prescribes."""
        return stages.enter(self.adapter, epoch, improved, done)

    def train_mode(self, dropout: bool) -> None:
        """Set the adapter to training mode, and the frozen backbone only if `dropout`."""
        self.adapter.train_mode(dropout)


def _group_name(group: ParameterGroup) -> str:
    name = group.method.name if group.method else HEAD
    return name if group.rate == 1 else f"{name} x{group.rate:.3g}"


def _learning_rate(method: Method | None, options: TrainOptions) -> float:
    if method is None:
        return options.head_learning_rate or HEAD_LEARNING_RATE
    return options.learning_rate or method.learning_rate
