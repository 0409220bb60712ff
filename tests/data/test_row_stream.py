"""Blocks of streamed rows: each row once in a pass, shared by processes, drawn again exactly."""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from itertools import islice

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterhub.data.options import DataOptions
from adapterhub.data.row_stream import (
    BlockReader,
    Cursor,
    cursor_of,
    is_many_files,
    open_source,
    read_blocks,
    read_pass,
)
from adapterhub.errors import DataError
from tests.kit.data import write_shards
from tests.kit.selection import ALL

SIZES = (20, 13, 31)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    pattern = write_shards(tmp_path_factory.mktemp("shards"), SIZES)
    return open_source(pattern, DataOptions(), "train")


def texts(source, reader, turn):
    """Return the texts of one pass."""
    found: list[str] = []
    for block in read_blocks(source, reader, Cursor(turn)):
        if block.cursor.turn != turn:
            return found
        found += map(str, block.table.column("text"))
    raise AssertionError


def test_a_pass_has_every_row_once_from_several_shards_and_in_an_order_of_its_own(source):
    blocks = list(read_pass(source, 10))
    assert [len(block.table.lines) for block in blocks] == [10] * 6 + [4]
    found = [text for block in blocks for text in block.table.column("text")]
    assert len({*found}) == len(found) == sum(SIZES)
    block = next(read_blocks(source, BlockReader(9, seed=1)))
    shards = Counter(str(place).split(" of ")[1] for place in block.table.lines)
    assert shards == {f"part-{n}.parquet": 3 for n in range(3)}
    assert list(block.table.lines)[:3] == [f"{n} of {next(iter(shards))}" for n in (1, 2, 3)]
    orders = [texts(source, BlockReader(64, seed), turn) for seed in (0, 1) for turn in range(4)]
    assert len({tuple(each) for each in orders}) > 2
    assert len({frozenset(each) for each in orders}) == 1


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_processes_have_different_rows_that_together_are_all(source, world):
    for turn in range(3):
        own = [texts(source, BlockReader(8, 3, rank, world), turn) for rank in range(world)]
        assert all(own)
        together = [text for each in own for text in each]
        assert len({*together}) == len(together) == sum(SIZES)


@settings(max_examples=100 if ALL else 20)
@given(size=st.integers(1, 70), seed=st.integers(0, 9), world=st.integers(1, 4),
       start=st.integers(0, 12))  # fmt: skip
def test_a_reader_that_starts_at_a_cursor_yields_the_same_blocks(source, size, seed, world, start):
    reader = BlockReader(size, seed, world - 1, world)
    whole = list(islice(read_blocks(source, reader), start + 4))
    cursor = cursor_of(json.loads(json.dumps(whole[start].cursor.record())))
    again = list(islice(read_blocks(source, reader, cursor), 4))
    assert [b.cursor for b in again] == [b.cursor for b in whole[start:]]
    assert [list(b.table.lines) for b in again] == [list(b.table.lines) for b in whole[start:]]


def test_no_rows_are_an_error_not_an_endless_loop(tmp_path):
    empty = open_source(write_shards(tmp_path, (0, 0)), DataOptions(), "train")
    with pytest.raises(DataError, match="has no rows"):
        next(read_blocks(empty, BlockReader(4)))
    one = open_source(write_shards(tmp_path / "one", (1,)), DataOptions(), "train")
    with pytest.raises(DataError, match="no rows for process 2 of 2"):
        next(read_blocks(one, BlockReader(4, 0, 1, 2)))


# Sources of streamed rows: files, patterns, folders, URLs; strict about what is there.


OPTIONS = DataOptions()


def rows_of(source):
    rows = []
    for shard in range(len(source.shards)):
        for table in source.tables(shard):
            columns = [source.values(table, name) for name in source.columns]
            rows += [
                dict(zip(source.columns, row, strict=True)) for row in zip(*columns, strict=True)
            ]
    return rows


def test_a_pattern_a_folder_and_one_file(tmp_path):
    pattern = write_shards(tmp_path)
    by_pattern = open_source(pattern, OPTIONS, "train")
    assert by_pattern.shards == ("part-0.parquet", "part-1.parquet", "part-2.parquet")
    assert by_pattern.columns == ("text", "label")
    by_folder = open_source(str(tmp_path), OPTIONS, "train")
    assert rows_of(by_folder) == rows_of(by_pattern)
    assert len(rows_of(by_pattern)) == 64
    one = open_source(str(tmp_path / "part-1.parquet"), OPTIONS, "train")
    assert rows_of(one) == rows_of(by_pattern)[20:33]
    assert by_folder.sha256 == by_pattern.sha256 != one.sha256
    table = pq.read_table(tmp_path / "part-2.parquet")
    labels = pa.array(["pos"] * table.num_rows)
    pq.write_table(table.set_column(1, "label", labels), tmp_path / "part-2.parquet")
    assert open_source(pattern, OPTIONS, "train").sha256 != by_pattern.sha256


def test_json_lines_gzipped_and_csv_keep_every_cell_as_it_is_written(tmp_path):
    rows = [{"text": "NA", "label": "1"}, {"text": 'say "yes", twice', "label": "02"}]
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    assert rows_of(open_source(str(tmp_path / "rows.jsonl.gz"), OPTIONS, "train")) == rows
    (tmp_path / "rows.csv").write_text('text,label\nNA,1\n"say ""yes"", twice",02\n')
    assert rows_of(open_source(str(tmp_path / "rows.csv"), OPTIONS, "train")) == rows
    (tmp_path / "rows.tsv").write_text('text\tlabel\n"a\t1\nb"\t2\n')
    assert rows_of(open_source(str(tmp_path / "rows.tsv"), OPTIONS, "train")) == [
        {"text": '"a', "label": "1"},
        {"text": 'b"', "label": "2"},
    ]


def test_a_url(tmp_path):
    memory = fsspec.filesystem("memory")
    write_shards(tmp_path)
    for file in sorted(tmp_path.glob("*.parquet")):
        memory.pipe_file(f"/bucket/{file.name}", file.read_bytes())
    try:
        source = open_source("memory://bucket/part-*.parquet", OPTIONS, "train")
        local = open_source(str(tmp_path), OPTIONS, "train")
        assert source.shards == local.shards
        assert rows_of(source) == rows_of(local)
        assert source.sha256 == local.sha256, "wherever the files are"
    finally:
        memory.rm("/bucket", recursive=True)


def test_numbers_of_classes_become_their_names(tmp_path):
    features = datasets.Features(
        text=datasets.Value("string"),
        label=datasets.ClassLabel(names=["no", "yes"]),
        tags=datasets.Sequence(datasets.ClassLabel(names=["O", "B"])),
    )
    made = datasets.Dataset.from_dict(
        {"text": ["a", "b"], "label": [1, -1], "tags": [[0, 1], []]}, features=features
    )
    made.to_parquet(str(tmp_path / "rows.parquet"))
    found = rows_of(open_source(str(tmp_path / "rows.parquet"), OPTIONS, "train"))
    assert found == [
        {"text": "a", "label": "yes", "tags": ["O", "B"]},
        {"text": "b", "label": None, "tags": []},
    ]


def test_what_cannot_be_opened_is_told(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="no files at") as error:
        open_source(str(tmp_path / "*.parquet"), OPTIONS, "train")
    assert ".parquet" in error.value.expected
    (tmp_path / "a.csv").write_text("text\n1\n")
    (tmp_path / "b.txt").write_text("text\n")
    with pytest.raises(DataError, match="cannot be streamed") as error:
        open_source(str(tmp_path / "*.*"), OPTIONS, "train")
    assert set(error.value.offenders) == {".csv", ".txt"}
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setitem(sys.modules, "obstore.fsspec", None)
    for place, options, problem in (
        (tmp_path / "a.csv", DataOptions(header=False), "names its columns"),
        (tmp_path / "broken.parquet", OPTIONS, "cannot be read"),
        ("no-one/nothing-of-the-kind", OPTIONS, "cannot be streamed from the Hub"),
        ("s3://bucket/rows.parquet", OPTIONS, "needs obstore"),
    ):
        with pytest.raises(DataError, match=problem) as error:
            open_source(str(place), options, "train")
    assert "adapterhub[buckets]" in error.value.hint


def test_files_that_only_a_stream_reads(tmp_path):
    (tmp_path / "a[1].csv").write_text("text\n1\n")
    assert not is_many_files(str(tmp_path / "a[1].csv"))
    assert not is_many_files("glue")
    assert all(map(is_many_files, (str(tmp_path), f"{tmp_path}/*.csv", "s3://b/rows.parquet")))
