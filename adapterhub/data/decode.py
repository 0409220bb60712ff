"""Decode text strictly: what is not UTF-8 is refused with its byte and line, never guessed."""

from __future__ import annotations

import codecs

from adapterhub.errors import DataError

# The longer marks first: UTF-32's begins with UTF-16's.
_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def decode_text(data: bytes, source: str) -> str:
    """Decode UTF-8 text; a byte-order mark at its start is ignored.

    Raises:
        DataError: the text has another encoding, or contains a NUL, which no text does.
    """
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if data.startswith(mark):
            raise _not_utf8(source, f"is {encoding} text", encoding)
    if (position := data.find(b"\0")) >= 0:
        problem = f"{_place(data, position)}: a NUL byte, so not UTF-8 text"
        raise _not_utf8(source, problem, "UTF-16LE")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        start = error.start + len(codecs.BOM_UTF8) * data.startswith(codecs.BOM_UTF8)
        problem = f"{_place(data, start)}: 0x{data[start]:02x} is not UTF-8"
        raise _not_utf8(source, problem, "LATIN1") from None


def _place(data: bytes, position: int) -> str:
    line = data.count(b"\n", 0, position) + 1
    return f"line {line}, byte {position + 1}"


def _not_utf8(source: str, problem: str, encoding: str) -> DataError:
    separator = " " if problem.startswith("is ") else ", "
    return DataError(
        f"{source}{separator}{problem}",
        expected="UTF-8 text",
        hint=f"iconv -f {encoding} -t UTF-8 OLD > NEW, with the encoding that it has",
    )
