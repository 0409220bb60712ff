"""The trainee of a run: the interface for the training loop, and its implementation for adapters.

A stage depends only on the epoch, the evaluations and the share of the steps so far, so a resumed
run continues in the stage where it stopped. A tensor whose stage has not begun has no gradient. The
optimizer does not change it, not even by weight decay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from adapterhub.adapters.adapter import HEAD, Adapter, ParameterGroup
from adapterhub.errors import ConfigError, TrainingError
from adapterhub.methods.common.base import Method, StageSchedule
from adapterhub.methods.common.site_module import SiteModule
from adapterhub.recipe.recipe import TrainOptions

HEAD_LEARNING_RATE = 5e-3
_ROUNDING = 1e-9  # for a share such as 3 / 7 * 7


class Trainee(Protocol):
    """A model whose output has a `loss`, and its trained tensors."""

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
        """Whether `enter` ever changes the trained tensors."""

    def enter(self, epoch: int, improved: Sequence[bool], done: float) -> bool:
        """Set `requires_grad` for the current stage; return whether that changed any tensor.

        Called before the first step of a session, and after each step. The result must depend on
        the arguments alone. `epoch` is the epoch of the next step. `improved` lists for each
        evaluation so far whether it was better than those before. `done` is the completed share of
        the steps.
        """

    @property
    def by_share(self) -> str:
        """The names of the methods that take part in the steps, by the share of the run."""

    def penalty(self) -> torch.Tensor | None:
        """Return the penalty to add to the loss of a step; None for none."""

    def stepped(self, done: float) -> None:
        """Update after a step of the optimizer; gradients still exist.

        `done` is the completed share of the run, including this step.
        """

    def ready(self, done: float) -> bool:
        """Return whether an evaluation at this share of the run may be the best one."""

    def train_mode(self, dropout: bool) -> None:
        """Set the modules to training mode; the frozen part only if `dropout`."""


@dataclass(frozen=True)
class AdapterTrainee:
    """An adapter as a `Trainee`: each method's parameters train at the method's learning rate."""

    adapter: Adapter

    @property
    def model(self) -> nn.Module:
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
        """Enter the stage required by each method's schedule."""
        return enter_stage(self.adapter, epoch, improved, done)

    @property
    def by_share(self) -> str:
        """The names of the methods that take part in the steps."""
        return ", ".join(method.name for method, _ in stepping(self.adapter))

    def penalty(self) -> torch.Tensor | None:
        """Return the sum of the penalties of the methods."""
        return penalty(self.adapter)

    def stepped(self, done: float) -> None:
        """Update each method after a step."""
        stepped(self.adapter, done)

    def ready(self, done: float) -> bool:
        """Return whether all methods are ready."""
        return is_ready(self.adapter, done)

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


def enter_stage(adapter: Adapter, epoch: int, improved: Sequence[bool], done: float = 0.0) -> bool:
    """Make exactly the parameters of all begun stages require a gradient.

    This is the only place where the schedules of methods become `requires_grad`. The arguments are
    those of `Trainee.enter`. Returns whether this changed any parameter.
    """
    changed_any = False
    current = {
        id(method): _of_equal(last_stage + 1, done)
        if (schedule := method.stage_schedule()) is not None and schedule.equal
        else stage(schedule, epoch, improved)
        for method, last_stage in _last_stages(adapter)
    }
    for changed in adapter.changed:
        trains = changed.stage <= current.get(id(changed.method), 0)
        changed_any |= changed.own.requires_grad != trains
        changed.own.requires_grad_(trains)
    return changed_any


def stepping(adapter: Adapter) -> list[tuple[Method, list[SiteModule]]]:
    """List the methods of an adapter that take part in the steps, each with its modules."""
    methods: dict[int, tuple[Method, list[SiteModule]]] = {}
    for placed in adapter.placed:
        if placed.method.takes_steps():
            methods.setdefault(id(placed.method), (placed.method, []))[1].append(placed.module)
    return list(methods.values())


def check_whole(names: str) -> None:
    """Check that no method takes part in the steps of a run that divides the parameters.

    Raises:
        TrainingError: such methods exist; the error names them.
    """
    if names:
        raise TrainingError(
            f"{names} reads whole parameters and gradients in each step, which a "
            "sharded model divides over the processes",
            hint="train.shard=false, or another method",
        )


def penalty(adapter: Adapter) -> torch.Tensor | None:
    """Return the sum of the penalties of an adapter's methods; None without penalties."""
    values = (method.penalty(modules) for method, modules in stepping(adapter))
    penalties = [each for each in values if each is not None]
    return torch.stack(penalties).sum() if penalties else None


def stepped(adapter: Adapter, done: float) -> None:
    """Update the methods of an adapter after a step of the optimizer."""
    with torch.no_grad():
        for method, modules in stepping(adapter):
            method.stepped(modules, done)


def is_ready(adapter: Adapter, done: float) -> bool:
    """Return whether an evaluation at a share of the run may be the best one."""
    return all(method.ready(done) for method, _ in stepping(adapter))


def epochs_needed(adapter: Adapter) -> int:
    """Return the smallest number of epochs until all stages of an adapter's methods have begun."""
    return max((needed for _, _, needed in _needs(adapter)), default=1)


def _of_equal(count: int, done: float) -> int:
    """Return the current one of `count` equal stages at a share of the run."""
    return min(int(done * count + _ROUNDING), count - 1)


def _last_stages(adapter: Adapter) -> Iterator[tuple[Method, int]]:
    """Yield each method that trains backbone parameters, and the index of its last stage."""
    for method in {id(c.method): c.method for c in adapter.changed if c.method}.values():
        yield method, max(c.stage for c in adapter.changed if c.method is method)


def _needs(adapter: Adapter) -> Iterator[tuple[Method, int, int]]:
    """Yield each method, its last stage, and the epochs until that stage begins."""
    for method, last_stage in _last_stages(adapter):
        schedule = method.stage_schedule()
        by_epochs = schedule is not None and not schedule.equal
        yield method, last_stage, last_stage * (schedule.epochs or 0) + 1 if by_epochs else 1  # type: ignore[union-attr]


def unreached(adapter: Adapter, epochs: int) -> Iterator[str]:
    """Yield a warning for each method whose last stage does not begin within `epochs`."""
    for method, last_stage, needed in _needs(adapter):
        if needed > epochs:
            yield (
                f"{method.name} has {last_stage + 1} stages, and the last begins after epoch "
                f"{needed - 1} of {epochs}: the parameters of stages that are not reached stay "
                f"frozen; {method.name}(every=equal) divides the steps among all stages"
            )


def check_plateaus(adapter: Adapter, *, evaluated: bool) -> None:
    """Check that a run without evaluation trains no method whose stages begin by evaluations.

    Raises:
        ConfigError: the run is not evaluated, and the stages of a method wait for a plateau.
    """
    methods = {c.method.name: c.method for c in adapter.changed if c.method}
    schedules = {name: method.stage_schedule() for name, method in methods.items()}
    waiting = [name for name, each in schedules.items() if each and each.epochs is None]
    if waiting and not evaluated:
        raise ConfigError(
            f"{', '.join(waiting)} begins a stage when evaluations no longer improve, and there is "
            "no evaluation",
            hint="--eval FILE, or stages by epochs",
        )


def unfreeze_all(adapter: Adapter) -> None:
    """Make all parameters of an adapter require a gradient again, as after `attach`."""
    for changed in adapter.changed:
        changed.own.requires_grad_(True)


def stage(stage_schedule: StageSchedule | None, epoch: int, improved: Sequence[bool]) -> int:
    """Return the current stage, counted from 0; without a schedule there is one.

    `improved` lists for each evaluation so far whether it was better than those before.
    """
    if stage_schedule is None:
        return 0
    if stage_schedule.epochs is None:
        return plateaus(improved, stage_schedule.patience)
    return epoch // stage_schedule.epochs


def plateaus(improved: Sequence[bool], patience: int) -> int:
    """Count the plateaus, each of `patience` consecutive evaluations without improvement."""
    count = stale = 0
    for better in improved:
        stale = 0 if better else stale + 1
        if stale == patience:
            count, stale = count + 1, 0
    return count


@dataclass(frozen=True)
class Standing:
    """The comparison of an evaluation with those before it.

    `best`: it is the one to keep so far. `improved`: it is better than all earlier ones in its
    metric or, if the metric is equal, in its loss. The later one of two equal evaluations is kept,
    but is not an improvement.
    """

    best: bool
    improved: bool


def standings(scores: Sequence[tuple[float, float]], lower: bool) -> list[Standing]:
    """Compare each evaluation, a value of the metric and a loss, with those before it.

    Ties go to the lower loss, and ties of the loss to the later evaluation: a metric may have
    reached its maximum while the loss still falls. A value that is not finite is never the best; a
    loss that is not finite is the highest.

    `lower`: lower values are better.
    """
    least, standings = (math.inf, math.inf), list[Standing]()
    for value, loss in scores:
        rank = (value if lower else -value, loss if math.isfinite(loss) else math.inf)
        valid = math.isfinite(value)
        standings.append(Standing(best=valid and rank <= least, improved=valid and rank < least))
        least = rank if standings[-1].best else least
    return standings
