"""Text is UTF-8, or refused with the byte and the line."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.data.decode import decode_text
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
    with contextlib.suppress(DataError):
        assert "\0" not in decode_text(data, "x")
