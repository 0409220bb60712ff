"""Token files: written once, complete or not at all, by any number of processes."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from adapterhub.data.options import DataOptions
from adapterhub.data.text_stream import open_stream
from adapterhub.data.token_cache import open_tokens, tokens_folder
from adapterhub.errors import DataError, OutputError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def stream(tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join(f"{n} {n + 1}" for n in range(1000)))
    return open_stream(str(tmp_path / "a.txt"), DataOptions())


def numbers(texts):
    """Tokenize texts that are numbers."""
    return np.array([int(word) for t in texts for word in t.text.split()], dtype=np.uint32)


def refused(texts):
    """Fail, since nothing should be tokenized."""
    raise AssertionError


def test_tokens_are_read_from_the_file_the_second_time(stream):
    expected = [n for i in range(1000) for n in (i, i + 1)]
    first = open_tokens(stream, "a", numbers)
    assert first.tolist() == expected
    assert isinstance(first, np.memmap)
    assert open_tokens(stream, "a", refused).tolist() == expected
    assert open_tokens(stream.drawn(10, 0), "a", numbers).size == 20, "another stream"
    with pytest.raises(AssertionError):
        open_tokens(stream, "b", refused)
    assert sorted(file.stat().st_size for file in tokens_folder().iterdir()) == [80, 8000]


def test_a_failure_leaves_no_file(stream):
    def fails(texts):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        open_tokens(stream, "a", fails)
    assert list(tokens_folder().iterdir()) == []


def test_a_file_that_changes_while_it_is_read_is_refused(stream, tmp_path):
    (tmp_path / "a.txt").write_text("1\n\n2")
    with pytest.raises(DataError, match="has changed"):
        open_tokens(stream, "a", numbers)
    assert list(tokens_folder().iterdir()) == []


def test_texts_without_tokens_are_refused(stream):
    with pytest.raises(DataError, match="contains no tokens"):
        open_tokens(stream, "a", lambda texts: np.array([], dtype=np.uint32))


def test_a_cache_that_cannot_be_written(stream, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OutputError, match="cannot be written"):
        open_tokens(stream, "a", numbers)


def test_concurrent_writers_leave_one_file(stream):
    results = []

    def write():
        results.append(open_tokens(stream, "a", numbers).tolist())

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(result == results[0] for result in results)
    assert len(list(tokens_folder().iterdir())) == 1
