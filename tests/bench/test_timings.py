"""Times in turns: what they say of a run, and their files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from adapterhub.bench.records import Costs
from adapterhub.bench.timings import MethodTiming, TaskTimings, TimingFolder, fitting
from adapterhub.errors import FileError

TIMING = MethodTiming("head", 100, per_epoch=10, step=2.0, tokens=50, added_memory=7, attached=1.5)


def test_the_time_of_a_run_is_that_of_its_steps() -> None:
    assert TIMING.training(25) == 50.0
    found = TIMING.costs(Costs(trained=3, train_seconds=1.0, routed=9.0), 25)
    expected = Costs(trained=3, train_seconds=50.0, tokens_per_second=25.0, added_memory=7,
                     attached=1.5, in_turns=True)  # fmt: skip
    assert found == expected


def test_frozen_layers_are_computed_in_the_first_epoch_alone() -> None:
    replaying = replace(TIMING, replayed=0.5)
    assert replaying.training(30) == 10 * 2.0 + 20 * 0.5
    assert replaying.training(10) == 20.0
    assert replaying.training(9) == 18.0, "runs that do not see all rows replay nothing"


def test_timings_are_kept_and_the_latest_of_the_same_data_are_taken(tmp_path: Path) -> None:
    folder = TimingFolder(tmp_path / "timings")
    assert folder.all() == []
    origin = {"data": {"train": "a"}, "backbone": "b", "device": "cpu"}
    old = TaskTimings("aa", "mine", 1.0, origin, (TIMING,))
    new = replace(old, key="00", measured=2.0)
    other = replace(old, key="bb", measured=3.0, origin={**origin, "data": {"train": "c"}})
    for each in (old, other, new):
        folder.write(each)
    found = folder.all()
    assert found == [old, new, other]
    assert fitting(found, "mine", {"data": {"train": "a"}, "backbone": "b"}) == new
    assert fitting(found, "yours", origin).methods == ()
    assert (new.find("head", 100), new.find("head", 50)) == (TIMING, None)


@pytest.mark.parametrize("content", ["[]", "{", '{"format": 1, "key": "other"}'])
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "aa.json").write_text(content)
    with pytest.raises(FileError, match="delete"):
        TimingFolder(tmp_path).all()
