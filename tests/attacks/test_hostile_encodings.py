"""Bytes that are not text, on standard input, in files and on the command line: one clear error."""

from __future__ import annotations

import io
import itertools
import sys

import pytest
from forge import harmless_text

from tests.kit.selection import long_table
from tests.kit.session import refused

BYTES = {
    **{code: "a good movie\n".encode(code) for code in ("utf-16", "utf-16-le", "utf-32")},
    "latin-1": b"a good movie\nna\xefve\n",
    "NUL": b"a good\0movie\n",
    "half a character": b"a good movie \xe2\x82",
    "a surrogate": b"a good \xed\xa0\x80 movie\n",
    "binary": bytes(range(256)) * 9,
}


def stdin(monkeypatch, data: bytes, encoding: str = "utf-8") -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding=encoding))


@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize("words", [(), ("--data", "-")], ids=["no data", "dash"])
def test_standard_input_that_is_not_utf8(run, adapterhub, monkeypatch, kind, words) -> None:
    stdin(monkeypatch, BYTES[kind])
    refused(adapterhub("predict", run, *words), "standard input", "UTF-8", "iconv -f")


def test_standard_input_is_utf8_in_every_locale(run, adapterhub, monkeypatch) -> None:
    outputs = set()
    for encoding in ("utf-8", "ascii", "latin-1"):
        stdin(monkeypatch, b"\xef\xbb\xbfna\xc3\xafve \xe2\x80\xa8 movie\r\nb\n", encoding)
        code, out, err = adapterhub("predict", run, "--json")
        assert code == 0, err
        assert len(out.splitlines()) == 2
        outputs.add(out)
    assert len(outputs) == 1


@long_table(
    ("kind", "name"),
    itertools.product(BYTES, ["data.txt", "data.tsv", "data.csv", "data.jsonl", "data.conll"]),
)
def test_a_file_that_is_not_utf8_is_refused_or_how_it_is_read_is_said(
    run, adapterhub, tmp_path, kind, name
) -> None:
    (tmp_path / name).write_bytes(BYTES[kind])
    code, out, err = adapterhub("predict", run, "--data", tmp_path / name)
    assert name in err
    assert harmless_text(out + err)
    if code == 0:
        assert any(said in err for said in ("UTF-16", "UTF-32", "data.encoding=NAME"))
    else:
        assert code == 2
        assert "error: " in err


@pytest.mark.parametrize(
    "words",
    [
        ("predict", "run", "a \udcff movie"), ("list", "\udcff"), ("show", "\udcff"),
        ("yank", "a@v1", "--reason", "\udcff"), ("publish", "run", "--description", "\udcff"),
        ("train", "backbone=\udcff"), ("\udcff",),
    ],
    ids=ascii,
)  # fmt: skip
def test_an_argument_that_is_not_utf8(adapterhub, words) -> None:
    place = next(n for n, word in enumerate(words, 1) if "\udcff" in word)
    refused(adapterhub(*words), f"argument {place} is not", "byte 0xff", "iconv")
