"""What a run says of itself: predictions.jsonl and report.html, and its verdict in words.

A failure to write the files during the run is only noted.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from adapterhub.errors import one_line
from adapterhub.files.atomic import replace_file
from adapterhub.loop.report import Evaluated, Reporter, Timing
from adapterhub.pages.page import write_page
from adapterhub.pages.predictions import PREDICTIONS, PredictionFile, outcomes_of
from adapterhub.recipe.options import RunOptions
from adapterhub.tasks import Encoded, Prediction, Task

_FIRST = 1.0  # seconds that the first page is expected to take, with the import of matplotlib
_SHARE = 0.05  # of the run's time, which its pages may take


@dataclass
class LatestPredictions:
    """The predictions of the latest evaluation."""

    task: Task
    data: Encoded
    predictions: list[Prediction] = field(default_factory=list)

    def file(self, step: int) -> PredictionFile | None:
        """Return them as the predictions file of a step."""
        labels = self.data.setting.labels
        return outcomes_of(self.task, self.data.examples, self.predictions, labels, step)


class RunPage(Reporter):
    """Keeps predictions.jsonl at the best evaluation, and report.html up to date.

    The page is made anew after an evaluation if all pages together take less than a twentieth of
    the run's time, and always at the end.
    """

    def __init__(
        self, folder: Path, latest: LatestPredictions, note: Callable[[str], None]
    ) -> None:
        self.folder, self.latest, self.note_failure = folder, latest, note
        self.due, self.failed = False, False
        self.only_class: str | None = None
        self.cost, self.spent = _FIRST, 0.0
        self.began = time.perf_counter()

    def start(self, total: int, done: int) -> None:
        """Delete predictions of a step after the checkpoint; the run gets there again."""
        path = self.folder / PREDICTIONS
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with open(path, "rb") as file:
                step = json.loads(file.readline(1 << 24))["step"]
            if step > done:
                path.unlink()

    def evaluated(self, line: Evaluated, timing: Timing) -> None:
        """Write the predictions of the best evaluation."""
        self.due = True
        if line.best:
            self._attempt(lambda: self._write_predictions(line.step))

    def flush(self) -> None:
        """Make the page anew, from the files that the other reporters wrote."""
        elapsed = time.perf_counter() - self.began
        if self.due and self.spent + self.cost <= _SHARE * elapsed:
            self._attempt(lambda: write_page(self.folder, live=True))
            self.cost = time.perf_counter() - self.began - elapsed
            self.spent += self.cost
            self.due = False

    def finish(self) -> Path | None:
        """Write the page of the finished run; return its path, or None if that failed."""
        page: list[Path] = []
        self._attempt(lambda: page.append(write_page(self.folder)))
        return page[0] if page else None

    def _write_predictions(self, step: int) -> None:
        if file := self.latest.file(step):
            self.only_class = file.only_class
            replace_file(self.folder / PREDICTIONS, file.to_bytes())

    def _attempt(self, action: Callable[[], object]) -> None:
        """Run an action; what goes wrong must not end the run, so it is one note."""
        try:
            action()
        except Exception as error:
            if not self.failed:
                self.note_failure(f"no report of this run: {type(error).__name__}: {error}")
            self.failed = True


def verdict(
    history: Sequence[Mapping[str, float]],
    best_step: int | None,
    options: RunOptions,
    metric: str,
    *,
    stopped_early: bool,
) -> list[str]:
    """Say which evaluation was the best, whether the run was stopped early, and what may help."""
    if best_step is None or not history:
        return []
    best = next(record for record in history if record["step"] == best_step)
    last = history[-1]
    lines = [f"{_place(best, options, last['step'])} ({metric} {best[metric]:.4f})"]
    if stopped_early:
        count = len([record for record in history if record["step"] > best_step])
        lines.append(f"stopped early: no improvement in {count} evaluation{'s' * (count > 1)}")
    elif best is last:
        lines.append(f"the last {_more(options)}")
    return lines


def one_class(label: str | None) -> list[str]:
    """Say what may help if the best evaluation gave every row the same label."""
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
