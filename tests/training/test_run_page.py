"""The report of a run: written at the best step, never a failure, and its verdict in words."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest

from adapterhub.loop.report import Evaluated, Timing, one_class, verdict
from adapterhub.pages.page import PAGE
from adapterhub.pages.row_scores import PREDICTIONS, PredictionFile
from adapterhub.recipe.recipe import TrainOptions
from adapterhub.training import run
from adapterhub.training.run import LatestPredictions, RunPage
from tests.kit.runs import predictions, run_folder

ROWS = predictions("classes").rows


class Latest(LatestPredictions):
    """Predictions of any step, without a task."""

    def __init__(self) -> None:
        pass

    def file(self, step: int) -> PredictionFile:
        return replace(predictions("classes"), step=step)


def evaluated(page: RunPage, step: int, best: bool = True) -> None:
    page.evaluated(Evaluated(step, 1.0, {"accuracy": 0.5}, best), Timing(1.0, 2.0, 3))


def written_step(folder: Path) -> int:
    return int(json.loads((folder / PREDICTIONS).read_bytes().splitlines()[0])["step"])


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def page(tmp_path: Path, notes: list[str]) -> RunPage:
    return RunPage(run_folder(tmp_path), Latest(), notes.append)


def test_the_predictions_are_those_of_the_best_step(page):
    """Those that were written after the checkpoint are dropped."""
    for step, best in ((2, True), (4, True), (6, False)):
        evaluated(page, step, best)
    assert written_step(page.folder) == 4
    page.start(9, 4)
    assert written_step(page.folder) == 4
    page.start(9, 2)
    assert not (page.folder / PREDICTIONS).exists()
    (page.folder / PREDICTIONS).write_bytes(b"\xff")
    page.start(9, 2)


def test_pages_take_at_most_a_twentieth_of_the_time(page, monkeypatch):
    now = [0.0]
    made: list[float] = []

    def write(folder: Path, live: bool = False) -> None:
        assert live
        made.append(now[0])
        now[0] += 2.0

    monkeypatch.setattr(run, "write_page", write)
    monkeypatch.setattr(run.time, "perf_counter", lambda: now[0])
    page.began = 0.0
    while now[0] < 400:
        now[0] += 1
        evaluated(page, 2, best=False)
        page.flush()
        page.flush()
    assert made[0] == 20
    assert 8 <= len(made) <= 10
    assert page.spent <= 0.05 * now[0]


def test_the_last_page_is_always_written(page):
    assert page.finish() == page.folder / PAGE
    assert "<h1>" in (page.folder / PAGE).read_text()


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left"), ImportError("no matplotlib"), KeyError("x")]
)
def test_a_failure_is_one_note(error, page, notes, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(run, "write_page", fail)
    monkeypatch.setattr(run, "replace_file", fail)
    evaluated(page, 2)
    evaluated(page, 4)
    assert page.finish() is None
    (note,) = notes
    assert note.startswith(f"no report of this run: {type(error).__name__}")


def test_one_class_for_every_row_of_the_best_step_is_remembered(page):
    evaluated(page, 2)
    assert page.only_class is None
    same = replace(page.latest.file(4), rows=[r | {"prediction": "x"} for r in ROWS])
    page.latest.file = lambda step: same  # type: ignore[method-assign]
    evaluated(page, 4)
    assert page.only_class == "x"


def history(*accuracies: float, every: float = 1.0) -> list[dict[str, float]]:
    return [
        {"step": 10 * number, "epoch": every * number, "accuracy": accuracy}
        for number, accuracy in enumerate(accuracies, start=1)
    ]


EARLY, LONG = "stopped early: no improvement in ", "was the best: more may help (train."
CASES = (
    (history(0.5, 0.861, 0.8), 20, {"epochs": 3}, False, ["epoch 2 of 3 (accuracy 0.8610)"]),
    (history(0.5, 0.861, 0.8, 0.7, 0.7), 20, {"epochs": 10, "patience": 3}, True,
     ["epoch 2 of 10 (accuracy 0.8610)", f"{EARLY}3 evaluations"]),
    (history(0.5, 0.6, 0.7), 30, {"epochs": 3}, False,
     ["epoch 3 of 3 (accuracy 0.7000)", f"the last epoch {LONG}epochs=6)"]),
    (history(0.5, 0.6, 0.5, every=0.25), 20, {"epochs": 1, "eval_every": 10}, False,
     ["step 20 of 30, epoch 0.50 (accuracy 0.6000)"]),
    (history(0.6, 0.5, every=1.5), 10, {"max_steps": 2000, "patience": 1}, True,
     ["step 10 of 2,000, epoch 1.50 (accuracy 0.6000)", f"{EARLY}1 evaluation"]),
    (history(0.6), 10, {"max_steps": 10}, False,
     ["epoch 1, step 10 of 10 (accuracy 0.6000)", f"the last step {LONG}max_steps=20)"]),
    (history(float("nan")), None, {}, False, []),
    ([], None, {}, False, []),
)  # fmt: skip


@pytest.mark.parametrize(("records", "best", "options", "stopped", "expected"), CASES)
def test_the_best_evaluation_is_said_in_words(records, best, options, stopped, expected):
    said = verdict(records, best, TrainOptions(**options), "accuracy", stopped_early=stopped)
    assert said == expected
    assert all(len(line) <= 67 for line in said)  # 80 columns, less the name of the fact


def test_one_class_for_every_row_is_said_with_what_may_help():
    assert one_class(None) == []
    said = one_class("x" * 500)
    assert "predicted as 'xxx" in said[0]
    assert "class_weights=balanced" in said[1]
    assert all(len(line) <= 67 for line in said)
