"""Where the progress of a run goes: terminal, JSON lines, TensorBoard, nowhere.

`metrics.jsonl` holds only what the seed decides, so two equal runs write equal bytes; wall times go
to `timings.jsonl`. On resume each reporter drops what it has beyond the checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from adapterhub.training.options import TrainOptions
from adapterhub.training.processes import is_main


@dataclass(frozen=True)
class Timing:
    """What the clock and the allocator say: since the start (s), examples/s, peak bytes."""

    seconds: float
    examples_per_second: float
    peak_memory: int


@dataclass(frozen=True)
class TrainingLine:
    """Mean loss of the steps since the previous such line, and the learning rate of each group."""

    step: int
    epoch: float
    loss: float
    learning_rate: Mapping[str, float]


@dataclass(frozen=True)
class Evaluated:
    """The metrics of one evaluation, and whether it is the best so far."""

    step: int
    epoch: float
    metrics: Mapping[str, float]
    best: bool


class Reporter(Protocol):
    """What a training loop tells. `flush` comes before each checkpoint, `close` at the end."""

    def start(self, total: int, done: int) -> None:
        """The run has `total` steps, `done` of them before: drop what is reported after those."""

    def advance(self, step: int) -> None:
        """This many steps are done."""

    def trained(self, line: TrainingLine, timing: Timing) -> None:
        """Each `log_every` steps."""

    def evaluated(self, line: Evaluated, timing: Timing) -> None:
        """After each evaluation."""

    def note(self, text: str) -> None:
        """One sentence for the user."""

    def flush(self) -> None:
        """Make what was reported survive a kill."""

    def close(self) -> None:
        """No more comes."""


class Silent:
    """Reports nothing. The others start from it and override what they need."""

    def start(self, total: int, done: int) -> None:
        pass

    def advance(self, step: int) -> None:
        pass

    def trained(self, line: TrainingLine, timing: Timing) -> None:
        pass

    def evaluated(self, line: Evaluated, timing: Timing) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class Several:
    """Hands everything to each of its reporters."""

    def __init__(self, reporters: Iterable[Reporter]) -> None:
        self.reporters = tuple(reporters)

    def start(self, total: int, done: int) -> None:
        for reporter in self.reporters:
            reporter.start(total, done)

    def advance(self, step: int) -> None:
        for reporter in self.reporters:
            reporter.advance(step)

    def trained(self, line: TrainingLine, timing: Timing) -> None:
        for reporter in self.reporters:
            reporter.trained(line, timing)

    def evaluated(self, line: Evaluated, timing: Timing) -> None:
        for reporter in self.reporters:
            reporter.evaluated(line, timing)

    def note(self, text: str) -> None:
        for reporter in self.reporters:
            reporter.note(text)

    def flush(self) -> None:
        for reporter in self.reporters:
            reporter.flush()

    def close(self) -> None:
        for reporter in self.reporters:
            reporter.close()


class PlainLines(Silent):
    """One line a report, for logs and pipes."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.total = 0

    def start(self, total: int, done: int) -> None:
        self.total = total
        if done:
            self.note(f"resumed after step {done} of {total}")

    def trained(self, line: TrainingLine, timing: Timing) -> None:
        rate = f"{timing.examples_per_second:,.0f} examples/s"
        self.note(
            f"step {line.step}/{self.total}  epoch {line.epoch:.2f}  {_train_text(line)}  {rate}"
        )

    def evaluated(self, line: Evaluated, timing: Timing) -> None:
        self.note(_eval_text(line))

    def note(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


class Bar(Silent):
    """A progress bar with loss, learning rate and examples/s; evaluations are lines above it."""

    def __init__(self, console: Console | None = None) -> None:
        self.progress = Progress(
            TextColumn("{task.percentage:>3.0f}%"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
        )
        self.task = self.progress.add_task("", total=None)

    def start(self, total: int, done: int) -> None:
        self.progress.update(self.task, total=total, completed=done)
        self.progress.start()

    def advance(self, step: int) -> None:
        self.progress.update(self.task, completed=step)

    def trained(self, line: TrainingLine, timing: Timing) -> None:
        text = f"{_train_text(line)}  {timing.examples_per_second:,.0f} examples/s"
        self.progress.update(self.task, description=text)

    def evaluated(self, line: Evaluated, timing: Timing) -> None:
        self.note(_eval_text(line))

    def note(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self.progress.stop()


class JsonLines(Silent):
    """`metrics.jsonl` and `timings.jsonl` in `folder`, one object a line, each with its step."""

    def __init__(self, folder: Path) -> None:
        self.paths = (folder / "metrics.jsonl", folder / "timings.jsonl")
        self.files: tuple[IO[str], ...] = ()

    def start(self, total: int, done: int) -> None:
        for path in self.paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut_after(path, done)
        self.files = tuple(path.open("a", encoding="utf-8", newline="\n") for path in self.paths)

    def trained(self, line: TrainingLine, timing: Timing) -> None:
        self._write("train", line.step, dataclasses.asdict(line), timing)

    def evaluated(self, line: Evaluated, timing: Timing) -> None:
        self._write("eval", line.step, dataclasses.asdict(line), timing)

    def flush(self) -> None:
        for file in self.files:
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        for file in self.files:
            file.close()

    def _write(self, event: str, step: int, record: dict[str, Any], timing: Timing) -> None:
        metrics, timings = self.files
        clock = {"step": step, **dataclasses.asdict(timing)}
        metrics.write(json.dumps(_json_ready({"event": event, **record})) + "\n")
        timings.write(json.dumps(_json_ready({"event": event, **clock})) + "\n")


class TensorBoard(Silent):
    """Scalars for TensorBoard in `folder`; where it is not installed, `note` says so once."""

    def __init__(self, folder: Path, console: Reporter) -> None:
        self.folder = folder
        self.console = console
        self.writer: Any = None

    def start(self, total: int, done: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.console.note("TensorBoard is not installed: no events (pip install tensorboard)")
            return
        self.writer = SummaryWriter(str(self.folder), purge_step=done + 1)

    def trained(self, line: TrainingLine, timing: Timing) -> None:
        rates = {f"learning_rate/{name}": rate for name, rate in line.learning_rate.items()}
        speed = {"train/examples_per_second": timing.examples_per_second}
        self._add({"train/loss": line.loss, **rates, **speed}, line.step)

    def evaluated(self, line: Evaluated, timing: Timing) -> None:
        self._add({f"eval/{name}": value for name, value in line.metrics.items()}, line.step)

    def flush(self) -> None:
        if self.writer is not None:
            self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()

    def _add(self, scalars: Mapping[str, float], step: int) -> None:
        if self.writer is not None:
            for name, value in scalars.items():
                self.writer.add_scalar(name, value, step)


def reporter_for(output: Path, options: TrainOptions, *, quiet: bool = False) -> Reporter:
    """What a run in `output` reports to: the terminal (a bar, or lines when stderr is not one),
    the JSON lines, and TensorBoard if wanted. `quiet` leaves only the files. Of several processes
    the first alone reports."""
    if not is_main():
        return Silent()
    console = _console(quiet)
    reporters: list[Reporter] = [console, JsonLines(output)]
    if options.tensorboard:
        reporters.append(TensorBoard(output / "tensorboard", console))
    return Several(reporters)


def _console(quiet: bool) -> Reporter:
    if quiet:
        return Silent()
    return Bar() if sys.stderr.isatty() else PlainLines()


def _train_text(line: TrainingLine) -> str:
    return f"loss {line.loss:.4f}  lr {max(line.learning_rate.values(), default=0.0):.2e}"


def _eval_text(line: Evaluated) -> str:
    values = "  ".join(f"{name} {value:.4f}" for name, value in line.metrics.items())
    return f"eval at step {line.step}  epoch {line.epoch:.2f}  {values}{'  best' * line.best}"


def _cut_after(path: Path, step: int) -> None:
    """Cuts a JSON-lines file at the first line that is of a later step, or that a kill tore."""
    if not path.exists():
        return
    kept = 0
    with path.open("rb") as file:
        for line in file:
            if not _is_up_to(line, step):
                break
            kept += len(line)
    os.truncate(path, kept)


def _is_up_to(line: bytes, step: int) -> bool:
    try:
        return line.endswith(b"\n") and bool(0 < json.loads(line)["step"] <= step)
    except (ValueError, KeyError, TypeError):
        return False


def _json_ready(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, Mapping):
        return {key: _json_ready(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
