"""The training loop: the same for every method, task and backbone.

An epoch is a `BatchList`: its length is known and a batch is made only when it is asked for, so a
resumed run starts in the middle of an epoch without collating what it skips. `batches(epoch)` must
depend on `epoch` alone, and all epochs have one length. What trains may change between steps, where
`Trainee.enter` says so (a method with stages): that too follows from the saved progress alone.

A run that was stopped at any moment, kill -9 included, and resumed ends with the bytes of a run
that was not: tensors, and `metrics.jsonl`.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed

from adapterhub.errors import ConfigError, OutputError, TrainingError, did_you_mean
from adapterhub.files.manifest import LOWER_IS_BETTER
from adapterhub.training import checkpoint
from adapterhub.training.batching import BatchList
from adapterhub.training.engine import Engine, Trainee
from adapterhub.training.gradient_checkpointing import Recompute, recompute
from adapterhub.training.options import TrainOptions
from adapterhub.training.report import Evaluated, Reporter, Silent, Timing, TrainingLine
from adapterhub.training.stages import improvements

__all__ = ["Trainee", "TrainingResult", "train"]


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended. `history` has the metrics of each evaluation with "step" and "epoch".

    `seconds` is all work over all sessions of the run; `examples_per_second` is of training alone;
    `peak_memory` is bytes: of the accelerator where there is one, else of the process. `best` is
    empty where the metric was never finite; the tensors are then those of the last step.
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


def train(
    trainee: Trainee,
    batches: Callable[[int], BatchList],
    evaluate: Callable[[], Mapping[str, float]],
    options: TrainOptions,
    *,
    output: Path,
    seed: int,
    main_metric: str,
    resume: bool,
    run: Mapping[str, Any],
    reporter: Reporter,
) -> TrainingResult:
    """Trains on the device where the trained tensors are, and ends with the best tensors live.

    `evaluate` is called in evaluation mode, without gradients. `run` describes the run (recipe,
    data hash); a resume of another run is refused. `resume` without a checkpoint starts anew.

    Raises `ConfigError` (another run, a precision that the device lacks), `OutputError` (a run is
    already in `output`, or the disk is full), `TrainingError` (loss not finite, tensors without a
    gradient, out of memory, or Ctrl-C and SIGTERM, after the state is saved).
    """
    engine = Engine(trainee, options)
    described = {**run, "train": dataclasses.asdict(options), "seed": seed}
    described["processes"] = engine.world
    session = _Session(engine, evaluate, options, output, main_metric, described)
    set_seed(seed, device_specific=True)
    saved = session.saved_state(resume)
    session.reporter = reporter if session.engine.accelerator.is_main_process else Silent()
    on = options.gradient_checkpointing
    try:
        with _stop_signals() as session.stop, recompute(trainee.model, on) as session.layers:
            epoch = batches(session.progress.epoch)
            session.begin(epoch, saved)
            while not session.progress.finished:
                session.train_epoch(epoch)
                if not session.progress.finished:
                    epoch = batches(session.progress.epoch)
        return session.finish()
    finally:
        session.reporter.close()


@dataclass
class _Progress:
    """Where a run is, as a checkpoint keeps it. `batch` is the next micro-batch of `epoch`.

    `losses` are those since the last report, `stale` the evaluations since the best.
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

    def record(self, step: int | None) -> dict[str, float]:
        """The evaluation at `step`."""
        return next(record for record in self.history if record["step"] == step)


class _Stop:
    """Whether a signal asked the run to end after its step."""

    requested = False


class _Session:
    """What `train` holds between its steps."""

    stop: _Stop
    layers: Recompute | None
    reporter: Reporter
    total: int

    def __init__(
        self,
        engine: Engine,
        evaluate: Callable[[], Mapping[str, float]],
        options: TrainOptions,
        output: Path,
        main_metric: str,
        run: dict[str, Any],
    ) -> None:
        self.engine, self.trainee = engine, engine.trainee
        self.evaluate, self.options, self.run = evaluate, options, run
        self.metric = options.best_metric or main_metric
        self.last = checkpoint.folder_of(output, "last")
        self.best = checkpoint.folder_of(output, "best")
        self.progress = _Progress()
        self.reported = (0, 0.0)
        self.clock = time.perf_counter()

    def saved_state(self, resume: bool) -> checkpoint.State | None:
        """The checkpoint to go on from; its tensors and progress are already taken over."""
        if not checkpoint.exists(self.last):
            return None
        if not resume:
            raise OutputError(
                f"{self.last.parent} already holds a training run",
                expected="a new output folder, or a run to go on with",
                hint="add --resume, or choose another output folder",
            )
        saved = checkpoint.load_checkpoint(self.last)
        checkpoint.check_same_run(saved.run, self.run)
        checkpoint.copy_tensors(self.trainee.tensors(), saved.tensors)
        self.progress = _Progress(**saved.progress)
        self.reported = (self.progress.examples, self.progress.train_seconds)
        return saved

    def begin(self, epoch: BatchList, saved: checkpoint.State | None) -> None:
        """Starts, or goes on, with epochs that are as long as this one."""
        if len(epoch) == 0:
            raise TrainingError("there is nothing to train on: the epoch has no batches")
        steps = -(-len(epoch) // self.engine.per_step)
        self.total = self.options.max_steps or self.options.epochs * steps
        self.engine.begin(self.total)
        self.reporter.start(self.total, self.progress.step)
        if self.engine.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.engine.device)
        self._enter()
        self._train_mode()
        if saved is not None and saved.training is not None:
            if self.progress.best_step == self.progress.step:
                # A kill may have come after `last` was written, and before its copy as `best`.
                self._save_best()
            self.engine.load_state(saved.training["engine"])
            checkpoint.set_random_state(saved.training["random"])
        self.clock = time.perf_counter()

    def train_epoch(self, epoch: BatchList) -> None:
        """The rest of one epoch, from where `progress` is."""
        progress, per_step = self.progress, self.engine.per_step
        for start in range(progress.batch, len(epoch), per_step):
            window = range(start, min(start + per_step, len(epoch)))
            progress.examples += self.engine.step(epoch, window)
            progress.step += 1
            ended = window.stop == len(epoch)
            progress.epoch += ended
            progress.batch = 0 if ended else window.stop
            self._after_step(ended, progress.epoch + progress.batch / len(epoch))
            if progress.finished:
                return

    def _after_step(self, epoch_ended: bool, epoch: float) -> None:
        """Report, evaluate, save, where due. The save is last: a resume repeats none of it."""
        progress, options = self.progress, self.options
        if _is_free_to_read(self.engine.device):
            self._read()
        progress.finished = progress.step >= self.total
        self.reporter.advance(progress.step)
        if progress.step % options.log_every == 0 or progress.finished:
            self._report(epoch)
        due = progress.finished or _every(options.eval_every, progress.step, epoch_ended)
        improved = due and self._evaluate(epoch)
        save = due if options.save_every is None else progress.step % options.save_every == 0
        if save or improved or progress.finished or self.stop.requested:
            self._save()
        if improved:
            self._save_best()
        if due or epoch_ended:
            self._enter()
        if self.stop.requested and not progress.finished:
            raise TrainingError(
                f"stopped by a signal after step {progress.step} of {self.total}; it is saved",
                hint="the same command with --resume goes on from there",
            )

    def _read(self) -> None:
        self.progress.losses += self.engine.read(self.progress.step)

    def _report(self, epoch: float) -> None:
        self._read()
        progress, losses = self.progress, self.progress.losses
        line = TrainingLine(
            step=progress.step,
            epoch=epoch,
            loss=math.fsum(losses) / len(losses),
            learning_rate=self.engine.rates(),
        )
        losses.clear()
        self.reporter.trained(line, self._timing())
        self.reported = (progress.examples, progress.train_seconds)

    def _evaluate(self, epoch: float) -> bool:
        """Evaluates; returns whether this is the best so far."""
        self._read()
        self._trained_until_now()
        metrics = self.engine.agreed(self._metrics())
        progress = self.progress
        progress.other_seconds += self._lap()
        progress.history.append({"step": progress.step, "epoch": epoch, **metrics})
        best = self._improved()[-1]
        progress.best_step = progress.step if best else progress.best_step
        progress.stale = 0 if best else progress.stale + 1
        patience = self.options.patience
        progress.finished |= patience is not None and progress.stale >= patience
        line = Evaluated(step=progress.step, epoch=epoch, metrics=metrics, best=best)
        self.reporter.evaluated(line, self._timing())
        return best

    def _metrics(self) -> dict[str, float]:
        self.trainee.model.eval()
        with torch.no_grad(), self.engine.accelerator.autocast():
            metrics = {name: float(value) for name, value in self.evaluate().items()}
        self._train_mode()
        if self.metric not in metrics:
            raise ConfigError(
                f"the evaluation has no metric {self.metric!r}{did_you_mean(self.metric, metrics)}",
                expected=f"one of {', '.join(sorted(metrics))}",
                hint="train.best_metric=NAME",
            )
        return metrics

    def _improved(self) -> list[bool]:
        """Of each evaluation, whether it was the best until then."""
        lower = self.metric.removeprefix("eval_") in LOWER_IS_BETTER
        return improvements([record[self.metric] for record in self.progress.history], lower)

    def _enter(self) -> None:
        """Let the stage begin that is due."""
        if self.trainee.enter(self.progress.epoch, self._improved()):
            self.engine.checked = False
            self._train_mode()

    def _train_mode(self) -> None:
        self.trainee.train_mode(self.options.dropout)
        if self.layers is not None:
            self.layers.apply()

    def _save(self) -> None:
        """The whole state. It comes before the best copy, so that `best` is never ahead of it."""
        self._read()
        tensors = self.engine.finite_tensors()
        self._trained_until_now()
        self.reporter.flush()
        if self.engine.accelerator.is_main_process:
            training = {"engine": self.engine.state(), "random": checkpoint.random_state()}
            progress = dataclasses.asdict(self.progress)
            checkpoint.save(self.last, checkpoint.State(tensors, progress, self.run, training))
        self.engine.accelerator.wait_for_everyone()
        self.progress.other_seconds += self._lap()

    def _save_best(self) -> None:
        if self.engine.accelerator.is_main_process:
            record = self.progress.record(self.progress.best_step)
            state = checkpoint.State(self.trainee.tensors(), record, self.run)
            checkpoint.save(self.best, state)
        self.engine.accelerator.wait_for_everyone()

    def _lap(self) -> float:
        now = time.perf_counter()
        lap, self.clock = now - self.clock, now
        return lap

    def _trained_until_now(self) -> None:
        self.progress.train_seconds += self._lap()
        peak = _peak_memory(self.engine.device)
        self.progress.peak_memory = max(self.progress.peak_memory, peak)

    def _timing(self) -> Timing:
        self._trained_until_now()
        progress, (examples, seconds) = self.progress, self.reported
        speed = (progress.examples - examples) / max(progress.train_seconds - seconds, 1e-9)
        total = progress.train_seconds + progress.other_seconds
        return Timing(total, speed, progress.peak_memory)

    def finish(self) -> TrainingResult:
        """Makes the best tensors live and puts the model in evaluation mode."""
        progress = self.progress
        if progress.best_step is not None:
            checkpoint.copy_tensors(
                self.trainee.tensors(), checkpoint.load_checkpoint(self.best).tensors
            )
        accelerator = self.engine.accelerator
        accelerator.unwrap_model(self.engine.model, keep_fp32_wrapper=False).eval()
        best = progress.best_step and _metrics_of(progress.record(progress.best_step))
        return TrainingResult(
            best=best or {},
            best_step=progress.best_step,
            last=_metrics_of(progress.history[-1]),
            history=progress.history,
            steps=progress.step,
            seconds=progress.train_seconds + progress.other_seconds,
            examples_per_second=progress.examples / max(progress.train_seconds, 1e-9),
            peak_memory=progress.peak_memory,
            stopped_early=progress.step < self.total,
        )


def _is_free_to_read(device: torch.device) -> bool:
    """Whether a loss can be read without waiting for the device."""
    return device.type == "cpu"


def _every(when: str | int, step: int, epoch_ended: bool) -> bool:
    return step % when == 0 if isinstance(when, int) else epoch_ended


def _metrics_of(record: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name not in ("step", "epoch")}


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def _stop_signals() -> Iterator[_Stop]:
    """Ctrl-C or SIGTERM ends the run after its step; a second one at once."""
    stop = _Stop()

    def note(number: int, frame: object) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True

    # Python allows handlers in its main thread only.
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
