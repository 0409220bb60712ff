"""Text of files: gzipped or not, UTF-8 and byte-order marks first; other encodings are guessed.

Standard input and files that must be UTF-8 are decoded strictly by `decode_text`. A file of the
user's own may come from a spreadsheet of another country: `decode_file` guesses its encoding and
returns what it guessed, with a sample, so that a wrong guess is seen; or it refuses the file.
"""

from __future__ import annotations

import codecs
import gzip
import io
import itertools
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

from adapterhub.errors import DataError, not_fetched, read_problem

# The longer marks first: UTF-32's begins with UTF-16's.
_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_PREFIX = 64 << 10  # bytes that a guess looks at
# The letters that a text in a single-byte encoding is expected to have, the most common one first.
_PUNCTUATION = "’‘“”„‚–—…«»€£§°·´•™®©½¼¾²³×\xa0"  # noqa: RUF001
_WESTERN = "éèêëàâäáãåçùûüúîïíôöóõøñßæœÿ¿¡ªº"
_EXPECTED = {
    "cp1252": _WESTERN,
    "cp1254": "çğıöşüâîû",
    "cp1250": "ąćęłńóśźżáčďéěíňřšťúůýžőűöüäßăâîşţđô",
    "cp1251": "абвгдеёжзийклмнопрстуфхцчшщъыьэюяіїєґўљњћџђј№",
    "koi8_r": "абвгдеёжзийклмнопрстуфхцчшщъыьэюя",
    "cp1253": "αβγδεζηθικλμνξοπρσςτυφχψωάέήίόύώϊϋ",
    "cp1257": "āčēģīķļņšūžąęėįųõäöü",
    "mac_roman": _WESTERN,
    "cp437": _WESTERN,
}
_MULTI_BYTE = ("shift_jis", "euc_jp", "gb18030", "gb2312", "gbk", "big5", "euc_kr", "cp932",
               "cp949", "johab", "big5hkscs", "hz")  # fmt: skip
_SCRIPTS = "\u0430\u03b1"  # the first letters of alphabets that are not Latin
_ENCODING_HINT = "data.encoding=NAME, such as cp1252, latin-1 or utf-16"


@dataclass(frozen=True)
class DecodedText:
    """A text, the name of its encoding, and a guessed word if the encoding was guessed."""

    text: str
    encoding: str = "UTF-8"
    sample: str = ""


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


def decode_file(data: bytes, source: str, encoding: str | None = None) -> DecodedText:
    """Decode the text of a file in an encoding of Python, or None: the one that it seems to have.

    Raises:
        DataError: the name is unknown, the bytes have no such encoding, or none can be guessed.
    """
    if encoding is not None:
        return _decode_as(data, source, encoding)
    for mark, name in _BYTE_ORDER_MARKS.items():
        if data.startswith(mark):
            return _decode_as(data, source, name)
    if wide := _without_mark(data):
        return _decode_as(data, source, wide)
    try:
        return DecodedText(decode_text(data, source))
    except DataError as error:
        if b"\0" in data:
            raise
        strict = error
    guessed = _guess(data)
    if guessed is None:
        raise DataError(
            strict.problem,
            expected="UTF-8 text, or another encoding throughout",
            hint=f"correct the line, or {_ENCODING_HINT}",
        )
    text = _decode_as(data, source, guessed).text
    return DecodedText(text, guessed, _first_word(text))


def _decode_as(data: bytes, source: str, encoding: str) -> DecodedText:
    try:
        codec = codecs.lookup(encoding)
        if not getattr(codec, "_is_text_encoding", True):
            raise LookupError(encoding)
    except (LookupError, ValueError):
        raise DataError(
            f"unknown encoding {encoding[:40]!r}", expected="a name that Python knows",
            hint=_ENCODING_HINT,
        ) from None  # fmt: skip
    try:
        text = data.decode("utf-8-sig" if codec.name == "utf-8" else codec.name)
    except UnicodeError as error:
        start = getattr(error, "start", 0)
        raise DataError(
            f"{source}, {_place(data, start)}: not {encoding} text", hint=_ENCODING_HINT
        ) from None
    if "\0" in text:
        raise DataError(
            f"{source} contains NUL characters, so it is not {encoding} text", hint=_ENCODING_HINT
        )
    return DecodedText(text.removeprefix("\ufeff"), encoding)


def _without_mark(data: bytes) -> str | None:
    """Return UTF-16LE or UTF-16BE if every second byte of the beginning is mostly NUL."""
    prefix = data[: min(_PREFIX, len(data) & ~1)]
    low, high = prefix[::2].count(0), prefix[1::2].count(0)
    most = len(prefix) // 2
    if most < 4 or max(low, high) < most / 2:
        return None
    return "UTF-16LE" if high > low and not low else "UTF-16BE" if low and not high else None


def _guess(data: bytes) -> str | None:
    """Guess the encoding of text that is not UTF-8, from the beginning of its non-ASCII lines.

    Returns None if some of these lines are UTF-8: then others are damaged, not in a known encoding.
    """
    from charset_normalizer import from_bytes

    lines = [line for line in data.split(b"\n") if not line.isascii()]
    prefix = b"\n".join(lines)[:_PREFIX].rpartition(b"\n")[0] or lines[0][:_PREFIX]
    valid = sum(map(_is_utf8, lines))
    best = from_bytes(prefix).best()
    if best is not None and best.encoding in _MULTI_BYTE:
        return best.encoding if valid < len(lines) / 2 and _fits(data, best.encoding) else None
    if valid:
        return None
    fitting = [name for name in _EXPECTED if _fits(data, name)]
    if not fitting:
        return None if best is None or not _fits(data, best.encoding) else best.encoding
    return min(fitting, key=lambda name: _oddities(prefix.decode(name, "replace"), name))


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _fits(data: bytes, encoding: str) -> bool:
    try:
        data.decode(encoding)
    except UnicodeError:
        return False
    return True


def _oddities(text: str, encoding: str) -> int:
    """Count the characters that are not expected in an encoding, or not at their place.

    Those are capitals behind small letters, in Latin scripts runs of letters that are not ASCII,
    and in other scripts words that mix the two.
    """
    expected = _EXPECTED[encoding] + _EXPECTED[encoding].upper() + _PUNCTUATION
    odd = len(re.findall(rf"[^\x00-\x7f{re.escape(expected)}]", text))
    odd += sum(a.islower() and b.isupper() for a, b in itertools.pairwise(text))
    if _EXPECTED[encoding][0] not in _SCRIPTS:
        return odd + sum(map(len, re.findall(r"(?:(?![\x00-\x7f])[^\W\d_]){3,}", text)))
    mixed = re.findall(r"[A-Za-z](?![\x00-\x7f])[^\W\d_]|(?![\x00-\x7f])[^\W\d_][A-Za-z]", text)
    return odd + len(mixed)


def _first_word(text: str) -> str:
    match = re.search(r"\w*[^\x00-\x7f]\w*", text)
    return match.group()[:30] if match else ""


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


def file_bytes(source: str) -> bytes:
    """Read a file, gzipped if its name ends in .gz.

    Raises:
        DataError: the file is missing, cannot be read, or is not a complete gzip file.
    """
    path = Path(source)
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise DataError(read_problem(path, error)) from error
    if pointer := not_fetched(data):
        raise DataError(f"{source} is {pointer}")
    try:
        return _decompress(source, data) if source.lower().endswith(".gz") else data
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{source} is not a complete gzip file: {error}") from error


_PICTURE = "--task image-classification, and a folder or a table with the names of pictures"
_BINARY = {
    b"\x89PNG": ("a PNG picture", _PICTURE),
    b"\xff\xd8\xff": ("a JPEG picture", _PICTURE),
    b"GIF89a": ("a GIF picture", _PICTURE),
    b"PK\x03\x04": ("a zip archive", "unzip it, and give a file in it"),
    b"\xd0\xcf\x11\xe0": ("an Office file", "save the sheet as CSV (UTF-8), and give that file"),
    b"%PDF": ("a PDF file", "the text of it, as .txt"),
    b"\x80\x04": ("a pickle", "a DataFrame in it: df.to_parquet('rows.parquet')"),
    b"PAR1": ("a Parquet file", "data.format=parquet, or a name that ends in .parquet"),
    b"ARROW1": ("an Arrow file", "a Parquet file"),
    b"SQLite": ("a database", "a table of it as CSV"),
    b"\x93NUMPY": ("an array of numpy", "a table of texts"),
}


def check_is_text(data: bytes, source: str) -> None:
    """Refuse bytes that begin as those of a format that is no text, whatever the file is called.

    Raises:
        DataError: they do, or they are tensors.
    """
    begins = (found for start, found in _BINARY.items() if data.startswith(start))
    what, hint = next(begins, ("", ""))
    if data[:4] == b"RIFF" and data[8:12] in (b"WAVE", b"WEBP"):
        what, hint = "a sound or a picture", "a folder or a table with the names of files"
    if data[8:10] == b'{"' and len(data) > 10 and b"\0" in data[:8]:
        what, hint = "a file of tensors", "a file of data; --backbone FOLDER for a model"
    if what:
        raise DataError(f"{source} is {what}, and no text", expected="rows of data", hint=hint)


def file_text(source: str, encoding: str | None = None) -> DecodedText:
    """Read a text file in a given encoding, or in the one that it seems to have.

    Raises:
        DataError: the file cannot be read, is empty or cannot be decoded.
    """
    data = file_bytes(source)
    check_is_text(data, source)
    decoded = decode_file(data, source, encoding)
    if not decoded.text.strip():
        raise DataError(f"{source} is empty")
    return decoded


def read_text(source: str, encoding: str | None = None) -> str:
    """Read a UTF-8 text file, or one in a given encoding, gzipped if its name ends in .gz.

    Raises:
        DataError: the file is missing, empty or not in this encoding.
    """
    if encoding is not None:
        return file_text(source, encoding).text
    text = decode_text(file_bytes(source), source)
    if not text.strip():
        raise DataError(f"{source} is empty")
    return text


def split_lines(text: str) -> list[str]:
    """Split a text into lines, which end in a line feed with or without a carriage return."""
    return [line.removesuffix("\r") for line in text.split("\n")]


def _decompress(source: str, data: bytes) -> bytes:
    limit = max(100 * len(data), 64 << 20)  # bytes
    with gzip.open(io.BytesIO(data)) as stream:
        text = stream.read(limit + 1)
    if len(text) > limit:
        raise DataError(
            f"{source} has {len(data)} bytes and decompresses to more than {limit}",
            expected="text, which decompresses to about 3 to 20 times its size",
            hint="decompress it yourself if you trust it",
        )
    return text
