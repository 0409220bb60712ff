"""Experiment trackers, through accelerate's base class and without their libraries."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import tracking
from accelerate.tracking import GeneralTracker

from adapterhub.errors import ConfigError
from adapterhub.loop.report import (
    Evaluated,
    Timing,
    TrackedRun,
    TrainingLine,
    configuration,
    start_trackers,
)
from adapterhub.recipe.output_folder import TRACKED
from adapterhub.recipe.recipe import Recipe, read
from adapterhub.training.run_data import check_trackers
from tests.kit.runs import Notes

NAMES = ("wandb", "mlflow", "trackio", "swanlab")
TIMING = Timing(1.0, 20.0, 3)


class Fake(GeneralTracker):  # type: ignore[misc]
    """Records what it gets."""

    name = "fake"
    requires_logging_directory = False
    main_process_only = False
    made: list[Fake] = []  # noqa: RUF012

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.arguments, self.events = arguments, []  # type: ignore[var-annotated]
        Fake.made.append(self)

    @property
    def tracker(self) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id="m1"))

    def start(self) -> None:
        self.events.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.events.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.events.append((step, values))

    def finish(self) -> None:
        self.events.append("finish")


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "LOGGER_TYPE_TO_CLASS", dict.fromkeys(NAMES, Fake))
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: list(NAMES[:3]))
    monkeypatch.setattr(Fake, "made", [])
    for name in ("WANDB_PROJECT", "TRACKIO_PROJECT"):
        monkeypatch.delenv(name, raising=False)


def recipe(folder: Path, *trackers: str, backbone: str = "org/model") -> Recipe:
    files = {"train": str(folder / "train.tsv"), "eval": "/home/me/dev.tsv"}
    flags = {"backbone": backbone, "output": str(folder / "mine"), "data": files, "method": "lora"}
    return read(flags=flags | {"train": {"tracker": list(trackers)}})


def test_losses_and_metrics_are_forwarded(tmp_path):
    reporter = start_trackers(recipe(tmp_path, "wandb"), Notes(), resume=False)
    (tmp_path / "mine").mkdir()
    reporter.start(9, 0)
    reporter.trained(TrainingLine(2, 0.5, 0.7, {"lora": 1e-3}), TIMING)
    reporter.evaluated(Evaluated(2, 0.5, {"accuracy": 0.9}, True), TIMING)
    reporter.close()
    reporter.close()
    (fake,) = Fake.made
    started, stored, *logged, ended = fake.events
    assert (started, ended) == ("start", "finish")
    assert stored["method"] == "lora"
    loss = {"train/loss": 0.7, "learning_rate/lora": 1e-3, "train/examples_per_second": 20.0}
    assert logged == [(2, {**loss, "epoch": 0.5}), (2, {"eval/accuracy": 0.9})]


def test_a_resumed_run_continues_the_tracked_one(tmp_path):
    plan = recipe(tmp_path, "wandb", "mlflow", "trackio")
    start_trackers(plan, Notes(), resume=True).close()  # nothing to resume yet
    (tmp_path / "mine").mkdir()
    start_trackers(plan, Notes(), resume=False).start(9, 0)
    ids = json.loads((tmp_path / "mine" / TRACKED).read_text())
    assert ids["mlflow"] == "m1"
    before = [fake.arguments for fake in Fake.made[3:]]
    start_trackers(plan, Notes(), resume=True)
    wandb, mlflow, trackio = (fake.arguments for fake in Fake.made[6:])
    assert (wandb, trackio) == (before[0], before[2])
    assert (wandb["id"], wandb["resume"]) == (ids["wandb"], "allow")
    assert trackio["name"] == f"mine-{ids['trackio']}"
    assert before[1] == {"experiment_name": "adapterhub", "run_name": "mine"}
    assert mlflow == {"experiment_name": "adapterhub", "run_id": "m1"}


def test_the_project_and_the_name_of_the_run(monkeypatch):
    assert TrackedRun("mine", "x").arguments("swanlab", True) == {"run_name": "mine"}
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    assert TrackedRun("mine", "x").arguments("wandb", True)["run_name"] == "theirs"


def test_no_path_of_the_machine_is_sent(tmp_path):
    (tmp_path / "model").mkdir()
    sent = configuration(recipe(tmp_path, "wandb", backbone=str(tmp_path / "model")))
    assert sent["backbone"] == "model"
    assert sent["train.log_every"]
    assert all(isinstance(v, str | int | float | bool) or v is None for v in sent.values())
    assert not [v for v in sent.values() if isinstance(v, str) and ("/" in v or "\\" in v)]


def test_a_tracker_that_fails_stops_a_run_before_training_and_is_left_out_later(
    tmp_path, monkeypatch
):
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network")

    notes = Notes()
    reporter = start_trackers(recipe(tmp_path, "wandb"), notes, resume=False)
    monkeypatch.setattr(Fake, "log", fail)
    for _ in range(2):
        reporter.evaluated(Evaluated(2, 0.5, {"accuracy": 0.9}, True), TIMING)
    reporter.close()
    (note,) = notes.notes
    assert "wandb gets no more values: ConnectionError: no network" in note
    monkeypatch.setattr(Fake, "start", fail)
    with pytest.raises(ConfigError, match="wandb cannot start: ConnectionError: no network"):
        start_trackers(recipe(tmp_path, "wandb"), Notes(), resume=False)
    assert not (tmp_path / "mine").exists()


def test_unknown_and_missing_trackers_are_refused():
    check_trackers(())
    check_trackers(["wandb", "mlflow"])
    for name, expected in (
        ("wandbb", r"unknown tracker 'wandbb'; did you mean 'wandb'"),
        ("swanlab", r"not installed: swanlab[^$]*pip install swanlab"),
        ("tensorboard", r"train\.tensorboard=true"),
    ):
        with pytest.raises(ConfigError, match=expected):
            check_trackers(["wandb", name])
