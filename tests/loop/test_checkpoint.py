"""Checkpoints: round trip, kills, full disks, broken files, and resuming another run."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adapterhub.errors import ConfigError, FileError, OutputError
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
    values: set[float] = {
        float(state.progress["step"]),
        float(state.training["step"]),
        *state.tensors["a.weight"].flatten().tolist(),
    }
    assert len(values) == 1, "parts of two checkpoints are mixed"
    return values.pop()


def test_a_record_with_numbers_that_json_lacks(tmp_path: Path) -> None:
    progress = {"loss": float("nan"), "most": float("inf"), "small": 5e-324, "text": "\ud800é"}
    checkpoint.save(tmp_path / "last", State({}, progress, RUN))
    loaded = checkpoint.load_checkpoint(tmp_path / "last").progress
    assert checkpoint.same_record(loaded, progress)


def test_round_trip(tmp_path: Path) -> None:
    folder, state = tmp_path / "checkpoints" / "last", a_state(5.0)
    checkpoint.save(folder, state)
    loaded = checkpoint.load_checkpoint(folder)
    assert loaded.progress == state.progress
    assert loaded.run == RUN
    assert loaded.training == state.training
    assert loaded.tensors.keys() == state.tensors.keys()
    assert all(torch.equal(loaded.tensors[k], state.tensors[k]) for k in state.tensors)


def test_equal_states_are_equal_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        checkpoint.save(tmp_path / name, a_state(1.0))
    files = sorted(p.name for p in (tmp_path / "one").iterdir())
    assert files == ["progress.json", "tensors.safetensors", "training.pt"]
    for name in ("progress.json", "tensors.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_tied_and_strided_tensors_are_saved(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    tensors = {"a": weight, "b": weight, "c": weight.T}
    checkpoint.save(tmp_path / "last", State(tensors, {}, RUN))
    loaded = checkpoint.load_checkpoint(tmp_path / "last")
    assert loaded.training is None
    assert all(torch.equal(loaded.tensors[k], tensors[k]) for k in tensors)


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


def count_operations(tmp_path: Path) -> int:
    checkpoint.save(tmp_path / "count", a_state(1.0))
    with pytest.MonkeyPatch.context() as patch:
        operations = kill_at(-1, patch)
        checkpoint.save(tmp_path / "count", a_state(2.0))
    return operations()


@pytest.mark.parametrize("exchange", [True, False])
def test_a_kill_at_any_file_operation_leaves_the_old_or_the_new(
    tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    operations = count_operations(tmp_path)
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


def test_a_kill_in_the_first_save_leaves_no_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "last"
    with pytest.MonkeyPatch.context() as patch:
        kill_at(4, patch)
        with pytest.raises(Kill):
            checkpoint.save(folder, a_state(1.0))
    assert not checkpoint.exists(folder)
    assert not folder.exists()
    checkpoint.save(folder, a_state(1.0))
    assert list(tmp_path.iterdir()) == [folder], "the next save removes what the kill left"


def test_a_full_disk_keeps_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "last"
    checkpoint.save(folder, a_state(1.0))

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OutputError, match="No space left on device"):
        checkpoint.save(folder, a_state(2.0))
    assert [p.name for p in tmp_path.iterdir()] == ["last"]
    assert value_of(folder) == 1.0


@pytest.mark.parametrize("name", ["tensors.safetensors", "training.pt", "progress.json"])
def test_a_truncated_file_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "last"
    checkpoint.save(folder, a_state(1.0))
    os.truncate(folder / name, (folder / name).stat().st_size // 2)
    with pytest.raises(FileError, match="is broken"):
        checkpoint.load_checkpoint(folder)


def test_missing_and_newer_checkpoints_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "last"
    with pytest.raises(FileError, match="no checkpoint"):
        checkpoint.load_checkpoint(folder)
    checkpoint.save(folder, a_state(1.0))
    record = json.loads((folder / "progress.json").read_text())
    (folder / "progress.json").write_text(json.dumps({**record, "format": 99}))
    with pytest.raises(FileError, match="format 99"):
        checkpoint.load_checkpoint(folder)


def test_optimizer_state_cannot_hold_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "hacked"),))

    folder = tmp_path / "last"
    checkpoint.save(folder, a_state(1.0))
    torch.save({"x": Evil()}, folder / "training.pt")
    with pytest.raises(FileError, match="is broken"):
        checkpoint.load_checkpoint(folder)
    assert not (tmp_path / "hacked").exists()


def test_restore_copies_in_place() -> None:
    live = {"a": torch.nn.Parameter(torch.zeros(2))}
    pointer = live["a"].data_ptr()
    checkpoint.restore(live, checkpoint.State({"a": torch.ones(2)}, {}, {}))
    assert live["a"].tolist() == [1, 1]
    assert live["a"].data_ptr() == pointer


def test_restore_lists_every_mismatch_and_changes_nothing() -> None:
    live = {"a": torch.zeros(2), "b": torch.zeros(2), "d": torch.zeros(1)}
    saved = {"a": torch.ones(3), "c": torch.ones(1), "d": torch.ones(1)}
    with pytest.raises(FileError) as error:
        checkpoint.restore(live, checkpoint.State(saved, {}, {}))
    assert [line.split(":")[0] for line in error.value.offenders] == ["a", "b", "c"]
    assert live["d"].tolist() == [0]


def test_records_are_compared_as_json() -> None:
    assert checkpoint.same_record(
        {"a": 1, "b": [1, float("nan")]}, {"b": (1, float("nan")), "a": 1}
    )
    assert not checkpoint.same_record({"a": 1}, {"a": 2})


def test_another_run_is_refused_with_each_difference() -> None:
    other = {"method": {"lora": {"rank": 16}}, "data": "abc", "train": {"epochs": 3}, "seed": 1}
    stretch(RUN, json.loads(json.dumps(RUN)))
    with pytest.raises(ConfigError) as error:
        stretch(RUN, other)
    assert error.value.offenders == (
        "method.lora.rank: 8 in the checkpoint, 16 now",
        "seed: nothing in the checkpoint, 1 now",
    )


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_random_states_survive_a_checkpoint(tmp_path: Path) -> None:
    np.random.randn()
    checkpoint.save(tmp_path / "last", State({}, {}, RUN, checkpoint.random_state()))
    expected = [draw() for _ in range(3)]
    state = checkpoint.load_checkpoint(tmp_path / "last").training
    assert state is not None
    checkpoint.set_random_state(state)
    assert [draw() for _ in range(3)] == expected


def test_a_setting_that_older_versions_lack_is_null() -> None:
    assert not stretch({"train": {"a": 1}}, {"train": {"a": 1, "new": None}})
    with pytest.raises(ConfigError, match="another run") as error:
        stretch({"train": {"a": 1}}, {"train": {"a": 1, "new": "disk"}})
    assert error.value.offenders == ('train.new: nothing in the checkpoint, "disk" now',)
