"""Parquet columns; tests/attacks/test_bombs.py attacks their memory."""

from __future__ import annotations

import io

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.data import parquet
from adapterhub.data.parquet import ExpansionError, open_parquet

COLUMNS = {
    "text": ["a", None, "na\u00efve", "a", ""],
    "number": [1, 2, None, 4, 5],
    "float": [1.5, None, float("inf"), 0.0, 2.0],
    "list": [["a", "b"], [], None, ["a"], ["c", None]],
    "messages": [[{"role": "user", "content": "a"}], [], None, [], [{"role": "b", "content": "c"}]],
    "flag": [True, None, False, True, True],
    "a.b": ["x", "y", "z", "x", "y"],
}


def written(**options) -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(COLUMNS), stream, **options)
    return stream.getvalue()


OPTIONS = (
    {}, {"use_dictionary": False}, {"compression": "none"}, {"compression": "zstd"},
    {"data_page_version": "2.0"}, {"row_group_size": 2}, {"data_page_size": 1},
    {"version": "1.0"}, {"write_statistics": False}, {"write_page_checksum": True},
    {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}},
    {"use_dictionary": False, "column_encoding": {"text": "DELTA_LENGTH_BYTE_ARRAY"}},
)  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_value_of_every_type_is_read(options):
    columns = open_parquet(written(**options))
    assert columns.names == tuple(COLUMNS)
    assert columns.rows == 5
    assert {name: columns.values(name) for name in columns.names} == COLUMNS


def test_equal_texts_are_one_object_and_never_too_large():
    """A text of 100 kB in 4,000 rows: 400 MB as objects of their own."""
    text = pyarrow.array(["a" * (100_000)]).dictionary_encode().take(pyarrow.array([0] * 4_000))
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), stream, compression="zstd")
    values = open_parquet(stream.getvalue()).values("text")
    assert len(values) == 4_000
    assert len({id(value) for value in values}) == 1


@pytest.mark.parametrize("free", [99, 100_000])
def test_a_column_that_does_not_fit_into_memory_is_not_read(free, monkeypatch):
    columns = open_parquet(written())
    monkeypatch.setattr(parquet, "free_memory", lambda: free)
    if free > 1_000:
        assert columns.values("text") == COLUMNS["text"]
    else:
        with pytest.raises(ExpansionError, match="and 99 are free"):
            columns.values("text")


@given(st.data())
def test_damaged_files_raise_the_errors_that_tables_translate(data):
    original = written(compression="none")
    place = data.draw(st.integers(4, len(original) - 1))
    damaged = bytearray(original)
    damaged[place] ^= data.draw(st.integers(1, 255))
    try:
        columns = open_parquet(bytes(damaged))
        for name in COLUMNS:
            columns.values(name)
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError, KeyError):
        pass
