"""Methods with as many steps as take the time of the baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence

from adapterhub.bench.cells import Group
from adapterhub.bench.study import EqualSteps
from adapterhub.bench.timings import MethodTiming
from adapterhub.bench.wording import time_words

NEAR = 1.1  # two numbers of steps are about equal up to this factor
MOST = 10  # times the steps of the method; more would only learn the training rows by heart
LEAST = 1


def equal_time_steps(
    groups: Sequence[Group], timings: Sequence[MethodTiming], baseline: str
) -> tuple[list[EqualSteps], list[str]]:
    """Return the steps of each method that take the baseline's time, and notes for the user.

    Methods whose own steps take about as long are left out, and so are those without a time; the
    baseline itself is among them, with its own steps.

    Args:
        groups: the methods of one task.
        timings: their times.
        baseline: the method whose time the others get.
    """
    times = {(timing.method, timing.rows): timing for timing in timings}
    chosen, notes = [], []
    for usual in (group for group in groups if group.method == baseline):
        if (timing := times.get((baseline, usual.rows))) is None:
            notes.append(f"{usual.task}: {baseline} fails, so no method can have its time")
            continue
        seconds = timing.training(usual.steps)
        chosen.append(EqualSteps(usual.task, usual.rows, baseline, usual.steps))
        notes.append(f"{usual.task}: {usual.steps} steps of {baseline} take {time_words(seconds)}")
        for group in groups:
            timing = times.get((group.method, group.rows))
            if timing is None or group.rows != usual.rows or group.method == baseline:
                continue
            wanted = steps_within(timing, seconds)
            steps = max(LEAST, min(wanted, MOST * group.steps))
            if max(wanted, group.steps) > NEAR * min(wanted, group.steps):
                chosen.append(EqualSteps(group.task, group.rows, group.method, steps))
                notes.append(_note(group, steps, wanted))
    return chosen, notes


def _note(group: Group, steps: int, wanted: int) -> str:
    more = f", the most; its time would allow {wanted:,}" if wanted > steps else ""
    return f"{group.task}: {group.method} has {group.steps} steps; also with {steps}{more}"


def steps_within(timing: MethodTiming, seconds: float) -> int:
    """Return how many steps fit into a time, with three digits: the inverse of `training`."""
    first = timing.per_epoch * timing.step
    if timing.replayed is None or seconds < first:
        return _rounded(seconds / timing.step)
    return _rounded(timing.per_epoch + (seconds - first) / timing.replayed)


def _rounded(steps: float) -> int:
    if steps < 1:
        return 0
    unit = 10 ** max(0, math.floor(math.log10(steps)) - 2)
    return int(round(steps / unit) * unit)
