"""Resume a run with another number of steps or processes, where that changes no step done.

With N processes, a step has N x `gradient_accumulation` batches: as long as that stays the same,
each step sees the same rows. Another number of steps is allowed where the old and the new schedule
have the same learning rates up to and including the next step: a constant schedule after its
warm-up, or a warm-up of a fixed number of steps that is not over. The run then continues as if it
had been started like this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapterhub.errors import ConfigError
from adapterhub.recipe.options import RunOptions
from adapterhub.recipe.schedules import DEFAULT, schedule, warmup_steps

BATCHES = "processes x train.gradient_accumulation"
_LENGTH = ("epochs", "max_steps", "warmup")  # options that determine only how long a schedule is


def comparable(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a run without what a resume may change.

    That is its length, which `check_length` compares, and how a step's batches are divided over
    processes and passes.
    """
    same = {name: value for name, value in run.items() if name != "processes"}
    train = {name: v for name, v in run.get("train", {}).items() if name not in _LENGTH}
    passes = train.pop("gradient_accumulation", 1)
    return {**same, "train": train, BATCHES: run.get("processes", 1) * passes}


def total_steps(options: RunOptions, steps_per_epoch: int) -> int:
    """Return the number of optimizer steps of a run."""
    return options.max_steps or options.epochs * steps_per_epoch


def check_length(
    saved: Mapping[str, Any],
    options: RunOptions,
    steps_per_epoch: int,
    done: int,
    *,
    stopped_early: bool = False,
) -> None:
    """Refuse a length by which the steps done would have had other learning rates.

    `saved` are the training options of the checkpoint. With `stopped_early`, the patience of the
    run is exhausted.

    Raises:
        ConfigError: the schedule depends on the length, the run has more steps already, or it
            was stopped early.
    """
    if all(saved.get(name) == getattr(options, name) for name in _LENGTH):
        return
    if stopped_early:
        raise ConfigError(
            f"the run was stopped early after step {done:,}: its last {options.patience} "
            "evaluations were no improvement",
            hint="train anew in another --output, with a larger train.patience",
        )
    name = options.schedule or DEFAULT
    before = saved.get("max_steps") or saved["epochs"] * steps_per_epoch
    now = total_steps(options, steps_per_epoch)
    if done > now:
        raise ConfigError(
            f"the run has {done:,} steps already, and would have only {now:,}",
            expected=f"{done:,} steps or more",
            hint="another --output, to train anew with fewer steps",
        )
    old = schedule(name, before, saved.get("warmup"))
    new = schedule(name, now, options.warmup)
    if any(old(step) != new(step) for step in range(done + 1)):
        raise _refused(name, before, now, warmup_steps(name, before, saved.get("warmup")))


def _refused(name: str, before: int, now: int, warmup: int) -> ConfigError:
    problem = f"the run cannot go from {before:,} to {now:,} steps: "
    if name == "constant":
        return ConfigError(
            f"{problem}its warm-up had {warmup:,} steps, a fraction of its length, and would have "
            "more",
            expected="the warm-up of the steps done, as a number of steps",
            hint=f"--resume train.warmup={warmup}" if warmup else "--resume train.warmup=0",
        )
    return ConfigError(
        f"{problem}its {name} schedule lowered the learning rate towards step {before:,} all the "
        "time",
        expected="train.schedule=constant from the start, for a run that may be lengthened",
        hint="train anew in another --output; or, to go on from this adapter, adapterhub merge RUN "
        "--output MERGED, then adapterhub train --backbone MERGED",
    )
