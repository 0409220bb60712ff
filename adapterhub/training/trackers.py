"""Experiment trackers: Weights & Biases, MLflow, Trackio and others, through accelerate's trackers.

They get the loss, the learning rates, the speed and the metrics, and the recipe without paths of
this machine; never texts of the data. `trackers.json` in the run folder has the ids of the run, so
that a resumed run continues where it was tracked.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterhub.config.options import to_dict
from adapterhub.errors import ConfigError
from adapterhub.files.atomic import replace_file
from adapterhub.loop.processes import own_device
from adapterhub.loop.report import Evaluated, Reporter, Timing, TrainingLine
from adapterhub.recipe.output_folder import TRACKED
from adapterhub.recipe.recipe import DATA_SOURCES, Recipe

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
    if Path(recipe.backbone).is_dir():
        options["backbone"] = Path(recipe.backbone).resolve().name
    return dict(_flat(options))


def _flat(options: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            plain = value is None or isinstance(value, bool | int | float | str)
            yield f"{above}{name}", value if plain else json.dumps(value)
