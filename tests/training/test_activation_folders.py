"""The folders of recorded states: listed by their last use, and bounded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from adapterhub.training.activation_folders import (
    activation_entries,
    activations_folder,
    clear_activations,
    has_room,
)


@pytest.fixture(autouse=True)
def three_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make three folders of 100 bytes, which were used one after the other."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert activation_entries() == []
    assert clear_activations() == 0
    for used, name in enumerate(("old", "middle", "new")):
        folder = activations_folder() / name
        folder.mkdir(parents=True)
        (folder / "states.bin").write_bytes(bytes(100))
        os.utime(folder / "states.bin", (used, used))


def names() -> list[str]:
    """Return the names of the folders, the least recently used first."""
    return [entry.folder.name for entry in activation_entries()]


def test_they_are_listed_by_their_last_use_and_cleared() -> None:
    assert names() == ["old", "middle", "new"]
    assert [entry.size for entry in activation_entries()] == [100] * 3
    assert clear_activations() == 300
    assert names() == []


@pytest.mark.parametrize(
    ("size", "limit", "fits", "left"),
    [
        (100, 400, True, ["old", "middle", "new"]),
        (100, 350, True, ["middle", "new"]),
        (100, 100, True, []),
        (101, 100, False, ["old", "middle", "new"]),  # never: nothing is deleted for it
        (1 << 60, 1 << 61, False, ["old", "middle", "new"]),  # no disk has that
    ],
)
def test_the_least_recently_used_are_deleted_for_room(
    size: int, limit: int, fits: bool, left: list[str]
) -> None:
    assert has_room(size, limit) == fits
    assert names() == left
