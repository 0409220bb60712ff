"""Keyed files: complete or missing, checked, and no more than their limit."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from adapterhub.config.user_folders import KeyedFiles


def numbered(files: KeyedFiles, number: int, size: int = 10) -> Path:
    """Make a file of some bytes, which was used `number` seconds after the others."""
    path = files.make(number, lambda file: file.write(bytes(size)))
    os.utime(path, (number, number))
    return path


def refused(file: object) -> None:
    """Fail, since nothing should be written."""
    raise AssertionError


def test_a_file_is_made_once(tmp_path):
    files = KeyedFiles(tmp_path / "a" / "b", 1, 100)
    assert files.find("x") is None
    path = files.make("x", lambda file: file.write(b"one"))
    assert path.read_bytes() == b"one"
    assert files.make("x", refused) == files.find("x") == path
    assert files.find("y") is None
    assert KeyedFiles(files.folder, 2, 100).find("x") is None


def test_a_damaged_file_is_made_again(tmp_path):
    files = KeyedFiles(tmp_path, 1, 100)
    path = numbered(files, 1)
    path.write_bytes(b"cut")
    assert files.find(1) is None
    assert numbered(files, 1).read_bytes() == bytes(10)
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_no_file(tmp_path):
    with pytest.raises(AssertionError):
        KeyedFiles(tmp_path, 1, 100).make("x", refused)
    assert list(tmp_path.iterdir()) == []


def test_the_files_used_longest_ago_are_deleted(tmp_path):
    files = KeyedFiles(tmp_path, 1, 30)
    first, second, third = (numbered(files, number) for number in (1, 2, 3))
    assert files.find(1) == first  # which is its last use
    fourth = numbered(files, 4)
    assert {*tmp_path.iterdir()} == {first, third, fourth}
    large = numbered(files, 5, size=1000)
    assert [*tmp_path.iterdir()] == [large], "the newest one stays"
    assert not second.exists()


def test_concurrent_writers_leave_one_file(tmp_path):
    files, found = KeyedFiles(tmp_path, 1, 100), []
    threads = [threading.Thread(target=lambda: found.append(numbered(files, 1))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [*tmp_path.iterdir()] * 4


def test_drafts_of_killed_processes_are_deleted(tmp_path):
    files = KeyedFiles(tmp_path, 1, 100)
    old, new = tmp_path / "a.new", tmp_path / "b.new"
    for draft in (old, new):
        draft.write_bytes(b"x" * 1000)
    os.utime(old, (0, 0))
    made = numbered(files, 1)
    assert {*tmp_path.iterdir()} == {new, made}, "one may be written at this moment"
