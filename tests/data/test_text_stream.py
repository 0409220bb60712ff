"""Streams of raw text: documents, pieces, draws, and memory that does not grow with the file."""

from __future__ import annotations

import gzip
import json
import tracemalloc

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.data.examples import data_hash
from adapterhub.data.options import DataOptions
from adapterhub.data.text_stream import PIECE, TextStream, open_stream, stored_tokens
from adapterhub.errors import DataError, OutputError

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
