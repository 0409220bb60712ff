"""The body of a commit is read in any pieces, with little memory."""

from __future__ import annotations

import base64
import hashlib
import json
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterhub.hub import commit_endpoints
from adapterhub.hub.blobs import BlobFolder, BlobInfo
from adapterhub.hub.commit_endpoints import CommitLines
from adapterhub.hub.commits import CommitChange, changed_tree
from adapterhub.web.errors import HubRefusal, MissingEntryError, TooManyBytesError
from tests.kit import real_hub


@pytest.fixture(scope="module")
def blobs(tmp_path_factory):
    folder = BlobFolder(tmp_path_factory.mktemp("blobs"))
    folder.create()
    return folder


def read(blobs, body, sizes=(1 << 30,), most=1 << 30):
    lines = CommitLines(blobs, most)
    place = 0
    try:
        while place < len(body):
            for size in sizes:
                lines.feed(body[place : place + size])
                place += size
        change = lines.finish()
        return {path: staged.path.read_bytes() for path, staged in change.files.items()}, change
    finally:
        lines.discard()


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.text('abc/"\\ü{}:,', min_size=1, max_size=9), st.binary(max_size=90), max_size=4
    ),
    st.lists(st.integers(1, 70), min_size=1, max_size=5),
)
def test_pieces_of_any_size_give_the_same_files(blobs, files, sizes):
    found, change = read(blobs, real_hub.commit_lines(files, title="a title"), sizes)
    assert found == files
    assert change.title == "a title"
    assert list(blobs.incoming.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        '{"value": {"path": "a", "encoding": "base64", "content": "aGk="}, "key": "file"}',
        '{"key":"file","value":{"encoding":"base64","path":"a","content":"aGk="}}',
        '{ "key" : "file" , "value" : { "content" : "aGk=" , "path" : "a", "encoding":"base64" } }',
        '{"key":"file","value":{"path":"a","content":"aGk=","encoding":"base64","extra":1}}',
    ],
)
def test_any_order_of_the_fields(blobs, line):
    body = b'{"key":"header","value":{"summary":"s"}}\n' + line.encode()
    for sizes in ((1 << 20,), (7,), (1,)):
        assert read(blobs, body, sizes)[0] == {"a": b"hi"}


def test_memory_does_not_grow_with_a_file(blobs):
    data = bytes(range(256)) * (32 << 12)  # 32 MiB
    line = json.dumps({"key": "file", "value": {"content": "@", "path": "a", "encoding": "base64"}})
    before, after = (part.encode() for part in line.split("@"))
    header = b'{"key":"header","value":{"summary":"s"}}\n'
    lines = CommitLines(blobs, 1 << 30)
    text = base64.b64encode(data)
    tracemalloc.start()
    lines.feed(header + before)
    for place in range(0, len(text), 256 << 10):
        lines.feed(text[place : place + (256 << 10)])
    lines.feed(after + b"\n")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    (staged,) = lines.finish().files.values()
    assert staged.info.sha256 == hashlib.sha256(data).hexdigest()
    assert peak < 3 << 20
    lines.discard()


FILE = (
    '{"key":"header","value":{}}\n'
    '{"key":"file","value":{"content":"@","path":"a","encoding":"base64"}}\n'
)


def test_what_is_not_base64_is_refused(blobs):
    for text in ("a", "ab=c", "abc", "####", "YQ=YQ===", "YQ==YQ=="):
        for sizes in ((1 << 20,), (1,)):
            with pytest.raises(HubRefusal, match="base64"):
                read(blobs, FILE.replace("@", text).encode(), sizes)
    data = bytes([255, 239, 191] * 50)
    text = base64.b64encode(data).decode()
    assert "/" in text  # which JSON may escape
    body = FILE.replace("@", text.replace("/", "\\/")).encode()
    assert read(blobs, body, (5,))[0] == {"a": data}
    with pytest.raises(TooManyBytesError, match="111"):
        read(blobs, body, most=111)
    assert list(blobs.incoming.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "most"),
    [
        (b'{"key":"deletedFile","value":{"path":"a.md"}}\n', 1 << 19),
        (b"\n", 1 << 19),
        (b'{"key":"deletedFile","value":{"path":"%s"}}\n' % (b"a" * 1000), 4 << 20),
        (b'{"key":"deletedFolder","value":{"path":"%s"}}\n' % (b"a" * 1_000_000), 2 << 20),
        (b" " * 1_000_000 + b"\n", 5 << 20),
    ],
)
def test_endless_lines_are_refused_soon(blobs, line, most, monkeypatch):
    """A body of 150 MB once took 24 s and 160 MB; it is refused after some megabytes."""
    assert (commit_endpoints.MOST_LINES, commit_endpoints.MOST_WORDS) == (25_000, 32 << 20)
    monkeypatch.setattr(commit_endpoints, "MOST_LINES", 2_500)
    monkeypatch.setattr(commit_endpoints, "MOST_WORDS", 3 << 20)
    lines, sizes = CommitLines(blobs, 1 << 30), []
    piece = line * max(1, (256 << 10) // len(line))

    def feed_all():
        for _ in range(20):
            sizes.append(len(piece))
            lines.feed(piece)

    tracemalloc.start()
    with pytest.raises(HubRefusal, match=r"lines|path"):
        feed_all()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(sizes) <= most
    assert peak < 8 << 20


def test_many_removed_folders_take_no_time_of_other_writers():
    info = BlobInfo("0" * 64, 1, "")
    tree = {f"a{n}/b/c{n}.md": info for n in range(15_000)}
    change = CommitChange(removed_folders=[*(f"a{n}/b/" for n in range(14_999)), "a14999"])
    began = time.perf_counter()
    assert changed_tree(tree, change, {}) == {}
    assert time.perf_counter() - began < 2  # once some 20 s
    with pytest.raises(MissingEntryError, match="a/b/c"):
        changed_tree({"a/b.md": info}, CommitChange(removed_folders=["a/b/c"]), {})
