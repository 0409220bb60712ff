"""Parquet columns; tests/attacks/test_bombs.py attacks their memory."""

import io
import subprocess
import sys

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from pyarrow.parquet import write_table

from adapterhub.data import parquet
from adapterhub.data.options import DataOptions
from adapterhub.data.parquet import ExpansionError, columns_in_structs, open_parquet, values_of
from adapterhub.data.row_stream import open_source, read_pass
from adapterhub.data.tables import read_table
from adapterhub.errors import DataError
from adapterhub.tasks import parse_task
from adapterhub.training.stream import open_examples
from tests.kit.data import write_json_lines
from tests.kit.selection import ALL

COLUMNS = {
    "text": ["a", None, "na\u00efve", "a", ""],
    "number": [1, 2, None, 4, 5],
    "float": [1.5, None, float("inf"), 0.0, 2.0],
    "list": [["a", "b"], [], None, ["a"], ["c", None]],
    "messages": [[{"role": "user", "content": "a"}], [], None, [], [{"role": "b", "content": "c"}]],
    "flag": [True, None, False, True, True],
    "a.b": ["x", "y", "z", "x", "y"],
}


def written(**options):
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


def test_a_column_that_does_not_fit_into_memory_is_not_read(monkeypatch):
    columns = open_parquet(written())
    monkeypatch.setattr(parquet, "free_memory", lambda: 99)
    with pytest.raises(ExpansionError, match="and 99 are free"):
        columns.values("text")
    monkeypatch.setattr(parquet, "free_memory", lambda: 100_000)
    assert columns.values("text") == COLUMNS["text"]


DAMAGE = """
import sys, pyarrow, pathlib
from adapterhub.data.parquet import open_parquet
original, step, *names = pathlib.Path(sys.argv[1]).read_bytes(), int(sys.argv[2]), *sys.argv[3:]
columns = len(original) - 8 - int.from_bytes(original[-8:-4], "little")
places = {place: (1, 64, 255) for place in range(4, len(original), step)}
for place in range(columns + 16, columns + 64):  # pyarrow reads no sizes of single columns there
    places.setdefault(place, (1,))
for place, changes in places.items():
    for change in changes:
        print(place, change, flush=True)
        damaged = original[:place] + bytes([original[place] ^ change]) + original[place + 1 :]
        try:
            columns = open_parquet(damaged)
            for name in names:
                columns.values(name)
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError, KeyError):
            pass
"""


def test_damaged_files_raise_the_errors_that_tables_translate(tmp_path):
    """In a process of its own, which pyarrow could end; the last place is printed.

    A changed bit in the description of the columns ends it where the size of a column is read.
    """
    (tmp_path / "a.parquet").write_bytes(written(compression="none"))
    words = [sys.executable, "-c", DAMAGE, str(tmp_path / "a.parquet"), "1" if ALL else "17"]
    done = subprocess.run([*words, *COLUMNS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20:] + done.stderr


# Structs of files, saved data sets and streams: their columns, and keys of their own.


ROWS = [{"title": "one", "body": {"text": "a b", "id": 1}}, None, {"title": "two", "body": None}]
EXPECTED = {"doc.title": ["one", None, "two"], "doc.body.text": ["a b", None, None]}


@pytest.fixture
def file(tmp_path):
    table = pyarrow.table({"doc": ROWS, "kind": ["x", "y", "x"], "kind.of": [1, 2, 3]})
    write_table(table, tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


@pytest.mark.parametrize("column", EXPECTED)
def test_fields_of_structs_are_columns(file, column):
    """Of tables, columns that are read alone, and streams."""
    whole = read_table(str(file), DataOptions(), "train")
    assert list(whole.columns) == ["doc", "kind", "kind.of", "doc.title", "doc.body.text",
                                   "doc.body.id"]  # fmt: skip
    assert list(whole.column(column)) == EXPECTED[column]
    rows = pyarrow.parquet.read_table(file)
    assert values_of(rows, column) == EXPECTED[column]
    assert values_of(rows, "kind.of") == [1, 2, 3]
    columns = open_parquet(file.read_bytes())
    assert columns.values(column) == EXPECTED[column]
    assert columns.inner["doc.body.text"] == ("body", "text")
    source = open_source(str(file), DataOptions(stream=True), "train")
    (block,) = read_pass(source, 10)
    assert set(EXPECTED) <= set(block.table.columns)
    whole_cells = {"answers": [{"text": ["a"], "answer_start": [0]}],
                   "image": [{"bytes": b"", "path": "a.png"}]}  # fmt: skip
    assert columns_in_structs(pyarrow.table(whole_cells).schema) == {}
    assert sorted(map(str, block.table.column(column))) == sorted(map(str, EXPECTED[column]))


def _called(name, **arguments):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def _tool(name, **properties):
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


def _written(way, rows, folder):
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


def _chats(options):
    task = parse_task("causal-lm")
    if options.stream:
        return [*open_examples(str(options.train), options, task)[0]]
    fitted, choice = task.fitted(str(options.train), options, "train")
    return fitted.read(str(options.train), choice.options, "train")


@pytest.fixture(scope="module")
def of_lines(tmp_path_factory):
    return _chats(_written("JSON lines", CHATS, tmp_path_factory.mktemp("lines")))


@pytest.mark.parametrize("way", WAYS)
def test_objects_have_their_own_keys_alone(tmp_path, way, of_lines):
    assert "null" not in str(of_lines).replace('"content": null', "")
    assert _chats(_written(way, CHATS, tmp_path)) == of_lines


@pytest.mark.parametrize("way", ["streamed JSON lines", "Parquet with JSON"])
def test_nulls_that_rows_have_stay_where_they_can_be_told(tmp_path, way):
    mixed = [*NULLS, CHATS[0]]
    expected = _chats(_written("JSON lines", mixed, tmp_path))
    assert all(f'"{key}": null' in str(expected) for key in "ac")
    found = _chats(_written(way, mixed, tmp_path))
    assert found == expected


def test_maps_are_objects(tmp_path):
    kind = pyarrow.map_(
        pyarrow.string(), pyarrow.struct({"a": pyarrow.int64(), "b": pyarrow.int64()})
    )
    column = pyarrow.array([[("x", {"a": 1})], [("y", {"b": 2}), ("z", None)], None], kind)
    write_table(pyarrow.table({"meta": column}), tmp_path / "a.parquet")
    found = read_table(str(tmp_path / "a.parquet"), DataOptions(), "train").column("meta")
    assert list(found) == [{"x": {"a": 1}}, {"y": {"b": 2}, "z": None}, None]


def test_a_line_that_is_no_object_of_a_stream_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n{"text": "b"}\n[1]\n')
    with pytest.raises(DataError, match="a line is not an object"):
        open_source(str(tmp_path / "a.jsonl"), DataOptions(stream=True), "train")
