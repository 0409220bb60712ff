"""Reporters: terminal, JSON lines, TensorBoard, and trackers without their libraries."""

import io
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from accelerate import tracking
from rich.console import Console

from adapterhub.errors import ConfigError, OutputError
from adapterhub.files.atomic import file_digest
from adapterhub.loop import report
from adapterhub.loop.report import Bar, Reporter, Several, Timing, TrainingLine, start_trackers
from adapterhub.recipe.output_folder import TRACKED
from adapterhub.recipe.recipe import Recipe, RunOptions, read
from adapterhub.training.run_data import check_trackers
from tests.kit.runs import Notes, fit, lines


def test_a_pipe_gets_plain_lines_and_a_terminal_a_bar(tmp_path):
    stream, shown = io.StringIO(), io.StringIO()
    console = Console(file=shown, force_terminal=True, width=120)
    fit(tmp_path, reporter=Several([report.PlainLines(stream), Bar(console)]))
    text = stream.getvalue().splitlines()
    assert len(text) == 1 + 3 + 2
    assert text[0].startswith("6 steps; learning rate up to 1.0e-02, 1 step of warm-up, linear")
    assert text[1].startswith("step 2/6  epoch 0.75  loss ")
    assert "step 3  epoch 1.00  accuracy" in text[2]
    assert "6/6" in shown.getvalue()
    assert "step 6  epoch 2.00  accuracy" in shown.getvalue()


def test_tensorboard_writes_events_or_says_once_that_it_cannot(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
        options = RunOptions(max_steps=2)
        fit(tmp_path, options, reporter=report.reporter_for(tmp_path, options))
        assert capsys.readouterr().err.count("TensorBoard is not installed") == 1
        assert not (tmp_path / "tensorboard").exists()
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    output, options = tmp_path / "written", RunOptions(max_steps=4, log_every=2, eval_every=2)
    monkeypatch.setenv("RANK", "1")
    assert type(report.reporter_for(output, options)) is Reporter, "only the first process reports"
    monkeypatch.setenv("RANK", "0")
    fit(output, options, reporter=report.reporter_for(output, options, quiet=True))
    events = EventAccumulator(str(output / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [2, 4]
    assert [e.step for e in events.Scalars("eval/accuracy")] == [2, 4]


TIMING = Timing(1.0, 20.0, 3)


def record(step: int, loss: float = 0.5) -> TrainingLine:
    return TrainingLine(step=step, epoch=0.1 * step, loss=loss, learning_rate={"lora": 1e-3})


def test_json_lines_drop_what_follows_the_checkpoint(tmp_path):
    first = report.JsonLines(tmp_path)
    first.start(9, 0)
    for step in (2, 4, 6):
        first.trained(record(step), TIMING)
        if step == 4:
            first.flush()
            written = first.written()
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "train", "st')
    again = report.JsonLines(tmp_path)
    again.check(written)
    again.start(9, 4)
    again.trained(record(5), TIMING)
    again.close()
    for name in ("metrics.jsonl", "timings.jsonl"):
        assert [row["step"] for row in lines(tmp_path / name)] == [2, 4, 5]
        assert again.written()[name] == file_digest(tmp_path / name)
    lacking = report.JsonLines(tmp_path / "lacking")  # numbers that JSON lacks
    (tmp_path / "lacking").mkdir()
    lacking.start(9, 0)
    lacking.trained(record(1, math.nan), Timing(1.0, math.inf, 3))
    lacking.close()
    assert lines(tmp_path / "lacking/metrics.jsonl")[0]["loss"] is None
    assert lines(tmp_path / "lacking/timings.jsonl")[0]["examples_per_second"] is None


NAMES = ("wandb", "mlflow", "trackio", "swanlab")


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[mock.Mock]:
    """Let trackers record what they get; return them."""
    made: list[mock.Mock] = []

    def make(**arguments: Any) -> mock.Mock:
        made.append(mock.Mock(arguments=arguments))
        made[-1].tracker.info.run_id = "m1"
        return made[-1]

    monkeypatch.setattr(tracking, "LOGGER_TYPE_TO_CLASS", dict.fromkeys(NAMES, make))
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: list(NAMES[:3]))
    for name in ("WANDB_PROJECT", "TRACKIO_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    return made


def recipe(folder: Path, *trackers: str, backbone: str = "org/model") -> Recipe:
    files = {"train": str(folder / "train.tsv"), "eval": "/home/me/dev.tsv"}
    flags = {"backbone": backbone, "output": str(folder / "mine"), "data": files, "method": "lora"}
    return read(flags=flags | {"train": {"tracker": list(trackers)}})


def test_losses_and_metrics_are_forwarded(tmp_path, made):
    reporter = start_trackers(recipe(tmp_path, "wandb"), Notes(), resume=False)
    (tmp_path / "mine").mkdir()
    reporter.start(9, 0)
    reporter.trained(TrainingLine(2, 0.5, 0.7, {"lora": 1e-3}), TIMING)
    reporter.evaluated(report.Evaluated(2, 0.5, {"accuracy": 0.9}, True), TIMING)
    reporter.close()
    reporter.close()
    loss = {"train/loss": 0.7, "learning_rate/lora": 1e-3, "train/examples_per_second": 20.0}
    (tracker,) = made
    assert tracker.mock_calls == [
        mock.call.start(),
        mock.call.store_init_configuration(mock.ANY),
        mock.call.log({**loss, "epoch": 0.5}, step=2),
        mock.call.log({"eval/accuracy": 0.9}, step=2),
        mock.call.finish(),
    ]
    assert tracker.store_init_configuration.call_args.args[0]["method"] == "lora"


def test_a_resumed_run_continues_the_tracked_one(tmp_path, made, monkeypatch):
    plan = recipe(tmp_path, "wandb", "mlflow", "trackio")
    start_trackers(plan, Notes(), resume=True).close()  # nothing to resume yet
    (tmp_path / "mine").mkdir()
    start_trackers(plan, Notes(), resume=False).start(9, 0)
    ids = json.loads((tmp_path / "mine" / TRACKED).read_text())
    assert ids["mlflow"] == "m1"
    before = [tracker.arguments for tracker in made[3:]]
    start_trackers(plan, Notes(), resume=True)
    wandb, mlflow, trackio = (tracker.arguments for tracker in made[6:])
    assert (wandb, trackio) == (before[0], before[2])
    assert (wandb["id"], wandb["resume"]) == (ids["wandb"], "allow")
    assert trackio["name"] == f"mine-{ids['trackio']}"
    assert before[1] == {"experiment_name": "adapterhub", "run_name": "mine"}
    assert mlflow == {"experiment_name": "adapterhub", "run_id": "m1"}
    assert report.TrackedRun("mine", "x").arguments("swanlab", True) == {"run_name": "mine"}
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    assert report.TrackedRun("mine", "x").arguments("wandb", True)["run_name"] == "theirs"


def test_no_path_of_the_machine_is_sent(tmp_path):
    (tmp_path / "model").mkdir()
    sent = report.configuration(recipe(tmp_path, "wandb", backbone=str(tmp_path / "model")))
    assert sent["backbone"] == "model"
    assert sent["train.log_every"]
    assert all(isinstance(v, str | int | float | bool) or v is None for v in sent.values())
    assert not [v for v in sent.values() if isinstance(v, str) and ("/" in v or "\\" in v)]


def test_a_tracker_that_fails_stops_a_run_before_training_and_is_left_out_later(
    tmp_path, made, monkeypatch
):
    notes = Notes()
    reporter = start_trackers(recipe(tmp_path, "wandb"), notes, resume=False)
    fail = mock.Mock(side_effect=ConnectionError("no network"))
    made[0].log = fail
    for _ in range(2):
        reporter.evaluated(report.Evaluated(2, 0.5, {"accuracy": 0.9}, True), TIMING)
    reporter.close()
    (note,) = notes.notes
    assert "wandb gets no more values: ConnectionError: no network" in note
    assert fail.call_count == 1
    monkeypatch.setattr(tracking, "LOGGER_TYPE_TO_CLASS", {"wandb": fail})
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


def test_several_forwards_every_report_to_each_reporter():
    reporters = [Notes(stop_after=3), Notes(stop_after=0)]
    several = Several(reporters)
    several.note("hello")
    several.trained(record(1), TIMING)
    assert [(r.notes, r.losses) for r in reporters] == [(["hello"], [0.5])] * 2
    with pytest.raises(KeyboardInterrupt):
        several.advance(1)
    closed = mock.Mock(side_effect=OutputError("the disk is full"))
    with pytest.raises(OutputError, match="the disk is full"):
        Several([SimpleNamespace(close=closed)] * 2).close()
    assert closed.call_count == 2
    forwarded = {name for name in vars(Several) if not name.startswith("_")}
    assert forwarded == {name for name in vars(Reporter) if not name.startswith("_")}
