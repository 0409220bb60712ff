"""Streams of rows and of raw text: each once in a pass, drawn again exactly, in little memory."""

import gzip
import json
import sys
import tracemalloc
from collections import Counter
from itertools import islice

import datasets
import fsspec
import numpy as np
import pyarrow
import pyarrow as pa
import pyarrow.parquet
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterhub.data import row_stream
from adapterhub.data.examples import data_hash
from adapterhub.data.options import DataOptions
from adapterhub.data.row_stream import BlockReader, open_source, read_blocks
from adapterhub.data.text_stream import PIECE, TextStream, open_stream, stored_tokens
from adapterhub.errors import DataError, OutputError
from tests.kit.data import write_shards
from tests.kit.selection import ALL

# Blocks of rows: each row once in a pass, shared by processes.


SIZES = (20, 13, 31)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    pattern = write_shards(tmp_path_factory.mktemp("shards"), SIZES)
    return open_source(pattern, DataOptions(), "train")


def texts(source, reader, turn):
    """Return the texts of one pass."""
    found: list[str] = []
    for block in read_blocks(source, reader, row_stream.Cursor(turn)):
        if block.cursor.turn != turn:
            return found
        found += map(str, block.table.column("text"))
    raise AssertionError


def test_a_pass_has_every_row_once_from_several_shards_and_in_an_order_of_its_own(source):
    blocks = list(row_stream.read_pass(source, 10))
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
    cursor = row_stream.cursor_of(json.loads(json.dumps(whole[start].cursor.record())))
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


def test_a_pattern_a_folder_one_file_and_a_url(tmp_path):
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
    memory = fsspec.filesystem("memory")
    for file in tmp_path.glob("*.parquet"):
        memory.pipe_file(f"/bucket/{file.name}", file.read_bytes())
    try:
        by_url = open_source("memory://bucket/part-*.parquet", OPTIONS, "train")
        assert by_url.shards == by_pattern.shards
        assert rows_of(by_url) == rows_of(by_pattern)
        assert by_url.sha256 == by_pattern.sha256, "wherever the files are"
    finally:
        memory.rm("/bucket", recursive=True)
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
    assert not row_stream.is_many_files(str(tmp_path / "a[1].csv"))
    assert not row_stream.is_many_files("glue")
    assert all(
        map(row_stream.is_many_files, (str(tmp_path), f"{tmp_path}/*.csv", "s3://b/rows.parquet"))
    )


# Raw text: documents, pieces, draws, and tokens that are stored.


TEXTS = ["one\ntwo", "three", "four"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def kept(folder):
    """Return the token files in the cache."""
    return list((folder / "cache/adapterhub/tokens").glob("*"))


def written(folder, kind, texts):
    """Write texts in a format."""
    path = folder / f"a.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    elif kind == "txt.gz":
        path.write_bytes(gzip.compress("\n\n".join(texts).encode()))
    else:
        path.write_text("\n \n\n".join(texts) + "\n")
    return path


@pytest.mark.parametrize("kind", ["txt", "txt.gz", "jsonl", "parquet"])
def test_documents_are_the_same_in_every_format(tmp_path, kind):
    stream = open_stream(str(written(tmp_path, kind, TEXTS)), DataOptions())
    assert [text.text for text in stream] == TEXTS
    assert all(text.ends for text in stream)
    assert len(stream) == 3
    assert (stream[1].text, stream[-1].text) == ("three", "four")
    assert [text.text for text in stream[::2]] == ["one\ntwo", "four"]
    content = open_stream(str(written(tmp_path, "txt", TEXTS)), DataOptions())
    assert data_hash(stream) == data_hash(content)


def test_lines_are_documents_and_another_encoding_is_read_if_asked(tmp_path):
    path = written(tmp_path, "txt", TEXTS)
    stream = open_stream(str(path), DataOptions(documents="lines"))
    assert isinstance(stream, TextStream)
    assert [text.text for text in stream] == ["one", "two", "three", "four"]
    path.write_bytes("café".encode("cp1252"))
    (text,) = open_stream(str(path), DataOptions(encoding="cp1252"))
    assert text.text == "café"


@given(
    st.lists(st.integers(1, 3 * PIECE), min_size=1, max_size=4),
    st.sampled_from(["lines", "paragraphs"]),
)
def test_pieces_join_to_their_documents(tmp_path_factory, sizes, documents):
    path = tmp_path_factory.mktemp("stream") / "a.txt"
    expected = [chr(ord("a") + i) * size for i, size in enumerate(sizes)]
    path.write_text("\n\n".join(expected))
    joined = [""]
    for piece in open_stream(str(path), DataOptions(documents=documents)):
        assert 0 < len(piece.text) < 2 * PIECE
        joined[-1] += piece.text
        joined += [""] * piece.ends
    assert joined == [*expected, ""]


@given(st.integers(1, 60), st.integers(0, 60), st.integers(0, 5))
def test_a_draw_and_its_rest_are_all_texts(tmp_path_factory, total, count, seed):
    path = tmp_path_factory.getbasetemp() / f"draw-{total}.txt"
    path.write_text("\n\n".join(map(str, range(total))))
    stream, count = open_stream(str(path), DataOptions()), min(count, total)
    chosen, rest = stream.drawn(count, seed), stream.drawn(count, seed, rest=True)
    assert (
        (len(list(chosen)), len(list(rest))) == (len(chosen), len(rest)) == (count, total - count)
    )
    both = sorted(int(text.text) for part in (chosen, rest) for text in part)
    assert both == list(range(total))
    again = rest.drawn(len(rest) // 2, seed)
    assert len(list(again)) == len(again) == len(rest) // 2
    assert set(again) <= set(rest)


def test_draws_differ_by_their_seed_and_a_tenth_is_held_out(tmp_path):
    path = written(tmp_path, "txt", list(map(str, range(100))))
    stream = open_stream(str(path), DataOptions())
    first, again, other = (stream.drawn(50, seed) for seed in (0, 0, 1))
    assert list(first) == list(again) != list(other)
    assert len({data_hash(each) for each in (stream, first, again, other)}) == 3
    train, held = stream.held_out(0)
    assert (len(train), len(held)) == (90, 10)
    assert not {text.text for text in train} & {text.text for text in held}
    only = open_stream(str(written(tmp_path, "txt", ["one"])), DataOptions())
    with pytest.raises(DataError, match="has one document"):
        only.held_out(0)


def test_long_documents_are_held_out_whole(tmp_path):
    """Of 40 documents, each second one has several pieces, which stay together."""
    texts = [chr(0x4E00 + n) * (2 * PIECE if n % 2 else 1) for n in range(40)]
    stream = open_stream(str(written(tmp_path, "jsonl", texts)), DataOptions())
    train, held = stream.held_out(0)
    assert (stream.documents, train.documents, held.documents) == (40, 36, 4)
    sides = [{text.text[0] for text in each} for each in (train, held)]
    assert not sides[0] & sides[1]
    assert list(map(len, sides)) == [36, 4]
    assert [len(list(each)) for each in (train, held)] == [len(train), len(held)]
    assert len(train) + len(held) == len(stream) == 60
    again = train.drawn(5, 1)
    assert len(list(again)) == len(again)
    assert len({text.text[0] for text in again}) == 5


def peak(path):
    """Return the most memory while a file is opened and read, in bytes."""
    tracemalloc.start()
    stream = open_stream(str(path), DataOptions())
    assert sum(len(text.text) for text in stream.drawn(len(stream) // 2, 0)) > 0
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


@pytest.mark.parametrize("separator", ["\n\n", "\n", " "])
def test_memory_does_not_grow_with_the_file(tmp_path, separator):
    """Nor with the document, or the line."""
    words = ("word " * 400 + separator) * 20
    for name, times in (("small", 5), ("large", 100)):
        (tmp_path / f"{name}.txt").write_text(words * times)
    peak(tmp_path / "small.txt")  # what is loaded once
    small, large = peak(tmp_path / "small.txt"), peak(tmp_path / "large.txt")
    assert (tmp_path / "large.txt").stat().st_size > 4_000_000
    assert large < small + 100_000


INVALID = [
    ("a.txt", b"", "is empty"),
    ("a.txt", b" \n\n \n", "is empty"),
    ("a.txt", b"caf\xe9 noir", "is not UTF-8"),
    ("a.txt.gz", b"plain", "zip"),
    ("a.jsonl", b'{"text": "a"}\n{', "line 2 is not JSON"),
    ("a.jsonl", b'{"body": "a"}\n', "no text in the column 'text'"),
    ("a.jsonl", b'{"text": "\\ud800"}\n', "lone surrogate"),
    ("a.parquet", b"PAR1", "is not a Parquet file"),
    ("a.csv", b"text\na\n", "cannot be streamed"),
]


@pytest.mark.parametrize(("name", "data", "expected"), INVALID)
def test_invalid_files(tmp_path, name, data, expected):
    with pytest.raises(DataError, match=name):
        open_stream(str(tmp_path / name), DataOptions())  # which is missing
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=expected):
        open_stream(str(tmp_path / name), DataOptions())


@pytest.fixture
def stream(tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join(f"{n} {n + 1}" for n in range(1000)))
    return open_stream(str(tmp_path / "a.txt"), DataOptions())


def numbers(texts):
    """Tokenize texts that are numbers."""
    return np.array([int(word) for t in texts for word in t.text.split()], dtype=np.uint32)


def test_tokens_are_read_from_the_file_the_second_time(stream, tmp_path):
    expected = [n for i in range(1000) for n in (i, i + 1)]
    first = stored_tokens(stream, "a", numbers)
    assert first.tolist() == expected
    assert isinstance(first, np.memmap)
    assert stored_tokens(stream, "a", fails).tolist() == expected
    assert [path.stat().st_size for path in kept(tmp_path)] == [8000]
    assert stored_tokens(stream.drawn(10, 0), "a", numbers).size == 20, "another stream"


def fails(texts):
    raise ValueError("no")


def test_a_failure_leaves_no_file(stream, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no"):
        stored_tokens(stream, "a", fails)
    with monkeypatch.context() as patch:
        (tmp_path / "file").write_text("")
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        with pytest.raises(OutputError, match="cannot be written"):
            stored_tokens(stream, "a", numbers)
    kept_text = (tmp_path / "a.txt").read_text()
    (tmp_path / "a.txt").write_text("1\n\n2")
    with pytest.raises(DataError, match="has changed"):
        stored_tokens(stream, "a", numbers)
    assert kept(tmp_path) == []
    (tmp_path / "a.txt").write_text(kept_text)
    with pytest.raises(DataError, match="contains no tokens"):
        stored_tokens(stream, "a", lambda texts: np.array([], dtype=np.uint32))
