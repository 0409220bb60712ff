"""Times of methods that were measured in turns in one process, one JSON file for each task.

They replace what the runs of a study measured: those ran at other hours, beside other processes,
and some on other machines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from adapterhub.bench.records import Costs
from adapterhub.errors import FileError
from adapterhub.files.atomic import replace_file

TIMINGS = "timings"
FORM = 1  # of a file of timings


@dataclass(frozen=True)
class MethodTiming:
    """What one method takes with some number of training rows.

    Attributes:
        method: its name in the study.
        rows: the number of training rows.
        per_epoch: the steps of a pass over them.
        step: seconds of a step that computes all layers.
        tokens: of a step, without padding.
        replayed: seconds of a step in which the outputs of frozen layers are replayed; None if
            none are.
        added_memory: the bytes that training takes beside the loaded backbone; None where the
            system does not tell.
        attached: the time of a forward pass with the adapter, relative to the bare backbone.
        routed: the same, for a batch in which half of the rows have the adapter.
        load_seconds: of loading the saved adapter on the backbone in memory.
    """

    method: str
    rows: int
    per_epoch: int
    step: float
    tokens: float
    replayed: float | None = None
    added_memory: int | None = None
    attached: float | None = None
    routed: float | None = None
    load_seconds: float | None = None

    def training(self, steps: int) -> float:
        """Return the seconds of training for some steps.

        Frozen layers are computed once if there are steps for all rows: the first epoch computes
        all layers, the others replay those.
        """
        if self.replayed is None or steps < self.per_epoch:
            return steps * self.step
        return self.per_epoch * self.step + (steps - self.per_epoch) * self.replayed

    def costs(self, costs: Costs, steps: int) -> Costs:
        """Return the costs of a run with these times in place of those that it measured.

        Args:
            costs: those of the run.
            steps: of the run.
        """
        seconds = self.training(steps)
        return replace(
            costs,
            train_seconds=seconds,
            tokens_per_second=steps * self.tokens / seconds if seconds else 0.0,
            added_memory=self.added_memory,
            attached=self.attached,
            routed=self.routed,
            load_seconds=self.load_seconds,
            in_turns=True,
        )


@dataclass(frozen=True)
class TaskTimings:
    """The times of a task's methods on one device.

    Attributes:
        key: the digest of what they are of: data, backbone, kernels, device, methods and rows.
        task: the name of the task in the study.
        measured: when, in seconds since 1970.
        origin: versions, device, recipe, and digests of data and backbone, as in a record.
        methods: the times; a method that fails has none.
    """

    key: str
    task: str
    measured: float
    origin: dict[str, Any] = field(default_factory=dict)
    methods: tuple[MethodTiming, ...] = ()

    def find(self, method: str, rows: int) -> MethodTiming | None:
        """Return the times of a method with some number of training rows."""
        found = (each for each in self.methods if (each.method, each.rows) == (method, rows))
        return next(found, None)


class TimingFolder:
    """The timings of a study, `KEY.json` each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: str) -> Path:
        """Return the file of a task's timings."""
        return self.folder / f"{key}.json"

    def write(self, timings: TaskTimings) -> None:
        """Write the timings of a task."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"format": FORM, **asdict(timings)}, indent=2)
        replace_file(self.path(timings.key), f"{content}\n".encode())

    def all(self) -> list[TaskTimings]:
        """Return all timings, the latest last.

        Raises:
            FileError: a file is broken.
        """
        found = [read_timings(path) for path in sorted(self.folder.glob("*.json"))]
        return sorted(found, key=lambda each: (each.measured, each.key))


def read_timings(path: Path) -> TaskTimings:
    """Read the timings of one task.

    Raises:
        FileError: the file has none, or is broken.
    """
    try:
        data = json.loads(path.read_bytes())
        if data.pop("format") != FORM or data["key"] != path.stem:
            raise ValueError("it has another format or name")
        methods = tuple(MethodTiming(**each) for each in data.pop("methods"))
        return TaskTimings(**data, methods=methods)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise FileError(
            f"{path} has no times of methods: {error}",
            expected="a file that adapterhub bench wrote",
            hint=f"delete {path}: adapterhub bench measures them again",
        ) from error


def fitting(timings: Sequence[TaskTimings], task: str, origin: Mapping[str, Any]) -> TaskTimings:
    """Return the latest timings of the data and the backbone of some records, empty if none are.

    Args:
        timings: the latest last.
        task: the name of the task.
        origin: of one of its records.
    """
    for each in reversed(timings):
        same = all(each.origin.get(name) == origin.get(name) for name in ("data", "backbone"))
        if each.task == task and same:
            return each
    return TaskTimings("", task, 0.0)
