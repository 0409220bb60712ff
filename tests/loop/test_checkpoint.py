"""Checkpoints: round trip, kills, full disks, broken files, and resuming another run."""

import json
import math
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adapterhub.errors import ConfigError, FileError
from adapterhub.files import atomic
from adapterhub.loop import checkpoint
from adapterhub.loop.checkpoint import State
from adapterhub.loop.loop import stretch

RUN = {"method": {"lora": {"rank": 8}}, "data": "abc", "train": {"epochs": 3}}


def a_state(value: float, run: dict[str, Any] | None = None) -> State:
    tensors = {"a.weight": torch.full((3, 2), value), "b": torch.tensor(value)}
    training = {"step": torch.tensor(value), "betas": (0.9, 0.999), "none": None}
    return State(tensors, {"step": int(value), "losses": [0.1 + value]}, run or RUN, training)


def value_of(folder: Path) -> float:
    state = checkpoint.load_checkpoint(folder)
    assert state.training is not None
    steps = {float(state.progress["step"]), float(state.training["step"])}
    (value,) = steps | {*state.tensors["a.weight"].flatten().tolist()}  # no mix of two checkpoints
    return value


def test_round_trip(tmp_path):
    """Equal states are equal bytes; tied and strided tensors, and odd numbers, are kept."""
    state = a_state(5.0)
    for name in ("one", "two"):
        checkpoint.save(tmp_path / name, state)
    loaded = checkpoint.load_checkpoint(tmp_path / "one")
    assert (loaded.progress, loaded.run, loaded.training) == (state.progress, RUN, state.training)
    assert loaded.tensors.keys() == state.tensors.keys()
    assert all(torch.equal(loaded.tensors[k], state.tensors[k]) for k in state.tensors)
    files = sorted(p.name for p in (tmp_path / "one").iterdir())
    assert files == ["progress.json", "tensors.safetensors", "training.pt"]
    for name in ("progress.json", "tensors.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    weight = torch.arange(6.0).reshape(2, 3)
    tensors = {"a": weight, "b": weight, "c": weight.T}
    progress = {"loss": math.nan, "most": math.inf, "small": 5e-324, "text": "\ud800é"}
    checkpoint.save(tmp_path / "odd", State(tensors, progress, RUN))
    odd = checkpoint.load_checkpoint(tmp_path / "odd")
    assert odd.training is None
    assert all(torch.equal(odd.tensors[k], tensors[k]) for k in tensors)
    assert checkpoint.same_record(odd.progress, progress)
    assert not checkpoint.same_record({"a": 1}, {"a": 2})
    assert checkpoint.same_record({"a": 1, "b": [1, math.nan]}, {"b": (1, math.nan), "a": 1})


class Kill(BaseException):
    """Simulates the end of the process: nothing may catch it."""


def kill_at(number: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Raise Kill before the file operation of this number; the result counts the operations."""
    count = 0

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if count == number:
                raise Kill
            count += 1
            return function(*args, **kwargs)

        return counted

    for owner, name in ((os, "rename"), (os, "fsync"), (os, "unlink"), (os, "rmdir"),
                        (atomic, "_exchange"), (checkpoint, "save_file"), (torch, "save"),
                        (Path, "mkdir"), (Path, "write_text")):  # fmt: skip
        monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))
    return lambda: count


@pytest.mark.parametrize("exchange", [True, False])
def test_a_kill_at_any_file_operation_leaves_the_old_or_the_new(tmp_path, exchange, monkeypatch):
    if not exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    checkpoint.save(tmp_path / "count", a_state(1.0))
    with pytest.MonkeyPatch.context() as patch:
        count = kill_at(-1, patch)
        checkpoint.save(tmp_path / "count", a_state(2.0))
    operations = count()
    assert operations > 12
    values = []
    for number in range(operations):
        folder = tmp_path / f"run{number}" / "last"
        checkpoint.save(folder, a_state(1.0))
        with pytest.MonkeyPatch.context() as patch:
            kill_at(number, patch)
            with pytest.raises(Kill):
                checkpoint.save(folder, a_state(2.0))
        copy = tmp_path / f"copy{number}" / "last"
        shutil.copytree(folder.parent, copy.parent)
        values.append(value_of(folder))
        checkpoint.save(copy, a_state(3.0))
        assert value_of(copy) == 3.0
        assert [p.name for p in copy.parent.iterdir()] == ["last"]
    assert set(values) == {1.0, 2.0}
    assert values == sorted(values)


class Evil:
    """Code in the state of an optimizer."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self.folder,))


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def newer(file: Path) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))


BROKEN: list[tuple[str, Callable[[Path], object], str]] = [
    ("tensors.safetensors", cut, "is broken"),
    ("training.pt", cut, "is broken"),
    ("progress.json", cut, "is broken"),
    ("progress.json", newer, "format 99"),
    ("training.pt", lambda file: torch.save({"x": Evil(file.parent / "hacked")}, file),
     "is broken"),
    ("", shutil.rmtree, "no checkpoint"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "expected"), BROKEN)
def test_broken_newer_and_missing_checkpoints_are_refused(tmp_path, name, change, expected):
    folder = tmp_path / "last"
    checkpoint.save(folder, a_state(1.0))
    change(folder / name)
    with pytest.raises(FileError, match=expected):
        checkpoint.load_checkpoint(folder)
    assert not (folder / "hacked").exists()


def test_restore_copies_in_place_or_lists_every_mismatch():
    live = {"a": torch.nn.Parameter(torch.zeros(2))}
    pointer = live["a"].data_ptr()
    checkpoint.restore(live, checkpoint.State({"a": torch.ones(2)}, {}, {}))
    assert live["a"].tolist() == [1, 1]
    assert live["a"].data_ptr() == pointer
    live = {"a": torch.zeros(2), "b": torch.zeros(2), "d": torch.zeros(1)}
    saved = {"a": torch.ones(3), "c": torch.ones(1), "d": torch.ones(1)}
    with pytest.raises(FileError) as error:
        checkpoint.restore(live, checkpoint.State(saved, {}, {}))
    assert [line.split(":")[0] for line in error.value.offenders] == ["a", "b", "c"]
    assert live["d"].tolist() == [0]


@pytest.mark.parametrize(
    ("saved", "now", "offenders"),
    [
        (RUN, RUN, ()),
        (RUN, RUN | {"new": None}, ()),  # a setting that older versions lack
        (RUN, RUN | {"method": {"lora": {"rank": 16}}, "seed": 1},
         ("method.lora.rank: 8 in the checkpoint, 16 now",
          "seed: nothing in the checkpoint, 1 now")),
        ({"train": {"a": 1}}, {"train": {"a": 1, "new": "disk"}},
         ('train.new: nothing in the checkpoint, "disk" now',)),
    ],
)  # fmt: skip
def test_another_run_is_refused_with_each_difference(saved, now, offenders):
    if not offenders:
        assert not stretch(saved, json.loads(json.dumps(now)))
        return
    with pytest.raises(ConfigError, match="another run") as error:
        stretch(saved, now)
    assert error.value.offenders == offenders


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_random_states_survive_a_checkpoint(tmp_path):
    np.random.randn()
    checkpoint.save(tmp_path / "last", State({}, {}, RUN, checkpoint.random_state()))
    expected = draw()
    checkpoint.set_random_state(checkpoint.load_checkpoint(tmp_path / "last").training)
    assert draw() == expected
