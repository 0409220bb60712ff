"""Bytes and texts of files."""

from __future__ import annotations

import gzip

import pytest

from adapterhub.data.delimited import file_bytes, file_text, read_text, split_lines
from adapterhub.errors import DataError


def test_a_file_may_be_gzipped(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\r\ntwo"))
    assert file_bytes(str(tmp_path / "a.txt.gz")) == b"one\r\ntwo"
    assert split_lines(read_text(str(tmp_path / "a.txt.gz"))) == ["one", "two"]


def test_a_text_is_utf8_unless_another_encoding_is_given(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes("caf\u00e9".encode("cp1252"))
    with pytest.raises(DataError, match="not UTF-8"):
        read_text(str(file))
    assert read_text(str(file), "cp1252") == "caf\u00e9"
    assert file_text(str(file)).encoding == "cp1252"


@pytest.mark.parametrize("read", [read_text, file_text])
def test_an_empty_or_missing_file_is_refused(tmp_path, read):
    (tmp_path / "a.txt").write_text(" \n")
    for name, words in (("a.txt", "is empty"), ("b.txt", "no such file"), (".", "cannot read")):
        with pytest.raises(DataError, match=words):
            read(str(tmp_path / name))
