"""Kill writers, or fill their disk, at every point.

A forked child saves, and is killed (SIGKILL) before a given line of the writer's code, of its
removal of folders, or of its writing of a file (in three pieces). test_crash.py runs the scenarios.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from adapterhub.errors import AdapterhubError, OutputError
from adapterhub.files import atomic as folder_module
from adapterhub.files import native
from adapterhub.files.manifest import BackboneRef, Manifest
from adapterhub.loop import checkpoint
from adapterhub.recipe.recipe import TrainOptions
from tests.kit.registries import IDENTITY
from tests.kit.runs import OPTIONS, Data, final_bytes, fit

REF = BackboneRef("acme/bert-tiny", None, "ab" * 32, "bert", identity=IDENTITY)
MANIFEST = Manifest(name="a", methods=({"lora": {"rank": 2}},), backbone=REF)
OLD = {"x": torch.full((40,), 2.0), "y": torch.ones(3)}
NEW = {"x": torch.full((900,), 3.0)}
TRACED = {folder_module.__file__, native.__file__, shutil.__file__, __file__}
Action = Callable[[], None]


class Torn:
    """A file that is written in three unbuffered pieces."""

    def __init__(self, path: Any, mode: str) -> None:
        self.file = open(path, mode, buffering=0)  # noqa: SIM115

    def write(self, data: bytes) -> None:
        third = len(data) // 3
        self.file.write(data[:third])
        self.file.write(data[third : 2 * third])
        self.file.write(data[2 * third :])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> Torn:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()


class Lines:
    """Counts the executed lines of the writer by tracing, and kills the process before one."""

    def __init__(self, kill_at: int | None) -> None:
        self.count, self.kill_at = 0, kill_at

    def enter(self, frame: Any, event: str, argument: object) -> Any:
        return self.line if frame.f_code.co_filename in TRACED else None

    def line(self, frame: Any, event: str, argument: object) -> Any:
        if event == "line":
            self.count += 1
            if self.count == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.line


def in_a_child(action: Callable[[], int]) -> int:
    """Run an action in a forked child; return its exit code, -9 if it was killed."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(action())
        except BaseException:
            sys.settrace(None)
            traceback.print_exc()
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def count_lines(action: Action) -> int:
    """Count the lines that an action executes, in a child."""
    reader, writer = os.pipe()

    def count() -> int:
        lines = Lines(None)
        sys.settrace(lines.enter)
        action()
        sys.settrace(None)
        os.write(writer, str(lines.count).encode())
        return 0

    assert in_a_child(count) == 0, "the writer fails without a kill"
    os.close(writer)
    with os.fdopen(reader) as pipe:
        return int(pipe.read())


def killed_at_each_line(
    prepare: Action, action: Action, check: Callable[[], str], most: int
) -> dict[str, Any]:
    """Kill the action before each line, or `most` evenly spaced ones, and count the outcomes."""
    prepare()
    total = count_lines(action)
    count = min(most, total)
    evenly = {1 + i * total // count for i in range(count)}
    points = sorted(evenly | {total})
    outcomes: collections.Counter[str] = collections.Counter()
    for point in points:
        prepare()

        def die(point: int = point) -> int:
            sys.settrace(Lines(point).enter)
            action()
            return 0

        assert in_a_child(die) == -signal.SIGKILL, f"line {point} of {total} was not reached"
        outcomes[check()] += 1
    return {"lines": total, "points": len(points), "outcomes": dict(outcomes)}


def which(tensors: dict[str, torch.Tensor]) -> str:
    """Return "old" or "new"; fail for a mix."""
    for name, expected in (("old", OLD), ("new", NEW)):
        same = tensors.keys() == expected.keys()
        if same and all(torch.equal(tensors[key], expected[key]) for key in tensors):
            return name
    raise AssertionError(f"a mix: {list(tensors)}")


def save(place: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Save an adapter with a long card."""
    native.write_adapter(place, MANIFEST, tensors, card="x" * 2000, overwrite=True)


def check_adapter(place: Path) -> str:
    """Classify the folder after a kill, then save again, which must clean up."""
    visible = [p.name for p in place.parent.iterdir() if not p.name.startswith(".")]
    assert visible in ([], [place.name]), visible
    try:
        outcome = which(native.Saved.at(place).tensors())
    except AdapterhubError:
        assert not place.exists(), "an incomplete adapter"
        outcome = "none"
    save(place, OLD)
    left = [p.name for p in place.parent.iterdir()]
    assert left == [place.name], f"left behind: {left}"
    return outcome


def adapters(place: Path, first: bool, most: int) -> dict[str, Any]:
    """Kill a save, the first or one over an existing adapter."""
    folder_module.open = Torn  # type: ignore[attr-defined]

    def prepare() -> None:
        shutil.rmtree(place.parent, ignore_errors=True)
        place.parent.mkdir()
        if not first:
            save(place, OLD)

    return killed_at_each_line(
        prepare, lambda: save(place, NEW), lambda: check_adapter(place), most
    )


def without_exchange(place: Path, most: int) -> dict[str, Any]:
    """Kill a save on a file system that cannot exchange two folders atomically."""
    folder_module._exchange = lambda one, other: False
    return adapters(place, False, most)


def stop_in_the_second_epoch(output: Path, options: TrainOptions) -> None:
    """Train until some batches after the first checkpoint."""

    class Stopped(Exception):
        pass

    batches = iter(range(11))

    def event() -> None:
        if next(batches, None) is None:
            raise Stopped

    with contextlib.suppress(Stopped):
        fit(output, options, data=Data(event))


def full_disk_in_training(place: Path, most: int) -> dict[str, Any]:
    """Train or resume under a file size limit, then without it: the bytes of an unlimited run."""
    outcomes: collections.Counter[str] = collections.Counter()
    options = dataclasses.replace(OPTIONS, tensorboard=True)
    fit(place / "whole", options)
    whole = final_bytes(place / "whole")
    stop_in_the_second_epoch(place / "begun", options)
    sizes = {path.stat().st_size for path in (place / "whole").rglob("*") if path.is_file()}
    even = {i * max(sizes) // (most // 4) for i in range(most // 4)}
    limits = sorted(even | {size - 1 for size in sizes if size} | {max(sizes) + 8})
    if most < 20:  # one that stops the run early, in the middle and late, and one that does not
        limits = [limits[0], limits[len(limits) // 2], *limits[-2:]]
    for begun, limit in itertools.product((False, True), limits):
        run = place / f"limit{limit}-{begun}"
        if begun:
            shutil.copytree(place / "begun", run)

        def limited(limit: int = limit, run: Path = run) -> int:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            try:
                fit(run, options, resume=True)
            except OutputError as error:
                assert "free some space" in error.hint, error  # noqa: PT017
                return 3
            return 0

        code = in_a_child(limited)
        assert code in (0, 3), (limit, code)
        saved = [n for n in ("last", "best") if checkpoint.exists(run / "checkpoints" / n)]
        steps = [
            checkpoint.load_checkpoint(run / "checkpoints" / n).progress["step"] for n in saved
        ]
        fit(run, options, resume=True)
        assert final_bytes(run) == whole, limit
        outcomes[f"{'stopped' if code else 'finished'} {steps}"] += 1
    return {"points": sum(outcomes.values()), "outcomes": dict(outcomes)}


SCENARIOS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "first save": lambda place, most: adapters(place, True, most),
    "overwrite": lambda place, most: adapters(place, False, most),
    "overwrite without an exchange": without_exchange,
    "full disk in training": full_disk_in_training,
}


def result_of(name: str, place: Path, most: int) -> dict[str, Any]:
    """Run a scenario in a child, because it patches modules; `most` limits the lines."""
    result = place.parent.with_suffix(".json")
    shutil.rmtree(place.parent, ignore_errors=True)
    place.parent.mkdir(parents=True)

    def run() -> int:
        if most < 1000:  # unlike a power cut, a kill loses nothing that was written
            os.fsync = lambda descriptor: None
        result.write_text(json.dumps(SCENARIOS[name](place, most)))
        return 0

    assert in_a_child(run) == 0, name
    found: dict[str, Any] = json.loads(result.read_text())
    return found
