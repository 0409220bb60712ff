"""The training loop: the same for every method, task and backbone.

An epoch is a `BatchList`: its length is known and its batches are collated on access. A resumed run
therefore starts in the middle of an epoch without collating the batches that it skips.
`batches(epoch)` must depend on `epoch` alone, and all epochs have the same length. The trained
tensors may change between steps (`Trainee.enter`); this too depends only on the saved progress.

A run that was stopped at any moment, even by `kill -9`, and resumed ends with the same tensors and
the same `metrics.jsonl`, to the byte, as an uninterrupted run.

Progress of a run: its step, its time, and its length, which a resume may change.

The progress is saved with every checkpoint, so that a resumed run can continue there. The clock
separates training time from other work, and tracks the speed and the peak memory.

A run may be resumed with another number of steps or processes if this changes no finished step.
With N processes, a step has N x `gradient_accumulation` batches: as long as that stays the same,
each step uses the same rows. Another number of steps is allowed if the old and the new schedule
have the same learning rates up to and including the next step: a constant schedule after its
warm-up, or an unfinished warm-up of a fixed number of steps. The run then continues as if it had
been started like this.

Other settings of a run may change too, such as a learning rate that was too high or a corrected
file. From that step on, it is another stretch of the run, which is recorded (`stretch`).
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed

from adapterhub.config.options import Resumed, resumed_as
from adapterhub.errors import ConfigError, FileError, OutputError, TrainingError, did_you_mean
from adapterhub.files.manifest import LOWER_IS_BETTER
from adapterhub.loop import checkpoint
from adapterhub.loop.checkpoint import differing_settings
from adapterhub.loop.engine import (
    BatchList,
    CheckpointedLayers,
    Engine,
    StatefulBatches,
    noisy_embeddings,
    recompute,
    step_means,
)
from adapterhub.loop.processes import (
    Stopped,
    StopRequest,
    any_process,
    catch_stop_signals,
    everyone_s,
    from_main,
)
from adapterhub.loop.report import Evaluated, Reporter, Timing, TrainingLine, peak_text
from adapterhub.loop.sharding import reshard
from adapterhub.loop.speedups import Speedups
from adapterhub.loop.trainee import Standing, standings
from adapterhub.recipe.output_folder import how_to_resume
from adapterhub.recipe.recipe import DEFAULT, Recipe, RunOptions, schedule, warmup_steps
from adapterhub.status import doing, showing

ROWS = "processes x train.batch_size x train.gradient_accumulation"
DATA = "data"  # in a description: the digests of the rows
STRETCHES = "stretches"  # in a description: [{step, changed}], changed settings by step
_COMPARED = ("same", "length")  # elsewhere, or missing
RECENT = 100  # step measurements used to estimate the next ones
ONE_OFF = 10  # times the median: such steps did one-time work, such as compiling
_LENGTH = ("epochs", "max_steps", "warmup")  # options that only determine the length of a schedule


@dataclass
class RunProgress:
    """The progress of a run. `batch` is the next micro-batch of `epoch`.

    `losses` and `measures` are those since the last report. `errors` has the errors of the best
    evaluation's scores. `stale` counts the evaluations since the best one. `history` has the
    metrics of each evaluation with "step" and "epoch". `peak_memory` is in bytes.
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
    measures: list[dict[str, float]] = field(default_factory=list)

    def advance(self, next_batch: int, batches: int) -> bool:
        """Count one optimizer step; return whether the epoch of `batches` batches has ended."""
        ended = next_batch == batches
        self.step += 1
        self.epoch += ended
        self.batch = 0 if ended else next_batch
        return ended

    def evaluation(self, step: int | None) -> dict[str, float]:
        """Return the record of the evaluation at `step`."""
        return next(record for record in self.history if record["step"] == step)

    def metrics(self, step: int | None) -> dict[str, float]:
        """Return the metrics of the evaluation at `step`, or {} without a step."""
        record = {} if step is None else self.evaluation(step)
        return {name: value for name, value in record.items() if name not in ("step", "epoch")}

    @property
    def seconds(self) -> float:
        """The time of all work, over all sessions of the run."""
        return self.train_seconds + self.other_seconds


class RunClock:
    """Adds the time of one session to the progress of a run, starting at its creation.

    The time left is estimated from repeated work: steps, evaluations and saves, each times the
    remaining number. The first step, and the first after a choice of speedups, are excluded.
    """

    def __init__(self, progress: RunProgress, device: torch.device) -> None:
        self.progress = progress
        self.device = device
        self.steps: deque[tuple[int, float]] = deque(maxlen=RECENT)  # their number and their time
        self.repeated: dict[str, float] = {}  # seconds of the latest evaluation and save
        self.restart_speed()
        self.restart_steps()
        self.lap_start = time.perf_counter()

    def restart_steps(self) -> None:
        """Exclude the next step from the estimate, since it includes one-time work."""
        self.warming = True
        self.marked = self.progress.step, self.progress.train_seconds

    def mark(self) -> None:
        """Measure the steps since the last call; called when the device has finished them."""
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

        `every` has the steps between two evaluations, and between two saves. The last step has
        both, and those of this step are still to come.
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
        """Count the time since the last call as other work; `repeated` names recurring work."""
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
    """Return the current memory of the process, in bytes; 0 if the system does not report it."""
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
    if sys.platform == "linux":  # where rusage starts with the peak of the parent process
        with open("/proc/self/status") as file:
            (line,) = (line for line in file if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def comparable(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a run without the settings that a resume may change.

    These are the settings that `Resumed` calls "same", the length, which `check_length` compares,
    the division of a step's rows over processes and passes, and earlier stretches.
    """
    same = {name: value for name, value in run.items() if name not in ("processes", STRETCHES)}
    train = dict(run.get("train", {}))
    rows = run.get("processes", 1) * train.pop("gradient_accumulation", 1)
    size = train.get("batch_size") or 1
    train = {n: v for n, v in train.items() if resumed_as(Recipe, ["train", n]) not in _COMPARED}
    return {**same, "train": train, ROWS: rows * size}


def stretch(saved: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the settings that a resume changes, by name: in the checkpoint, and now.

    Raises:
        ConfigError: it is another run; every setting that must be equal is listed.
    """
    changed = differing_settings(comparable(saved), comparable(run))
    differing = {name: values for name, values in changed.items() if _kind(name) != "same"}
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
    """Return the effect on a resumed run if a setting, by dotted path, has changed."""
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
    """Check that a new length does not change the learning rates of finished steps.

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
            hint="train again in another --output, with a larger train.patience",
        )
    name = saved.get("schedule") or options.schedule or DEFAULT
    before = saved.get("max_steps") or saved["epochs"] * steps_per_epoch
    now = total_steps(options, steps_per_epoch)
    if done > now:
        raise ConfigError(
            f"the run has {done:,} steps already, and would have only {now:,}",
            expected=f"{done:,} steps or more",
            hint="another --output, to train again with fewer steps",
        )
    if by_share and before != now:
        raise ConfigError(
            f"the run cannot go from {before:,} to {now:,} steps: {by_share} divides the length of "
            "the run, and would have done other steps",
            hint="train again in another --output",
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
        hint="train again in another --output; or, to continue from this adapter, adapterhub merge "
        "RUN --output MERGED, then adapterhub train --backbone MERGED",
    )


@dataclass(frozen=True)
class TrainingResult:
    """The result of a run. `history` has the metrics of each evaluation with "step" and "epoch".

    `seconds` is the time of all work over all sessions of the run. `examples_per_second` and
    `tokens_per_second` count training alone. `peak_memory` is in bytes, of the GPU or, without one,
    of the process. `best` is empty if the metric was never finite or nothing was evaluated; the
    tensors then come from the last step. `metric` selected the best; `errors` records the errors
    of its scores. `stretches` lists the steps from which a resumed run had other settings, and the
    changes.
    """

    best: dict[str, float]
    best_step: int | None
    last: dict[str, float]
    history: list[dict[str, float]]
    steps: int
    seconds: float
    examples_per_second: float
    peak_memory: int
    stopped_early: bool
    tokens_per_second: float = 0.0
    metric: str = ""
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    stretches: list[dict[str, Any]] = field(default_factory=list)


def train(session: TrainingSession) -> TrainingResult:
    """Train on the device of the trained tensors, and load the best tensors at the end.

    A refused run writes nothing: all checks come first.

    Raises:
        ConfigError: the checkpoint is of another run, or the device does not support the precision.
        FileError: a checkpoint is broken, or files of the run were changed since the last one.
        OutputError: the folder already has a run (without `resume`), or cannot be written.
        Stopped: a signal stopped the run, after its state was saved.
        TrainingError: a loss is not finite, tensors get no gradient, or memory is exhausted.
    """
    session.load()
    try:
        with catch_stop_signals() as stop:
            session.train(stop)
        return session.finish()
    finally:
        session.reporter.close()


class TrainingSession:
    """One session of a run: the state that is kept between steps.

    Args:
        engine: makes the steps.
        batches: returns the batches of an epoch. The batches of a stream are one object for all
            epochs: a checkpoint keeps its place.
        evaluate: returns the metrics; called in evaluation mode, without gradients. Without it, the
            last tensors are the result.
        output: the folder for checkpoints.
        seed: the seed of dropout.
        main_metric: the metric that selects the best tensors, unless the options name one.
        resume: continue from the last checkpoint, if it exists.
        run: the description of the run (recipe, data hash), which is compared with the
            checkpoint's.
        reporter: receives progress reports.
        checked: called when all checks have passed, before anything is written.
        speedups: faster ways to compute the same, chosen again when the trained tensors change.
        errors: returns the errors of the latest evaluation's scores; called for the best ones.
        save_adapter: writes the folder of the current adapter, with the known results of the run;
            None if the trainee is not an adapter.
    """

    stop: StopRequest
    layers: CheckpointedLayers | None
    stream: StatefulBatches | None
    clock: RunClock
    total: int
    every: Mapping[str, int]
    changed: Mapping[str, Sequence[str]]

    def __init__(
        self,
        engine: Engine,
        batches: Callable[[int], BatchList],
        evaluate: Callable[[], Mapping[str, float]] | None,
        *,
        output: Path,
        seed: int,
        main_metric: str,
        resume: bool,
        run: Mapping[str, Any],
        reporter: Reporter,
        checked: Callable[[], None] = lambda: None,
        speedups: Speedups | None = None,
        errors: Callable[[Mapping[str, float]], dict[str, dict[str, float]]] = lambda metrics: {},
        save_adapter: Callable[[Path, RunProgress, Sequence[Mapping[str, Any]]], object]
        | None = None,
    ) -> None:
        self.engine, self.trainee, self.options = engine, engine.trainee, engine.options
        self.batches, self.evaluate, self.errors = batches, evaluate, errors
        self.seed, self.resume, self.save_adapter = seed, resume, save_adapter
        self.checked, self.speedups = checked, speedups or Speedups()
        options = dataclasses.asdict(self.options)
        self.run = {**run, "train": options, "seed": seed, "processes": engine.world}
        self.metric = self.options.best_metric or main_metric
        self.reporter = reporter if engine.accelerator.is_main_process else Reporter()
        self.last = checkpoint.folder_of(output, "last")
        self.best = checkpoint.folder_of(output, "best")
        self.progress = RunProgress()
        self.saved: checkpoint.State | None = None
        self.changed = {}

    def load(self) -> None:
        """Set the seed, and load tensors and progress of the last checkpoint, if it exists.

        Raises:
            ConfigError: the checkpoint is of another run.
            FileError: a checkpoint is broken.
            OutputError: a checkpoint exists, and the run is not resumed.
        """
        set_seed(self.seed, device_specific=self.engine.world > 1)
        if not checkpoint.exists(self.last):
            return
        if not self.resume:
            raise OutputError(
                f"{self.last.parent} already contains a training run",
                expected="a new output folder, or --resume",
                hint="add --resume, or choose another output folder",
            )
        self.saved = saved = checkpoint.load_checkpoint(self.last)
        changed = stretch(saved.run, self.run)
        self.reporter.check(saved.reports)
        checkpoint.restore(self.trainee.tensors(), saved)
        self.progress = RunProgress(**saved.progress)
        self._begin_stretch(saved.run.get(STRETCHES, []), changed)
        if self.progress.best_step not in (None, self.progress.step):
            self._load_best()

    def _begin_stretch(
        self, earlier: Sequence[Mapping[str, Any]], changed: Mapping[str, Sequence[str]]
    ) -> None:
        """Record the changes from this step on."""
        self.changed = changed
        added = [{"step": self.progress.step, "changed": dict(changed)}] if changed else []
        if stretches := [*earlier, *added]:
            self.run[STRETCHES] = stretches

    def train(self, stop: StopRequest) -> None:
        """Train until the run is finished or requested to stop."""
        self.stop = stop
        options, model = self.options, self.trainee.model
        layers = recompute(model, options.gradient_checkpointing, options.offload_activations)
        noise = noisy_embeddings(model, options.neftune_alpha)
        with self.speedups, noise, layers as self.layers:
            epoch = self.batches(self.progress.epoch)
            self.stream = epoch if isinstance(epoch, StatefulBatches) else None
            self._begin(epoch, self.saved)
            while not self.progress.finished:
                self._train_epoch(epoch)
                if not self.progress.finished:
                    epoch = self.batches(self.progress.epoch)

    def _load_best(self) -> checkpoint.State:
        """Load the best checkpoint.

        Raises:
            FileError: it is broken, or its run or step differ from the progress.
        """
        best = checkpoint.load_checkpoint(self.best)
        record = self.progress.evaluation(self.progress.best_step)
        try:
            stretch(best.run, self.run)  # it may belong to an earlier one
        except ConfigError:
            raise checkpoint.broken(self.best, "it belongs to another run") from None
        if not checkpoint.same_record(best.progress, record):
            raise checkpoint.broken(
                self.best, f"it is of step {best.progress.get('step')}, not of {record['step']:g}"
            )
        return best

    def _has_best(self) -> bool:
        """Return whether the best checkpoint belongs to the best evaluation."""
        try:
            self._load_best()
        except FileError:
            return False
        return True

    def _begin(self, epoch: BatchList, saved: checkpoint.State | None) -> None:
        """Start or resume; all epochs have the length of `epoch`."""
        if len(epoch) == 0:
            raise TrainingError("there is nothing to train on: the epoch has no batches")
        steps = -(-len(epoch) // self.engine.per_step)
        self.total = total_steps(self.options, steps)
        evaluations = self.options.eval_every if isinstance(self.options.eval_every, int) else steps
        self.every = {"evaluation": evaluations, "save": self.options.save_every or evaluations}
        if saved is not None:
            progress, stale = self.progress, self._is_stale()
            was = saved.run["train"]
            self._place(was.get("batch_size", self.options.batch_size), len(epoch))
            check_length(
                was,
                self.options,
                steps,
                progress.step,
                stopped_early=stale,
                by_share=self.trainee.by_share,
            )
            progress.finished = progress.step >= self.total or stale
            if progress.finished and self.changed:
                raise ConfigError(
                    f"the run has ended after step {progress.step:,}: what is changed would have "
                    "no effect",
                    offenders=tuple(self.changed),
                    expected="the same recipe and data, or more steps where the schedule allows it",
                    hint="train again in another --output",
                )
        self.engine.begin(self.total)
        if self.engine.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.engine.device)
        self._enter_stage()
        self._train_mode()
        training = None if saved is None else self._restored(saved)
        self.checked()
        self.reporter.start(self.total, self.progress.step)
        for name, (before, now) in self.changed.items():
            step = self.progress.step
            self.reporter.note(f"after step {step:,} {name} is {now}; it was {before}")
        if training is None:
            peaks = peak_text(self.engine.peaks())
            self.reporter.note(self.engine.schedule_text(self.total, peaks))
        else:
            if self.progress.best_step == self.progress.step and not self._has_best():
                # A kill may have come after `last` was written, but before its copy to `best`.
                self._save_best()
            self._restore_random(training["random"])
        self.clock = RunClock(self.progress, self.engine.device)
        if not self.progress.finished:
            self._speed_up()

    def _place(self, size: int, batches: int) -> None:
        """Find the next batch after a change of the batch size, or of the number of batches.

        `size` is the batch size of the checkpoint, and `batches` the current number in an epoch.
        """
        progress, per_step = self.progress, self.engine.per_step
        if size != self.options.batch_size:
            same_rows = progress.batch * size // self.options.batch_size
            progress.batch = same_rows // per_step * per_step
        if progress.batch >= batches:
            progress.epoch, progress.batch = progress.epoch + 1, 0

    def _restored(self, saved: checkpoint.State) -> dict[str, Any]:
        """Restore the state of the optimizer; return the training state.

        Raises:
            FileError: the checkpoint has no such state, or one of another optimizer.
        """
        try:
            training = checkpoint.restored_training(saved, self.engine.params)
        except (ValueError, OSError) as error:
            raise checkpoint.broken(self.last, str(error)) from error
        if self.stream is not None:
            self._restore_stream(self.stream, training)
        try:
            self.engine.load_state(training["engine"])
        except checkpoint.BROKEN as error:
            raise checkpoint.broken(self.last, str(error)) from error
        return training

    def _restore_stream(self, stream: StatefulBatches, training: Mapping[str, Any]) -> None:
        """Continue the stream from each process's place."""
        places = training.get("stream", [])
        if len(places) != self.engine.world:
            raise ConfigError(
                f"the run read its stream in {len(places)} processes, and there are "
                f"{self.engine.world} now",
                expected="as many as before: each one reads rows of its own",
                hint=f"torchrun --nproc-per-node {len(places)} -m adapterhub train ... --resume",
            )
        stream.load_state(places[self.engine.rank])

    def _restore_random(self, saved: Any) -> None:
        """Continue with the checkpoint's random numbers, if the number of processes is the same."""
        states = saved if isinstance(saved, list) else [saved]
        if len(states) == self.engine.world:
            checkpoint.set_random_state(states[self.engine.rank])
        else:
            set_seed(self.seed + self.progress.step, device_specific=self.engine.world > 1)

    def _train_epoch(self, epoch: BatchList) -> None:
        """Train on the rest of one epoch, from `progress.batch` on."""
        progress, per_step = self.progress, self.engine.per_step
        for start in range(progress.batch, len(epoch), per_step):
            window = range(start, min(start + per_step, len(epoch)))
            done = (progress.step + 1) / self.total
            examples, tokens = self.engine.step(epoch, window, done)
            progress.examples += examples
            progress.tokens += tokens
            epoch_ended = progress.advance(window.stop, len(epoch))
            self._after_step(epoch_ended, progress.epoch + progress.batch / len(epoch))
            if progress.finished:
                return

    def _after_step(self, epoch_ended: bool, epoch: float) -> None:
        """Report, evaluate and save, as due. Saving is last: a resume repeats none of it."""
        progress, options = self.progress, self.options
        if _is_free_to_read(self.engine.device) or self.clock.warming:
            self._read_losses()
        progress.finished = progress.step >= self.total
        self.reporter.left(self.clock.seconds_left(self.total, self.every))
        self.reporter.advance(progress.step)
        if progress.step % options.log_every == 0 or progress.finished:
            self._report(epoch)
        every = options.eval_every
        due = progress.step % every == 0 if isinstance(every, int) else epoch_ended
        due = due or progress.finished
        improved = due and self.evaluate is not None and self._evaluate(epoch, self.evaluate)
        save = due if options.save_every is None else progress.step % options.save_every == 0
        stopping = any_process(self.stop.requested)
        if save or improved or progress.finished or stopping:
            self._save()
        if improved:
            self._save_best()
        if self.trainee.staged and self._enter_stage() and not progress.finished:
            self._speed_up()
        if stopping and not progress.finished:
            raise Stopped(
                f"stopped by a signal after step {progress.step} of {self.total}; the state is "
                "saved",
                hint=f"{how_to_resume()} to continue",
            )

    def _read_losses(self) -> None:
        self.progress.losses += self.engine.read(self.progress.step)
        self.progress.measures += self.engine.read_measures()
        self.clock.mark()

    def _report(self, epoch: float) -> None:
        self._read_losses()
        progress, losses = self.progress, self.progress.losses
        line = TrainingLine(
            step=progress.step,
            epoch=epoch,
            loss=math.fsum(losses) / len(losses),
            learning_rate=self.engine.rates(),
            measures=step_means(progress.measures),
        )
        losses.clear()
        progress.measures.clear()
        self.reporter.trained(line, self.clock.timing())
        self.clock.restart_speed()

    def _evaluate(self, epoch: float, evaluate: Callable[[], Mapping[str, float]]) -> bool:
        """Evaluate; return whether this is the best evaluation so far."""
        self._read_losses()
        self.clock.add_training()
        # Rounding differs between devices, but all must choose the same best checkpoint.
        metrics = from_main(self._metrics(evaluate))
        self.clock.add_other("evaluation")
        progress = self.progress
        progress.history.append({"step": progress.step, "epoch": epoch, **metrics})
        standing = self._standings()[-1]
        best = standing.best
        progress.best_step = progress.step if best else progress.best_step
        progress.errors = self.errors(metrics) if best else progress.errors
        # Evaluations that cannot be the best do not show that the run no longer improves.
        counts = not standing.improved and self._is_ready(progress.step)
        progress.stale = progress.stale + 1 if counts else 0
        progress.finished |= self._is_stale()
        line = Evaluated(step=progress.step, epoch=epoch, metrics=metrics, best=best)
        self.reporter.evaluated(line, self.clock.timing())
        return best

    def _is_stale(self) -> bool:
        """Return whether the patience has passed without improvement."""
        patience = self.options.patience
        return patience is not None and self.progress.stale >= patience

    def _metrics(self, evaluate: Callable[[], Mapping[str, float]]) -> dict[str, float]:
        self.trainee.model.eval()
        with (
            torch.no_grad(),
            self.engine.accelerator.autocast(),
            showing(self.reporter.display()),
            doing("evaluating"),
        ):
            metrics = {name: float(value) for name, value in evaluate().items()}
        if self.engine.sharded:
            reshard(self.trainee.model)
        self._train_mode()
        if self.metric not in metrics:
            raise ConfigError(
                f"the evaluation has no metric {self.metric!r}{did_you_mean(self.metric, metrics)}",
                expected=f"one of {', '.join(sorted(metrics))}",
                hint="train.best_metric=NAME",
            )
        return metrics

    def _standings(self) -> list[Standing]:
        """Compare each evaluation with those before it."""
        lower = self.metric.removeprefix("eval_").rpartition("/")[2] in LOWER_IS_BETTER
        scores = [
            (record[self.metric], _loss_beside(record, self.metric))
            if self._is_ready(record["step"])
            else (math.nan, math.nan)
            for record in self.progress.history
        ]
        return standings(scores, lower)

    def _is_ready(self, step: float) -> bool:
        """Return whether an evaluation after a step may be the best one."""
        return self.trainee.ready(step / self.total)

    def _enter_stage(self) -> bool:
        """Begin the stage that is due; its gradients are checked at the next step."""
        progress = self.progress
        improved = [each.improved for each in self._standings()]
        if self.trainee.enter(progress.epoch, improved, progress.step / self.total):
            self.engine.checked = False
            self._train_mode()
            return True
        return False

    def _speed_up(self) -> None:
        """Choose the speedups for the tensors being trained now."""
        self.clock.add_training()
        with self.engine.accelerator.autocast(), showing(self.reporter.display()):
            self.speedups.enter(self.engine)
        self.clock.add_other()
        self.clock.restart_steps()

    def _train_mode(self) -> None:
        """Set the modules to their training modes."""
        self.trainee.train_mode(self.options.dropout)
        if self.layers is not None:
            self.layers.apply()

    def _save(self) -> None:
        """Save the whole state. It precedes the copy to `best`, which is never ahead of it."""
        self._read_losses()
        tensors = self.engine.finite_tensors()
        self.clock.add_training()
        self.reporter.flush()
        random, world = checkpoint.random_states(self.engine.world), self.engine.world
        training = {"engine": self.engine.state(), "random": random}
        if self.stream is not None:  # for each process that reads other rows
            place = self.stream.state()
            training["stream"] = everyone_s(place) if world > 1 else [place]
        progress, reports = dataclasses.asdict(self.progress), self.reporter.written()
        state = checkpoint.State(tensors, progress, self.run, training, reports)
        checkpoint.save(self.last, replace(state, save_adapter=self._adapter_writer()))
        self.clock.add_other("save")

    def _save_best(self) -> None:
        record = self.progress.evaluation(self.progress.best_step)
        state = checkpoint.State(self.trainee.tensors(), record, self.run)
        checkpoint.save(self.best, replace(state, save_adapter=self._adapter_writer()))

    def _adapter_writer(self) -> Callable[[Path], object] | None:
        """Return the writer of the adapter's folder, if an adapter is trained."""
        save, stretches = self.save_adapter, self.run.get(STRETCHES, [])
        if save is None:
            return None
        return lambda folder: save(folder, self.progress, stretches)

    def finish(self) -> TrainingResult:
        """Restore the best tensors, and set the model to evaluation mode."""
        if self.stream is not None:
            self.stream.close()
        progress = self.progress
        if progress.best_step is not None:
            checkpoint.restore(self.trainee.tensors(), self._load_best())
        accelerator = self.engine.accelerator
        accelerator.unwrap_model(self.engine.model, keep_fp32_wrapper=False).eval()
        return TrainingResult(
            best=progress.metrics(progress.best_step),
            best_step=progress.best_step,
            last=progress.metrics(int(progress.history[-1]["step"]) if progress.history else None),
            history=progress.history,
            steps=progress.step,
            seconds=progress.seconds,
            examples_per_second=progress.examples / max(progress.train_seconds, 1e-9),
            peak_memory=progress.peak_memory,
            stopped_early=progress.step < self.total,
            tokens_per_second=progress.tokens / max(progress.train_seconds, 1e-9),
            metric=self.metric,
            errors=progress.errors,
            stretches=self.run.get(STRETCHES, []),
        )


def _loss_beside(record: Mapping[str, float], metric: str) -> float:
    """Return the loss on the rows of a metric, NaN if missing; the mean for several tasks."""
    task = metric.rpartition("/")[0]
    if (own := f"{task}/loss" if task else "loss") in record:
        return record[own]
    losses = [value for name, value in record.items() if name.endswith("/loss")]
    return math.fsum(losses) / len(losses) if losses else math.nan


def _is_free_to_read(device: torch.device) -> bool:
    """Return whether a loss can be read without waiting for the device."""
    return device.type == "cpu"
