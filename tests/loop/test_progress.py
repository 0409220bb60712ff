"""The progress of a run, and its round trip through a checkpoint."""

from __future__ import annotations

import dataclasses
import json

import pytest

from adapterhub.loop.loop import RunProgress


def test_steps_advance_through_epochs() -> None:
    progress = RunProgress()
    ends = []
    for next_batch in (3, 6, 8, 3):
        ends.append(progress.advance(next_batch, 8))
    assert ends == [False, False, True, False]
    assert (progress.step, progress.epoch, progress.batch) == (4, 1, 3)


def test_metrics_are_those_of_the_step_without_its_position() -> None:
    progress = RunProgress(
        history=[{"step": 2, "epoch": 0.5, "f1": 0.1}, {"step": 4, "epoch": 1.0, "f1": 0.2}]
    )
    assert progress.evaluation(4) == {"step": 4, "epoch": 1.0, "f1": 0.2}
    assert progress.metrics(2) == {"f1": 0.1}
    assert progress.metrics(None) == {}
    with pytest.raises(StopIteration):
        progress.evaluation(3)


def test_it_survives_json() -> None:
    progress = RunProgress(step=3, losses=[0.1, 0.2], history=[{"step": 2, "epoch": 0.5, "f1": 1}])
    assert RunProgress(**json.loads(json.dumps(dataclasses.asdict(progress)))) == progress


def test_all_work_counts_as_time() -> None:
    assert RunProgress(train_seconds=2.0, other_seconds=0.5).seconds == 2.5
