"""Structs of Parquet files, saved data sets and streams: their columns, and keys of their own."""

from __future__ import annotations

from pathlib import Path

import datasets
import pyarrow
import pytest
from pyarrow.parquet import write_table

from adapterhub.data.options import DataOptions
from adapterhub.data.parquet import columns_in_structs, open_parquet, values_of
from adapterhub.data.row_stream import open_source, read_pass
from adapterhub.data.tables import read_table
from adapterhub.errors import DataError
from adapterhub.tasks import parse_task
from adapterhub.training.stream import open_examples
from tests.kit.data import write_json_lines

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


def _called(name: str, **arguments: object) -> dict[str, object]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def _tool(name: str, **properties: object) -> dict[str, object]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


# Objects with keys of their own at each depth: messages, calls, arguments in arguments, schemas.
CHATS: list[dict[str, object]] = [
    {"messages": [{"role": "user", "content": "a"}, _called("sum", a=1, b={"c": [1, 2]})],
     "tools": [_tool("sum", a={"type": "integer"}, b={"type": "object", "items": {"x": 1}})]},
    {"messages": [{"role": "user", "content": "b", "name": "ann"},
                  _called("find", city="Rome", where=[{"lat": 1.25, "inside": {"of": "it"}}]),
                  {"role": "tool", "content": "3", "tool_call_id": "1"},
                  {"role": "assistant", "content": "c", "reasoning_content": "r"}],
     "tools": [_tool("find", city={"type": "string", "enum": ["Rome", "Oslo"]}), _tool("none")]},
    {"messages": [{"role": "user", "content": "d"}, _called("sum", b={"d": 0.125})],
     "chat_template_kwargs": {"thinking": False}},
    {"messages": [{"role": "user", "content": "e"}, {"role": "assistant", "content": "f"}],
     "chat_template_kwargs": {"date": "today"}, "documents": [{"title": "t", "text": "x"}]},
]  # fmt: skip
NULLS: list[dict[str, object]] = [
    {"messages": [{"role": "user", "content": "a"}, _called("sum", a=None, b={"c": None})],
     "tools": [_tool("sum", a={"type": "integer", "default": None, "enum": [1, None]})]}
] * 3  # fmt: skip


def _written(way: str, rows: list[dict[str, object]], folder: Path) -> DataOptions:
    """Write rows of chats in a way, and return how they are read."""
    stream = way.startswith("streamed")
    if way.endswith("JSON lines"):
        return DataOptions(str(write_json_lines(folder / "rows.jsonl", rows)), stream=stream)
    names = {name: None for row in rows for name in row}  # a table has the columns of its first row
    rows = [names | row for row in rows]
    kind = way.removeprefix("streamed ")
    path = folder / "rows.parquet"
    if kind == "Parquet":
        write_table(pyarrow.Table.from_pylist(rows), path)
    elif kind == "Parquet in batches":
        write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=1)
    elif kind == "Parquet of datasets":
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif kind == "Parquet with JSON":
        datasets.Dataset.from_list(rows, on_mixed_types="use_json").to_parquet(path)
    else:
        path = folder / "saved"
        datasets.Dataset.from_list(rows, on_mixed_types=_MIXED[kind]).save_to_disk(path)
    return DataOptions(train=str(path), stream=stream)


_MIXED = {"a saved data set": None, "a saved data set with JSON": "use_json"}
WAYS = ("Parquet", "Parquet in batches", "Parquet of datasets", "Parquet with JSON",
        "a saved data set", "a saved data set with JSON", "streamed JSON lines", "streamed Parquet",
        "streamed Parquet of datasets", "streamed Parquet with JSON")  # fmt: skip


def _chats(options: DataOptions) -> list[object]:
    task = parse_task("causal-lm")
    if options.stream:
        return [*open_examples(str(options.train), options, task)[0]]
    fitted, choice = task.fitted(str(options.train), options, "train")
    return fitted.read(str(options.train), choice.options, "train")


@pytest.fixture(scope="module")
def of_lines(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    return _chats(_written("JSON lines", CHATS, tmp_path_factory.mktemp("lines")))


@pytest.mark.parametrize("way", WAYS)
def test_objects_have_their_own_keys_alone(
    tmp_path: Path, way: str, of_lines: list[object]
) -> None:
    assert "null" not in str(of_lines).replace('"content": null', "")
    assert _chats(_written(way, CHATS, tmp_path)) == of_lines


@pytest.mark.parametrize("way", ["streamed JSON lines", "Parquet with JSON"])
def test_nulls_that_rows_have_stay_where_they_can_be_told(tmp_path: Path, way: str) -> None:
    mixed = [*NULLS, CHATS[0]]
    expected = _chats(_written("JSON lines", mixed, tmp_path))
    assert all(f'"{key}": null' in str(expected) for key in "ac")
    found = _chats(_written(way, mixed, tmp_path))
    assert found == expected


def test_maps_are_objects(tmp_path: Path) -> None:
    kind = pyarrow.map_(
        pyarrow.string(), pyarrow.struct({"a": pyarrow.int64(), "b": pyarrow.int64()})
    )
    column = pyarrow.array([[("x", {"a": 1})], [("y", {"b": 2}), ("z", None)], None], kind)
    write_table(pyarrow.table({"meta": column}), tmp_path / "a.parquet")
    found = read_table(str(tmp_path / "a.parquet"), DataOptions(), "train").column("meta")
    assert list(found) == [{"x": {"a": 1}}, {"y": {"b": 2}, "z": None}, None]


def test_a_line_that_is_no_object_of_a_stream_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n{"text": "b"}\n[1]\n')
    with pytest.raises(DataError, match="a line is not an object"):
        open_source(str(tmp_path / "a.jsonl"), DataOptions(stream=True), "train")
