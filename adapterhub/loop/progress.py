"""How far a run is, its time, and its length, which a resume may change.

The progress is saved with every checkpoint, for a resumed run to continue there. The clock tells
time spent training from other work, and has the speed and the peak of memory.

A run is resumed with another number of steps or processes where that changes no step done. With N
processes, a step has N x `gradient_accumulation` batches: as long as that stays the same, each step
sees the same rows. Another number of steps is allowed where the old and the new schedule have the
same learning rates up to and including the next step: a constant schedule after its warm-up, or a
warm-up of a fixed number of steps that is not over. The run then continues as if it had been
started like this.

Other settings of a run may change too, such as a learning rate that was too high or a corrected
file: from that step on it is another stretch of the run, which is recorded (`stretch`).
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from adapterhub.config.options import Resumed, resumed_as
from adapterhub.errors import ConfigError
from adapterhub.loop.checkpoint import differing_settings
from adapterhub.loop.report import Timing
from adapterhub.recipe.options import DEFAULT, RunOptions, schedule, warmup_steps
from adapterhub.recipe.recipe import Recipe

ROWS = "processes x train.batch_size x train.gradient_accumulation"
DATA = "data"  # of a description: the digests of the rows
STRETCHES = "stretches"  # of a description: [{step, changed}], from which step which settings
_COMPARED = ("same", "length")  # elsewhere, or not at all
RECENT = 100  # measurements of steps that tell how long the next ones take
ONE_OFF = 10  # times the median: such a step did work that is done once, such as compiling
_LENGTH = ("epochs", "max_steps", "warmup")  # options that determine only how long a schedule is


@dataclass
class RunProgress:
    """How far a run is. `batch` is the next micro-batch of `epoch`.

    `losses` are those since the last report, `errors` has those of the scores of the best
    evaluation, `stale` counts the evaluations since the best one, and
    `history` has the metrics of each evaluation with "step" and "epoch". `peak_memory` is in bytes.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    best_step: int | None = None
    stale: int = 0
    finished: bool = False
    losses: list[float] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)
    examples: int = 0
    train_seconds: float = 0.0
    other_seconds: float = 0.0
    peak_memory: int = 0
    tokens: int = 0
    errors: dict[str, dict[str, float]] = field(default_factory=dict)

    def advance(self, next_batch: int, batches: int) -> bool:
        """Count one optimizer step; return whether the epoch, of so many `batches`, has ended."""
        ended = next_batch == batches
        self.step += 1
        self.epoch += ended
        self.batch = 0 if ended else next_batch
        return ended

    def evaluation(self, step: int | None) -> dict[str, float]:
        """Return the record of the evaluation at `step`."""
        return next(record for record in self.history if record["step"] == step)

    def metrics(self, step: int | None) -> dict[str, float]:
        """Return the metrics of the evaluation at `step`, or {} if `step` is None."""
        record = {} if step is None else self.evaluation(step)
        return {name: value for name, value in record.items() if name not in ("step", "epoch")}

    @property
    def seconds(self) -> float:
        """The time of all work, over all sessions of the run."""
        return self.train_seconds + self.other_seconds


class RunClock:
    """Adds the time of one session to the progress of a run. It runs from its creation on.

    The time left follows from what repeats: steps, evaluations and saves, each times how many
    remain. The first step, and the first after a choice of speedups, are not among them.
    """

    def __init__(self, progress: RunProgress, device: torch.device) -> None:
        self.progress = progress
        self.device = device
        self.steps: deque[tuple[int, float]] = deque(maxlen=RECENT)  # how many, in what time
        self.repeated: dict[str, float] = {}  # the seconds of the latest evaluation, and save
        self.restart_speed()
        self.restart_steps()
        self.lap_start = time.perf_counter()

    def restart_steps(self) -> None:
        """Leave the next step out of the time left: it does what is done once."""
        self.warming = True
        self.marked = self.progress.step, self.progress.train_seconds

    def mark(self) -> None:
        """Measure the steps since the last call; called when the device has done them."""
        self.progress.train_seconds += self._lap()
        (step, seconds), now = self.marked, (self.progress.step, self.progress.train_seconds)
        if now[0] == step:
            return
        self.marked = now
        if not self.warming:
            self.steps.append((now[0] - step, now[1] - seconds))
        self.warming = False

    def seconds_left(self, total: int, every: Mapping[str, int]) -> float | None:
        """Return the time left of a run of `total` steps; None before a step is measured.

        `every` has the steps between two evaluations, and between two saves: the last step has
        both, and those of this step are to come.
        """
        if not self.steps:
            return None
        usual = ONE_OFF * statistics.median(seconds / n for n, seconds in self.steps)
        laps = [(n, seconds) for n, seconds in self.steps if seconds <= n * usual]
        steps, seconds = map(sum, zip(*laps, strict=True))
        done = self.progress.step - 1
        to_come = {n: -(-total // period) - done // period for n, period in every.items()}
        other = sum(self.repeated.get(name, 0.0) * count for name, count in to_come.items())
        return (total - done - 1) * seconds / steps + other

    def add_training(self) -> None:
        """Count the time since the last call as training, and update the peak memory."""
        self.progress.train_seconds += self._lap()
        self.progress.peak_memory = max(self.progress.peak_memory, peak_memory(self.device))

    def add_other(self, repeated: str = "") -> None:
        """Count the time since the last call as other work; `repeated` names what will repeat."""
        lap = self._lap()
        self.progress.other_seconds += lap
        if repeated:
            self.repeated[repeated] = lap

    def timing(self) -> Timing:
        """Return the timing up to now, with the speed since the last `restart_speed`."""
        self.add_training()
        progress = self.progress
        seconds = max(progress.train_seconds - self.reported_seconds, 1e-9)
        return Timing(
            seconds=progress.seconds,
            examples_per_second=(progress.examples - self.reported_examples) / seconds,
            peak_memory=progress.peak_memory,
            tokens_per_second=(progress.tokens - self.reported_tokens) / seconds,
        )

    def restart_speed(self) -> None:
        """Measure the training speed from here on."""
        self.reported_examples = self.progress.examples
        self.reported_tokens = self.progress.tokens
        self.reported_seconds = self.progress.train_seconds

    def _lap(self) -> float:
        now = time.perf_counter()
        lap, self.lap_start = now - self.lap_start, now
        return lap


def process_memory() -> int:
    """Return the memory that the process takes now, in bytes; 0 if the system does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_memory(torch.device("cpu"))


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of the GPU, or of the process if the device is the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    if sys.platform == "linux":  # where rusage begins with the peak of the parent process
        with open("/proc/self/status") as file:
            (line,) = (line for line in file if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def comparable(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a run without what a resume may change.

    That is what `Resumed` calls "same", its length, which `check_length` compares, how the rows of
    a step are divided over processes and passes, and its earlier stretches.
    """
    same = {name: value for name, value in run.items() if name not in ("processes", STRETCHES)}
    train = dict(run.get("train", {}))
    rows = run.get("processes", 1) * train.pop("gradient_accumulation", 1)
    size = train.get("batch_size") or 1
    train = {n: v for n, v in train.items() if resumed_as(Recipe, ["train", n]) not in _COMPARED}
    return {**same, "train": train, ROWS: rows * size}


def stretch(saved: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return what of a run a resume changes, by name: the value in the checkpoint, and now.

    Raises:
        ConfigError: it is another run; every setting that would have to be equal is listed.
    """
    found = differing_settings(comparable(saved), comparable(run))
    differing = {name: values for name, values in found.items() if _kind(name) != "same"}
    fixed = {n: values for n, values in differing.items() if _kind(n) != "recorded"}
    if fixed:
        raise ConfigError(
            "the checkpoint belongs to another run: some settings or the data are different",
            expected="the same recipe and data as when the run was started",
            hint="restore them, or train without --resume into another output folder",
            offenders=[
                f"{name}: {before} in the checkpoint, {now} now"
                for name, (before, now) in sorted(fixed.items())
            ],
        )
    return {name: list(values) for name, values in sorted(differing.items())}


def _kind(name: str) -> Resumed:
    """Return what becomes of a resumed run of which a setting, by dotted path, has changed."""
    kind, _, rest = name.partition(".")
    path = rest.split(".") if kind == "recipe" else name.split(".")
    if kind in ("recipe", "train"):
        return resumed_as(Recipe, path) or "fixed"
    return "recorded" if kind == DATA else "fixed"


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
    by_share: str = "",
) -> None:
    """Refuse a length by which the steps done would have had other learning rates.

    `saved` are the training options of the checkpoint. With `stopped_early`, the patience of the
    run is exhausted. `by_share` names methods that divide the length of the run.

    Raises:
        ConfigError: the schedule or a method depends on the length, the run has more steps already,
            or it was stopped early.
    """
    if all(saved.get(name) == getattr(options, name) for name in _LENGTH):
        return
    if stopped_early:
        raise ConfigError(
            f"the run was stopped early after step {done:,}: its last {options.patience} "
            "evaluations were no improvement",
            hint="train anew in another --output, with a larger train.patience",
        )
    name = saved.get("schedule") or options.schedule or DEFAULT
    before = saved.get("max_steps") or saved["epochs"] * steps_per_epoch
    now = total_steps(options, steps_per_epoch)
    if done > now:
        raise ConfigError(
            f"the run has {done:,} steps already, and would have only {now:,}",
            expected=f"{done:,} steps or more",
            hint="another --output, to train anew with fewer steps",
        )
    if by_share and before != now:
        raise ConfigError(
            f"the run cannot go from {before:,} to {now:,} steps: {by_share} divides the length of "
            "the run, and would have done other steps",
            hint="train anew in another --output",
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
