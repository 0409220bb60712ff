"""The progress of a run and its clock: what counts as training, and the speed between reports."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys

import pytest
import torch

from adapterhub.loop import loop as clock
from adapterhub.loop.loop import RunClock, RunProgress, peak_memory

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """One second passes between two readings of the clock."""
    readings = itertools.count()
    monkeypatch.setattr(clock.time, "perf_counter", lambda: float(next(readings)))


def test_time_is_training_or_other_work() -> None:
    progress = RunProgress()
    run_clock = RunClock(progress, CPU)
    run_clock.add_training()
    run_clock.add_other()
    run_clock.add_other()
    assert (progress.train_seconds, progress.other_seconds) == (1.0, 2.0)


def test_speed_is_measured_since_the_last_report() -> None:
    progress = RunProgress(examples=100, train_seconds=50.0)
    run_clock = RunClock(progress, CPU)
    progress.examples += 8
    assert run_clock.timing().examples_per_second == 8.0
    run_clock.restart_speed()
    progress.examples += 6
    timing = run_clock.timing()
    assert timing.examples_per_second == 6.0
    assert timing.seconds == 52.0


def test_the_peak_memory_never_falls() -> None:
    progress = RunProgress(peak_memory=1 << 60)
    assert RunClock(progress, CPU).timing().peak_memory == 1 << 60
    assert 1_000_000 < peak_memory(CPU) < 1 << 50


LARGE = 3 << 29


@pytest.mark.apart
def test_the_memory_of_the_process_grows_with_what_it_holds() -> None:
    """Before and after it holds 256 MiB, and its peak, of which its large parent is no part."""
    code = (  # a process of its own, which gives nothing back meanwhile
        "import torch; from adapterhub.loop.loop import *; before = process_memory();"
        "held = torch.ones(256 << 20, dtype=torch.uint8); after = process_memory();"
        "print(before, after, peak_memory(torch.device('cpu')))"
    )
    held = torch.ones(LARGE, dtype=torch.uint8)
    found = subprocess.check_output([sys.executable, "-c", code]).split()
    assert len(held) == LARGE, "it was held meanwhile"
    before, after, peak = map(int, found)
    assert before + (128 << 20) < after <= 1.1 * peak
    assert 1 << 20 < peak < LARGE


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
    progress = RunProgress(
        step=3, losses=[0.1, 0.2], history=[{"step": 2, "epoch": 0.5, "f1": 1}],
        train_seconds=2.0, other_seconds=0.5,
    )  # fmt: skip
    assert progress.seconds == 2.5
    assert RunProgress(**json.loads(json.dumps(dataclasses.asdict(progress)))) == progress
