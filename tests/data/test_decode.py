"""Text is UTF-8, or refused with the byte and the line; files may have other encodings."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.data.delimited import decode_file, decode_text
from adapterhub.errors import DataError


def test_a_byte_order_mark_is_ignored():
    assert decode_text(b"\xef\xbb\xbfna\xc3\xafve\r\n", "x") == "na\u00efve\r\n"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"a\nna\xefve", "x, line 2, byte 5: 0xef is not UTF-8"),
        (b"\xef\xbb\xbf\xff", "x, line 1, byte 4: 0xff is not UTF-8"),
        (b"ab\xc3", "byte 3: 0xc3"),
        ("\ufeffab".encode("utf-16-le"), "x is UTF-16 text"),
        ("\ufeffab".encode("utf-16-be"), "x is UTF-16 text"),
        ("\ufeffab".encode("utf-32-le"), "x is UTF-32 text"),
        ("ab".encode("utf-16-le"), "x, line 1, byte 2: a NUL byte"),
        (b"a\n\0", "line 2, byte 3: a NUL byte"),
        (b"\xed\xa0\x80", "byte 1: 0xed"),
    ],
)
def test_another_encoding_is_refused(data, words):
    with pytest.raises(DataError) as error:
        decode_text(data, "x")
    assert words in str(error.value)
    assert "iconv -f" in str(error.value)


@given(st.binary(max_size=40))
def test_any_bytes_are_text_or_refused(data):
    for decode in (decode_text, lambda *args: decode_file(*args).text):
        with contextlib.suppress(DataError):
            assert "\0" not in decode(data, "x")


TEXTS = {
    "cp1252": [
        "na\u00efve",
        "Das Caf\u00e9 war sch\u00f6n, gro\u00dfartig \u2013 \u201etoll\u201c!",
        "El ni\u00f1o comi\u00f3 una pi\u00f1a, \u00bfverdad? \u00a1S\u00ed!",
        "C\u2019est tr\u00e8s d\u00e9cevant. O\u00f9 \u00eates-vous ?",
        "it costs 5 \u20ac or \u00a34",
        "O servi\u00e7o n\u00e3o \u00e9 bom, cora\u00e7\u00e3o",
        "smart \u2018quotes\u2019 and \u201cmore\u201d \u2014 here\u2026",
    ],
    "cp1250": [
        "Za\u017c\u00f3\u0142\u0107 g\u0119\u015bl\u0105 ja\u017a\u0144, prosz\u0119 bardzo",
        "P\u0159\u00edli\u0161 \u017elu\u0165ou\u010dk\u00fd k\u016f\u0148",
    ],
    "cp1251": ["\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u044d\u0442\u043e"],
    "koi8_r": ["\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u044d\u0442\u043e"],
    "cp1253": ["\u039a\u03b1\u03bb\u03b7\u03bc\u03ad\u03c1\u03b1 \u03ba\u03cc\u03c3\u03bc\u03b5"],
    "cp1254": ["\u00c7ok g\u00fczel bir \u015fark\u0131, \u0131\u011fd\u0131r"],
    "shift_jis": ["これは日本語のテキストです。"],
    "gb18030": ["这是一部非常好的电影,我很喜欢它。"],
    "euc_kr": ["이 영화는 정말 재미있었습니다."],
    "utf-16": ["na\u00efve \u65e5\u672c"],
    "utf-16-le": ["na\u00efve"],
    "utf-16-be": ["na\u00efve"],
}  # fmt: skip
CASES = [(name, text) for name, each in TEXTS.items() for text in each]


@pytest.mark.parametrize(("encoding", "text"), CASES)
def test_a_file_in_another_encoding_is_read_and_the_guess_is_shown(encoding, text):
    document = f"text,label\n{text},1\nplain,0\n"
    decoded = decode_file(document.encode(encoding), "x")
    assert decoded.text == document
    if not encoding.startswith("utf"):
        assert decoded.encoding != "UTF-8"
        assert decoded.sample in text
        assert not decoded.sample.isascii()


def test_utf8_is_never_taken_for_another_encoding():
    for _, text in CASES:
        decoded = decode_file(f"\ufeff{text}\n".encode(), "x")
        assert (decoded.text, decoded.encoding, decoded.sample) == (f"{text}\n", "UTF-8", "")


def test_some_damaged_lines_among_utf8_are_refused_not_guessed():
    lines = ["na\u00efve", "caf\u00e9"]
    data = f"{lines[0]}\n".encode() * 3 + lines[1].encode("latin-1")
    with pytest.raises(DataError, match="x, line 4, byte 25: 0xe9 is not UTF-8") as error:
        decode_file(data, "x")
    assert "data.encoding=" in error.value.hint


def test_a_given_encoding_is_used_and_not_guessed():
    data = "\u0105\u0119 caf\u00e9".encode("iso8859-2")
    decoded = decode_file(data, "x", "iso8859-2")
    assert (decoded.text, decoded.sample) == ("\u0105\u0119 caf\u00e9", "")


@pytest.mark.parametrize("name", ["klingon", "zip", "rot13", "a\0b", "..", "x" * 9999, ""])
def test_an_unknown_encoding_is_refused(name):
    with pytest.raises(DataError, match="unknown encoding"):
        decode_file(b"abc", "x", name)


@pytest.mark.parametrize("name", ["utf-8", "ascii", "utf-16", "cp1252"])
def test_bytes_that_a_given_encoding_cannot_have_are_refused(name):
    with pytest.raises(DataError, match="x, line 1") as error:
        decode_file(b"a\x81\xff", "x", name)
    assert "data.encoding" in error.value.hint
