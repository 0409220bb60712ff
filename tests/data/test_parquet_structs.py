"""Columns in the structs of Parquet files, `doc.text`: whole, streamed, and as Arrow tables."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pytest
from pyarrow.parquet import write_table

from adapterhub.data.options import DataOptions
from adapterhub.data.parquet import columns_in_structs, open_parquet, values_of
from adapterhub.data.row_stream import open_source, read_pass
from adapterhub.data.tables import read_table

ROWS = [{"title": "one", "body": {"text": "a b", "id": 1}}, None, {"title": "two", "body": None}]
EXPECTED = {"doc.title": ["one", None, "two"], "doc.body.text": ["a b", None, None]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    table = pyarrow.table({"doc": ROWS, "kind": ["x", "y", "x"], "kind.of": [1, 2, 3]})
    write_table(table, tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


@pytest.mark.parametrize("column", EXPECTED)
def test_fields_of_structs_are_columns(file: Path, column: str) -> None:
    whole = read_table(str(file), DataOptions(), "train")
    assert list(whole.columns) == ["doc", "kind", "kind.of", "doc.title", "doc.body.text",
                                   "doc.body.id"]  # fmt: skip
    assert list(whole.column(column)) == EXPECTED[column]
    rows = pyarrow.parquet.read_table(file)
    assert values_of(rows, column) == EXPECTED[column]
    assert values_of(rows, "kind.of") == [1, 2, 3]


def test_files_and_answers_in_structs_are_read_as_a_whole() -> None:
    answers = [{"text": ["a"], "answer_start": [0]}]
    picture = [{"bytes": b"", "path": "a.png"}]
    rows = pyarrow.table({"answers": answers, "image": picture})
    assert columns_in_structs(rows.schema) == {}


def test_only_the_field_is_read(file: Path) -> None:
    columns = open_parquet(file.read_bytes())
    assert columns.values("doc.title") == EXPECTED["doc.title"]
    assert columns.inner["doc.body.text"] == ("body", "text")


@pytest.mark.parametrize("column", EXPECTED)
def test_streams_have_the_same_columns(file: Path, column: str) -> None:
    source = open_source(str(file), DataOptions(stream=True), "train")
    (block,) = read_pass(source, 10)
    assert set(EXPECTED) <= set(block.table.columns)
    assert sorted(map(str, block.table.column(column))) == sorted(map(str, EXPECTED[column]))
