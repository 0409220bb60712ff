"""Results are remembered until one of the files changes."""

from __future__ import annotations

import os

import pytest

from adapterhub.backbones import checkpoint
from adapterhub.backbones.checkpoint import remembered


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(checkpoint, "TICK", 0)
    return tmp_path / "cache" / "adapterhub" / "weights"


@pytest.fixture
def count(tmp_path, cache):
    """Return a function that says how often a result was computed."""
    file, calls = tmp_path / "a", []
    file.write_bytes(b"one")

    def run(key="k"):
        remembered([file], key, lambda: calls.append(1) or file.read_text())
        return len(calls)

    run.file = file
    return run


def test_a_result_is_computed_once(count):
    assert [count(), count(), count("other key"), count()] == [1, 1, 2, 2]


def test_a_file_that_has_just_changed_is_not_remembered(count, monkeypatch):
    """Another change may follow within the same tick of the clock."""
    monkeypatch.setattr(checkpoint, "TICK", 2_000_000_000)
    assert [count(), count()] == [1, 2]


def test_a_change_that_keeps_size_and_time_is_seen(count):
    assert count() == 1
    times = os.stat(count.file)
    count.file.write_bytes(b"two")
    os.utime(count.file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert count() == 2


def test_another_file_under_the_same_name_is_seen(count, tmp_path):
    assert count() == 1
    (tmp_path / "b").write_bytes(b"one")
    os.replace(tmp_path / "b", count.file)
    assert count() == 2


def test_a_file_that_changes_meanwhile_is_not_remembered(tmp_path, cache):
    file = tmp_path / "a"
    file.write_bytes(b"one")
    assert remembered([file], "k", lambda: file.write_bytes(b"other") and "stale") == "stale"
    assert remembered([file], "k", lambda: "fresh") == "fresh"


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff"])
def test_a_damaged_or_unwritable_cache_does_no_harm(count, cache, damage):
    assert count() == 1
    (path,) = cache.iterdir()
    path.write_bytes(damage)
    assert count() == 2
    assert count() == 2
    path.unlink()
    cache.rmdir()
    cache.write_text("in the way")
    assert count() == 3
