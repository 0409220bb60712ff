"""Parquet columns; tests/attacks/test_bombs.py attacks their memory."""

from __future__ import annotations

import io

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize("text", ["a" * (1 << 20), None])
def test_a_column_that_states_more_than_the_limit_is_not_read(text, monkeypatch):
    """Before a batch is read: the sizes of the chunks, and the number of values."""
    table = pyarrow.table({"text": pyarrow.array([text] * (80 if text else 2_000_000), "string")})
    stream = io.BytesIO()
    pyarrow.parquet.write_table(table, stream, use_dictionary=False, compression="zstd")
    columns = open_parquet(stream.getvalue())
    monkeypatch.setattr(pyarrow.parquet, "ParquetFile", None)
    with pytest.raises(ExpansionError, match="expand to more than 67108864"):
        columns.values("text")


def test_ordinary_files_of_every_encoding_are_within_the_limits():
    """50,000 rows of text: numbers in a dictionary, and lengths and beginnings as differences."""
    text = [f"sentence number {n} of a file " * 9 for n in range(50_000)]
    table = pyarrow.table({"text": text, "label": [n % 3000 for n in range(50_000)]})
    for encoding in (None, "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"):
        stream = io.BytesIO()
        column = {"column_encoding": {"text": encoding}, "use_dictionary": ["label"]}
        pyarrow.parquet.write_table(table, stream, **(column if encoding else {}))
        columns = open_parquet(stream.getvalue())
        assert columns.values("text") == text
        assert columns.values("label")[2999:3001] == [2999, 0]


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
