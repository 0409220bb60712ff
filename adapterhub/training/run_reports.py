"""What a run reports of itself: to trackers, in predictions.jsonl and report.html, and in words.

Trackers (Weights & Biases, MLflow, Trackio and others, through accelerate's) get the loss, the
learning rates, the speed and the metrics, and the recipe without paths of this machine; never texts
of the data. `trackers.json` in the run folder has the ids of the run, so that a resumed run
continues where it was tracked. A failure to write predictions or the page during the run is only
noted.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adapterhub.config.options import to_dict
from adapterhub.config.user_folders import is_folder
from adapterhub.errors import ConfigError, counted, one_line
from adapterhub.files.atomic import replace_file
from adapterhub.files.shown_table import ScoreError
from adapterhub.loop.processes import own_device
from adapterhub.loop.report import Evaluated, Reporter, Timing, TrainingLine
from adapterhub.pages.page import write_page
from adapterhub.pages.predictions import (
    PREDICTIONS,
    PredictionFile,
    outcomes_of,
    read_predictions,
)
from adapterhub.pages.run_files import BAG_OF_WORDS, WordsComparison
from adapterhub.pages.score_errors import EvaluatedRows, score_errors
from adapterhub.recipe.options import RunOptions
from adapterhub.recipe.output_folder import TRACKED
from adapterhub.recipe.recipe import DATA_SOURCES, Recipe
from adapterhub.status import doing
from adapterhub.tasks import Encoded, Prediction, Task
from adapterhub.training.run_data import RunData
from adapterhub.training.task_mixture import TaskRows
from adapterhub.training.word_baseline import compare_with_words

_FIRST = 1.0  # seconds that the first page is expected to take, with the import of matplotlib
_SHARE = 0.05  # of the run's time, which its pages may take


@dataclass
class LatestPredictions:
    """The predictions of the latest evaluation: of one task, or of several, one after the other."""

    task: Task
    data: Encoded
    predictions: list[Prediction] = field(default_factory=list)

    def file(self, step: int) -> PredictionFile | None:
        """Return them as the predictions file of a step."""
        labels = self.data.setting.labels
        return outcomes_of(self.task, self.data.examples, self.predictions, labels, step)

    def errors(self, metrics: Mapping[str, float]) -> dict[str, ScoreError]:
        """Return the errors of the scores of the evaluation."""
        parts, start = dict[str, EvaluatedRows](), 0
        complete = len(self.predictions) == len(self.data.examples)
        for part in self.data.parts:
            end = start + len(part.examples)
            own, labels = self.predictions[start:end], part.setting.labels
            file = outcomes_of(part.task, part.examples, own, labels, 0) if complete else None
            before = f"{part.name}/" if isinstance(part, TaskRows) else ""
            parts[before] = EvaluatedRows(end - start, file)
            start = end
        return score_errors(metrics, parts)


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
        self.words: WordsComparison | None = None
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

    def compare_with_words(
        self,
        data: RunData,
        rows: Sequence[Any],
        found: PredictionFile | None,
        best_step: int | None,
    ) -> None:
        """Compare what is predicted for some rows with a bag of words, and record it.

        `found` are the predictions; None: those of the best evaluation, in the run folder.
        """

        def compare() -> None:
            kept = found or read_predictions(self.folder)
            if kept is None or (found is None and kept.step != best_step):
                return
            with doing("fitting a bag of words"):
                self.words = compare_with_words(data, rows, kept)
            path = self.folder / BAG_OF_WORDS
            if self.words is None:
                path.unlink(missing_ok=True)
            else:
                replace_file(path, f"{json.dumps(self.words.record())}\n".encode())

        self._attempt(compare)

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
        count = counted(options.patience or 1, "evaluation")
        lines.append(f"stopped early: no improvement in {count}")
    elif best is last and best[metric] not in [record[metric] for record in history[-2:-1]]:
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


PROJECT = "adapterhub"


@dataclass(frozen=True)
class TrackedRun:
    """The name and the id of a run in one tracker."""

    name: str
    id: str

    def arguments(self, tracker: str, is_new: bool) -> dict[str, Any]:
        """Return the arguments of accelerate's tracker, which continue a run that is not new."""
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
    """Forwards losses and metrics to trackers; one that fails later is noted and left out."""

    def __init__(
        self, folder: Path, trackers: Mapping[str, Any], ids: Mapping[str, str], console: Reporter
    ) -> None:
        self.folder, self.trackers, self.ids = folder, dict(trackers), ids
        self.console = console

    def start(self, total: int, done: int) -> None:
        """Write the ids of the run, for a resume."""
        with contextlib.suppress(OSError):  # then a resumed run is tracked as a new one
            data = json.dumps(self.ids, indent=1, sort_keys=True)
            replace_file(self.folder / TRACKED, f"{data}\n".encode())

    def trained(self, line: TrainingLine, timing: Timing) -> None:
        """Log loss, learning rates and speed."""
        rates = {f"learning_rate/{name}": rate for name, rate in line.learning_rate.items()}
        speed = {"train/examples_per_second": timing.examples_per_second, "epoch": line.epoch}
        self._log({"train/loss": line.loss, **rates, **speed}, line.step)

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
        except Exception as error:  # a network that fails must not end the run
            del self.trackers[name]
            self.console.note(f"{name} gets no more values: {type(error).__name__}: {error}")


def start_trackers(recipe: Recipe, console: Reporter, *, resume: bool) -> Reporter:
    """Start the trackers of a recipe; call it before anything is written.

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

    # accelerate's trackers log, which needs its state; `Engine` makes its own.
    PartialState(cpu=own_device().type == "cpu")
    try:
        tracker = tracking.LOGGER_TYPE_TO_CLASS[name](**run.arguments(name, is_new))
        getattr(tracker, "start", lambda: None)()  # before 1.11, the constructor starts
    except Exception as error:
        raise ConfigError(
            f"{name} cannot start: {type(error).__name__}: {error}",
            hint=f"log in to {name} or set it offline, or train without train.tracker={name}",
        ) from error
    return tracker


def _id_of(name: str, tracker: Any) -> str | None:
    """Return the id that MLflow chose; the others take ours."""
    return str(tracker.tracker.info.run_id) if name == "mlflow" else None


def _read_ids(path: Path) -> dict[str, str]:
    try:
        ids = json.loads(path.read_bytes())
        return {name: str(value) for name, value in ids.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def configuration(recipe: Recipe) -> dict[str, Any]:
    """Return the options of a recipe by dotted name, without paths of this machine."""
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
