"""Progress reports of a run: terminal, JSON lines, TensorBoard, trackers, and its verdict.

`metrics.jsonl` contains only values determined by the seed, so two equal runs write equal bytes;
wall times go to `timings.jsonl`. On resume, each reporter drops its reports after the checkpoint.
The two files are refused if their earlier content was changed.

Trackers (Weights & Biases, MLflow, Trackio and others supported by accelerate) receive the loss,
the learning rates, the speed and the metrics, and the recipe without local paths. They never
receive texts of the data. `trackers.json` in the run folder stores the ids of the run, so that a
resumed run continues in the trackers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from adapterhub.adapters.adapter import HEAD
from adapterhub.config.options import to_dict
from adapterhub.config.user_folders import is_folder, sync_file
from adapterhub.errors import ConfigError, FileError, counted, one_line
from adapterhub.files.atomic import FileDigest, file_digest, replace_file
from adapterhub.loop.processes import is_main, own_device
from adapterhub.recipe.output_folder import TRACKED, writing
from adapterhub.recipe.recipe import DATA_SOURCES, Recipe, RunOptions, TrainOptions
from adapterhub.status import Display, StatusBar, StatusLines


@dataclass(frozen=True)
class Timing:
    """Seconds since the start of the run, training speed, and peak memory in bytes."""

    seconds: float
    examples_per_second: float
    peak_memory: int
    tokens_per_second: float = 0.0


@dataclass(frozen=True)
class TrainingLine:
    """The mean loss since the previous line, and the learning rate of each group.

    `measures` are the means of what the task measures in a step, such as rewards.
    """

    step: int
    epoch: float
    loss: float
    learning_rate: Mapping[str, float]
    measures: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def scalars(self) -> dict[str, float]:
        """The loss, the measures and the learning rates, by the names that trackers show."""
        rates = {f"learning_rate/{name}": rate for name, rate in self.learning_rate.items()}
        measures = {f"train/{name}": value for name, value in self.measures.items()}
        return {"train/loss": self.loss, **measures, **rates}


@dataclass(frozen=True)
class Evaluated:
    """The metrics of one evaluation, and whether it is the best so far."""

    step: int
    epoch: float
    metrics: Mapping[str, float]
    best: bool


class Reporter:
    """Reports nothing; subclasses override what they report."""

    def display(self) -> Display:
        """Return the display for the progress of an evaluation."""
        return Display()

    def check(self, written: Mapping[str, FileDigest]) -> None:
        """Check before `start` that files to resume match their digests in `written`."""

    def start(self, total: int, done: int) -> None:
        """Begin a run of `total` steps after step `done`, and drop reports of later steps."""

    def left(self, seconds: float | None) -> None:
        """Report the time left, None if unknown; called before `advance`."""

    def advance(self, step: int) -> None:
        """Report that `step` is done; called after every step."""

    def trained(self, line: TrainingLine, timing: Timing) -> None:
        """Report the loss; called every `log_every` steps."""

    def evaluated(self, line: Evaluated, timing: Timing) -> None:
        """Report the metrics; called after each evaluation."""

    def note(self, text: str) -> None:
        """Show one sentence to the user."""

    def flush(self) -> None:
        """Write everything to disk; called before each checkpoint."""

    def written(self) -> dict[str, FileDigest]:
        """Return the digest of each file that must be unchanged on resume; called after `flush`."""
        return {}

    def close(self) -> None:
        """Close all files; called once, at the end."""


def _for_each(name: str) -> Callable[..., None]:
    """Return a method that calls the method of this name on each reporter."""

    def forward(several: Several, *arguments: Any) -> None:
        for reporter in several.reporters:
            getattr(reporter, name)(*arguments)

    return forward


class Several(Reporter):
    """Forwards each report to several reporters."""

    def __init__(self, reporters: Iterable[Reporter]) -> None:
        self.reporters = tuple(reporters)

    def display(self) -> Display:
        """Return the display of the first reporter, the one for the console."""
        return self.reporters[0].display() if self.reporters else Display()

    check = _for_each("check")
    start = _for_each("start")
    left = _for_each("left")
    advance = _for_each("advance")
    trained = _for_each("trained")
    evaluated = _for_each("evaluated")
    note = _for_each("note")
    flush = _for_each("flush")

    def written(self) -> dict[str, FileDigest]:
        """Return the digests of all files."""
        return {n: digest for r in self.reporters for n, digest in r.written().items()}

    def close(self) -> None:
        """Close each reporter, even if one of them fails."""
        with ExitStack() as stack:
            for reporter in reversed(self.reporters):
                stack.callback(reporter.close)


class Notes(Reporter):
    """One line of text per note, for runs without shown progress."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self.stream = sys.stderr if stream is None else stream

    def note(self, text: str) -> None:
        """Print one line."""
        with writing(Path("the standard error stream")):
            print(one_line(text), file=self.stream, flush=True)


class PlainLines(Notes):
    """One line of text per report, for logs and pipes."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        super().__init__(stream)
        self.total = 0
        self.seconds_left: float | None = None

    def display(self) -> Display:
        """Return plain lines, without stages."""
        return StatusLines(self.note, stages=False)

    def start(self, total: int, done: int) -> None:
        """Print the step that a resumed run continues from."""
        self.total = total
        if done:
            self.note(f"resumed after step {done} of {total}")

    def left(self, seconds: float | None) -> None:
        """Store the time left for the next line."""
        self.seconds_left = seconds

    def trained(self, line: TrainingLine, timing: Timing) -> None:
        """Print loss, learning rate, speed and the time left."""
        seconds = self.seconds_left if line.step < self.total else None
        left = "" if seconds is None else f" {time_text(seconds)} left"
        self.note(
            f"step {line.step}/{self.total}  epoch {line.epoch:.2f}  {_train_text(line)}  "
            f"{_speed_text(timing)}{left}"
        )

    def evaluated(self, line: Evaluated, timing: Timing) -> None:
        """Print the metrics."""
        self.note(_eval_text(line))


class _TimeLeft(TimeRemainingColumn):
    """The time left: of the run as it reports it, of other work as the bar shows it."""

    def render(self, task: Task) -> Text:
        left = task.fields.get("left")
        return super().render(task) if left is None else Text(left, style="progress.remaining")


class Bar(Reporter):
    """A progress bar with loss, learning rate and speed; metrics are printed above it."""

    def __init__(self, console: Console | None = None) -> None:
        self.progress = Progress(
            BarColumn(12),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
            _TimeLeft(),
            console=console or Console(stderr=True),
        )
        self.task = self.progress.add_task("", total=None, left="")

    def display(self) -> Display:
        """Return a bar that replaces the bar of the run."""
        return StatusBar(self.progress, behind=self.task)

    def start(self, total: int, done: int) -> None:
        """Show the bar."""
        self.progress.update(self.task, total=total, completed=done)
        self.progress.start()

    def left(self, seconds: float | None) -> None:
        """Show the time left."""
        left = "" if seconds is None else time_text(seconds)
        self.progress.update(self.task, left=left)

    def advance(self, step: int) -> None:
        """Move the bar."""
        self.progress.update(self.task, completed=step)

    def trained(self, line: TrainingLine, timing: Timing) -> None:
        """Show loss, learning rate and speed next to the bar."""
        text = f"{_train_text(line)}  {_speed_text(timing)}"
        self.progress.update(self.task, description=text)

    def evaluated(self, line: Evaluated, timing: Timing) -> None:
        """Print the metrics above the bar."""
        self.note(_eval_text(line))

    def note(self, text: str) -> None:
        """Print one line above the bar."""
        self.progress.console.print(one_line(text), markup=False, emoji=False, highlight=False)

    def close(self) -> None:
        """Stop the display."""
        self.progress.stop()


class _JsonLog:
    """One file of JSON lines, with a digest of its written content."""

    def __init__(self, path: Path) -> None:
        self.path, self.size, self.digest = path, 0, hashlib.sha256()
        self.file: IO[bytes] | None = None

    def begins_with(self, written: FileDigest | None) -> bool:
        """Return whether the file begins with the content written so far."""
        if written is None or not self.path.is_file():
            return False
        return file_digest(self.path, written.size) == written

    def open(self, size: int) -> None:
        """Open the file to append after its first `size` bytes."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab") as file:
            file.truncate(size)
        kept = self.path.read_bytes()
        self.size, self.digest = len(kept), hashlib.sha256(kept)
        self.file = open(self.path, "ab")  # noqa: SIM115

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one line."""
        assert self.file is not None
        line = f"{json.dumps(without_nan(record))}\n".encode()
        self.file.write(line)
        self.size += len(line)
        self.digest.update(line)

    def flush(self) -> None:
        """Write the file to disk."""
        if self.file is not None:
            sync_file(self.file)


class JsonLines(Reporter):
    """`metrics.jsonl` and `timings.jsonl` in `folder`: one object per line, each with its step."""

    def __init__(self, folder: Path) -> None:
        self.metrics = _JsonLog(folder / "metrics.jsonl")
        self.timings = _JsonLog(folder / "timings.jsonl")
        self.logs = (self.metrics, self.timings)
        self.kept: Mapping[str, FileDigest] = {}

    def check(self, written: Mapping[str, FileDigest]) -> None:
        """Check that the files were not changed; a deleted file starts again.

        Raises:
            FileError: a file was changed; every such file is listed.
        """
        logs = [log for log in self.logs if log.path.exists()]
        changed = [str(log.path) for log in logs if not log.begins_with(written.get(log.path.name))]
        if changed:
            raise FileError(
                "files of the run were changed since its last checkpoint",
                expected="the lines as they were written",
                hint="restore them, or move them away: the run then continues without these lines",
                offenders=changed,
            )
        self.kept = {log.path.name: written[log.path.name] for log in logs}

    def start(self, total: int, done: int) -> None:
        """Open the files, truncated to their length at the checkpoint."""
        for log in self.logs:
            kept = self.kept.get(log.path.name)
            with writing(log.path):
                log.open(kept.size if kept else 0)

    def trained(self, line: TrainingLine, timing: Timing) -> None:
        """Write the loss and its timing."""
        record = dataclasses.asdict(line)
        if not line.measures:
            del record["measures"]
        self._write("train", line.step, record, timing)

    def evaluated(self, line: Evaluated, timing: Timing) -> None:
        """Write the metrics and their timing."""
        self._write("eval", line.step, dataclasses.asdict(line), timing)

    def flush(self) -> None:
        """Write both files to disk."""
        for log in self.logs:
            with writing(log.path):
                log.flush()

    def written(self) -> dict[str, FileDigest]:
        """Return the digests of both files."""
        return {
            log.path.name: FileDigest(log.size, log.digest.hexdigest())
            for log in self.logs
            if log.file is not None
        }

    def close(self) -> None:
        """Close both files."""
        for log in self.logs:
            if log.file is not None:
                with writing(log.path):
                    log.file.close()

    def _write(self, event: str, step: int, record: dict[str, Any], timing: Timing) -> None:
        clock = {"step": step, **dataclasses.asdict(timing)}
        for log, fields in ((self.metrics, record), (self.timings, clock)):
            with writing(log.path):
                log.write({"event": event, **fields})


class TensorBoard(Reporter):
    """TensorBoard scalars in `folder`; without TensorBoard, one note on the console.

    The events are not written by `SummaryWriter`, whose thread prints a traceback if the disk is
    full.
    """

    def __init__(self, folder: Path, console: Reporter) -> None:
        self.folder = folder
        self.console = console
        self.records: Any = None

    def start(self, total: int, done: int) -> None:
        """Open a new event file, or notify the user that TensorBoard is missing."""
        try:
            from tensorboard.compat.proto.event_pb2 import SessionLog
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            self.console.note("TensorBoard is not installed: no events (pip install tensorboard)")
            return
        host = socket.gethostname()
        path = self.folder / f"events.out.tfevents.{time.time_ns()}.{host}.{os.getpid()}"
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.records = RecordWriter(open(path, "xb"))  # noqa: SIM115
        self._add(file_version="brain.Event:2")
        # TensorBoard drops events of earlier files from this step on.
        self._add(step=done + 1, session_log=SessionLog(status=SessionLog.START))

    def trained(self, line: TrainingLine, timing: Timing) -> None:
        """Write loss, learning rates and speed."""
        speed = {"train/examples_per_second": timing.examples_per_second}
        self._scalars(line.scalars | speed, line.step)

    def evaluated(self, line: Evaluated, timing: Timing) -> None:
        """Write the metrics."""
        self._scalars({f"eval/{name}": value for name, value in line.metrics.items()}, line.step)

    def flush(self) -> None:
        """Write the events to disk."""
        if self.records is not None:
            with writing(self.folder):
                self.records.flush()

    def close(self) -> None:
        """Close the event file."""
        if self.records is not None:
            with writing(self.folder):
                self.records.close()

    def _scalars(self, scalars: Mapping[str, float], step: int) -> None:
        if self.records is None:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        for name, value in scalars.items():
            self._add(
                step=step, summary=Summary(value=[Summary.Value(tag=name, simple_value=value)])
            )

    def _add(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        with writing(self.folder):
            self.records.write(Event(wall_time=time.time(), **fields).SerializeToString())


def reporter_for(output: Path, options: TrainOptions, *, quiet: bool = False) -> Reporter:
    """Return the reporter of a run: terminal, JSON lines and, if enabled, TensorBoard.

    The terminal shows a bar, or plain lines if stderr is not a terminal. Only the first of several
    processes reports. With `quiet`, it shows notes, but no progress.
    """
    if not is_main():
        return Reporter()
    console = _console_reporter(quiet)
    reporters: list[Reporter] = [console, JsonLines(output)]
    if options.tensorboard:
        reporters.append(TensorBoard(output / "tensorboard", console))
    return Several(reporters)


def _console_reporter(quiet: bool) -> Reporter:
    if quiet:
        return Notes()
    return Bar() if sys.stderr.isatty() else PlainLines()


def _train_text(line: TrainingLine) -> str:
    measures = "".join(f"  {name} {value:.3g}" for name, value in line.measures.items())
    return f"loss {line.loss:.4f}{measures}  lr {_method_rates(line.learning_rate)}"


def _speed_text(timing: Timing) -> str:
    tokens = timing.tokens_per_second
    return f"{timing.examples_per_second:,.0f} ex/s" + f" {short_count(tokens)} tok/s" * (
        tokens > 0
    )


def short_count(count: float) -> str:
    """Format a number with three digits: 4123 as "4.12k"."""
    for unit in ("", "k", "M"):
        if count < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}G"


def time_text(seconds: float) -> str:
    """Format a duration like a clock: 75 as "1:15"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _method_rates(rates: Mapping[str, float], digits: int = 1) -> str:
    """Format the learning rate of each method, or of the head if only the head is trained."""
    methods = rates_by_method(rates)
    distinct = sorted(set(methods.values())) or [rates.get(HEAD, 0.0)]
    if len(distinct) == 1:
        return f"{distinct[0]:.{digits}e}"
    return ", ".join(f"{name} {rate:.{digits}e}" for name, rate in methods.items())


def _own_head_rate(rates: Mapping[str, float]) -> float | None:
    """Return the learning rate of the head, if it differs from the methods' rate."""
    head, methods = rates.get(HEAD), set(rates_by_method(rates).values())
    return head if methods - {head} else None


def peak_text(peaks: Mapping[str, float]) -> str:
    """Format the peak learning rates of the parameter groups: "1.0e-03 (head 5.0e-03)"."""
    head = _own_head_rate(peaks)
    return _method_rates(peaks) + ("" if head is None else f" (head {head:.1e})")


def rate_text(rates: Mapping[str, float]) -> str:
    """Format the learning rates of the parameter groups: "1.00e-03  head 5.00e-03"."""
    head = _own_head_rate(rates)
    return _method_rates(rates, 2) + ("" if head is None else f"  {HEAD} {head:.2e}")


def rates_by_method(rates: Mapping[str, float]) -> dict[str, float]:
    """Return the learning rate of each method, from the rates of the parameter groups.

    It is the rate of the method's group without a factor, as set by the recipe.
    """
    methods: dict[str, float] = {}
    for group, rate in rates.items():
        method, _, factor = group.partition(" ")
        if method != HEAD and not (factor and method in rates):
            methods[method] = max(rate, methods.get(method, 0.0))
    return methods


def _eval_text(line: Evaluated) -> str:
    values = "  ".join(f"{name} {value:.4f}" for name, value in line.metrics.items())
    return f"step {line.step}  epoch {line.epoch:.2f}  {values}{'  best' * line.best}"


def without_nan(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by null."""
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def verdict(
    history: Sequence[Mapping[str, float]],
    best_step: int | None,
    options: RunOptions,
    metric: str,
    *,
    stopped_early: bool,
) -> list[str]:
    """Return sentences about the best evaluation, early stopping, and possible improvements."""
    if best_step is None or not history:
        return []
    best = next(record for record in history if record["step"] == best_step)
    last = history[-1]
    lines = [f"{_place(best, options, last['step'])} ({metric} {best[metric]:.4f})"]
    if stopped_early:
        count = counted(options.patience or 1, "evaluation")
        lines.append(f"stopped early: no improvement in {count}")
    elif best is last and best[metric] not in [record[metric] for record in history[-2:-1]]:
        lines.append(f"the last {_more(options)}")
    return lines


def one_class(label: str | None) -> list[str]:
    """Suggest improvements if the best evaluation predicted the same label for every row."""
    if label is None:
        return []
    return [
        f"every evaluation row is predicted as {one_line(label, 20)!r}; try",
        "another train.learning_rate, more epochs, class_weights=balanced",
    ]


def _place(record: Mapping[str, float], options: RunOptions, last: float) -> str:
    """Name an evaluation by its epoch, or by its step if it is not at the end of one."""
    epoch, step = record["epoch"], record["step"]
    if epoch != round(epoch):
        return f"step {step:,.0f} of {options.max_steps or last:,.0f}, epoch {epoch:.2f}"
    if options.max_steps:
        return f"epoch {epoch:.0f}, step {step:,.0f} of {options.max_steps:,}"
    return f"epoch {epoch:.0f} of {options.epochs}"


def _more(options: RunOptions) -> str:
    """Suggest twice the length of the run."""
    if options.max_steps:
        return f"step was the best: more may help (train.max_steps={2 * options.max_steps})"
    return f"epoch was the best: more may help (train.epochs={2 * options.epochs})"


PROJECT = "adapterhub"


@dataclass(frozen=True)
class TrackedRun:
    """The name and the id of a run in one tracker."""

    name: str
    id: str

    def arguments(self, tracker: str, is_new: bool) -> dict[str, Any]:
        """Return arguments for accelerate's tracker that continue an existing run."""
        if tracker == "wandb":
            project = os.environ.get("WANDB_PROJECT", PROJECT)
            # Its console log would send everything that the program prints.
            settings = {"console": "off", "save_code": False}
            return {"run_name": project, "name": self.name, "id": self.id, "resume": "allow",
                    "settings": settings}  # fmt: skip
        if tracker == "trackio":
            project = os.environ.get("TRACKIO_PROJECT", PROJECT)
            return {"run_name": project, "name": f"{self.name}-{self.id}", "resume": "allow"}
        if tracker == "mlflow":
            named = {"run_name": self.name} if is_new else {"run_id": self.id}
            return {"experiment_name": PROJECT, **named}
        return {"run_name": self.name}


class Tracked(Reporter):
    """Forwards losses and metrics to trackers; one that fails later is dropped with a note."""

    def __init__(
        self, folder: Path, trackers: Mapping[str, Any], ids: Mapping[str, str], console: Reporter
    ) -> None:
        self.folder, self.trackers, self.ids = folder, dict(trackers), ids
        self.console = console

    def start(self, total: int, done: int) -> None:
        """Write the ids of the run, for resuming."""
        with contextlib.suppress(OSError):  # otherwise a resumed run is tracked as a new one
            data = json.dumps(self.ids, indent=1, sort_keys=True)
            replace_file(self.folder / TRACKED, f"{data}\n".encode())

    def trained(self, line: TrainingLine, timing: Timing) -> None:
        """Log loss, learning rates and speed."""
        speed = {"train/examples_per_second": timing.examples_per_second, "epoch": line.epoch}
        self._log(line.scalars | speed, line.step)

    def evaluated(self, line: Evaluated, timing: Timing) -> None:
        """Log the metrics."""
        self._log({f"eval/{name}": value for name, value in line.metrics.items()}, line.step)

    def close(self) -> None:
        """End the run in every tracker."""
        for name in list(self.trackers):
            self._attempt(name, lambda tracker: tracker.finish())
        self.trackers.clear()

    def _log(self, values: Mapping[str, float], step: int) -> None:
        for name in list(self.trackers):
            self._attempt(name, lambda tracker: tracker.log(dict(values), step=step))

    def _attempt(self, name: str, action: Any) -> None:
        try:
            action(self.trackers[name])
        except Exception as error:  # network failures must not end the run
            del self.trackers[name]
            self.console.note(f"{name} gets no more values: {type(error).__name__}: {error}")


def start_trackers(recipe: Recipe, console: Reporter, *, resume: bool) -> Reporter:
    """Start the trackers of a recipe; must be called before anything is written.

    Raises:
        ConfigError: a tracker cannot start.
    """
    names, folder = recipe.train.tracker, Path(recipe.output)
    if not names:
        return Reporter()
    saved = _read_ids(folder / TRACKED) if resume else {}
    trackers, ids = {}, {}
    for name in names:
        run = TrackedRun(folder.resolve().name, saved.get(name) or secrets.token_hex(4))
        trackers[name] = _started(name, run, is_new=name not in saved)
        trackers[name].store_init_configuration(configuration(recipe))
        ids[name] = _id_of(name, trackers[name]) or run.id
    return Tracked(folder, trackers, ids, console)


def _started(name: str, run: TrackedRun, *, is_new: bool) -> Any:
    from accelerate import PartialState, tracking

    # accelerate's trackers write logs, which require its state; `Engine` creates its own state.
    PartialState(cpu=own_device().type == "cpu")
    try:
        tracker = tracking.LOGGER_TYPE_TO_CLASS[name](**run.arguments(name, is_new))
        getattr(tracker, "start", lambda: None)()  # before 1.11, the constructor starts it
    except Exception as error:
        raise ConfigError(
            f"{name} cannot start: {type(error).__name__}: {error}",
            hint=f"log in to {name} or set it offline, or train without train.tracker={name}",
        ) from error
    return tracker


def _id_of(name: str, tracker: Any) -> str | None:
    """Return the id chosen by MLflow; other trackers use our id."""
    return str(tracker.tracker.info.run_id) if name == "mlflow" else None


def _read_ids(path: Path) -> dict[str, str]:
    try:
        ids = json.loads(path.read_bytes())
        return {name: str(value) for name, value in ids.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def configuration(recipe: Recipe) -> dict[str, Any]:
    """Return the options of a recipe by dotted name, without local paths."""
    options = to_dict(recipe)
    for own in (options, *options["tasks"].values()):
        for name in DATA_SOURCES:
            own["data"].pop(name, None)
    del options["output"]
    if is_folder(recipe.backbone):
        options["backbone"] = Path(recipe.backbone).resolve().name
    return dict(_flat(options))


def _flat(options: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            plain = value is None or isinstance(value, bool | int | float | str)
            yield f"{above}{name}", value if plain else json.dumps(value)


class NotesOnce(Several):
    """Forwards each note once, even if several runs give it; `printed` has the notes so far."""

    def __init__(self, reporters: list[Reporter], printed: set[str]) -> None:
        super().__init__(reporters)
        self.printed = printed

    def note(self, text: str) -> None:
        """Forward a note unless a run gave it before."""
        if text not in self.printed:
            self.printed.add(text)
            super().note(text)
