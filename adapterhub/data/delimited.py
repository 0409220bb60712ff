"""Read delimited text as a table: CSV, TSV and their relatives, strictly.

The delimiter, the quotes and the header are detected. Except for quotes, only the beginning of the
text is read for that. If the evidence is unclear, the form of the file's suffix is assumed;
`Dialect.doubt` then holds the flag to type if the assumption is wrong.

Text of files: gzipped or not, UTF-8 and byte-order marks first; other encodings are guessed.

Standard input and files that must be UTF-8 are decoded strictly by `decode_text`. A user's file may
come from a spreadsheet of another country: `decode_file` guesses its encoding and returns the guess
with a sample, so that a wrong guess is visible; otherwise it rejects the file.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import re
import statistics
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from adapterhub.data.column_names import KNOWN
from adapterhub.data.options import PREDICT, DataOptions
from adapterhub.data.table import Table, blank_note, first_few, plain_name
from adapterhub.errors import DataError, not_fetched, read_problem

# Longer marks come first: UTF-32's begins with UTF-16's.
_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_ENCODING_PREFIX = 64 << 10  # bytes inspected for a guess
# The letters expected in a text of a single-byte encoding, the most common encoding first.
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
_SCRIPTS = "\u0430\u03b1"  # the first letters of non-Latin alphabets
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
        DataError: the text has another encoding, or contains a NUL, as binary data does.
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
    """Decode the text of a file in an encoding known to Python; None guesses the encoding.

    Raises:
        DataError: the encoding is unknown, the bytes do not have it, or none can be guessed.
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
    prefix = data[: min(_ENCODING_PREFIX, len(data) & ~1)]
    low, high = prefix[::2].count(0), prefix[1::2].count(0)
    most = len(prefix) // 2
    if most < 4 or max(low, high) < most / 2:
        return None
    return "UTF-16LE" if high > low and not low else "UTF-16BE" if low and not high else None


def _guess(data: bytes) -> str | None:
    """Guess the encoding of text that is not UTF-8, from the beginning of its non-ASCII lines.

    Return None if some of these lines are UTF-8: the others are then damaged.
    """
    from charset_normalizer import from_bytes

    lines = [line for line in data.split(b"\n") if not line.isascii()]
    prefix = (
        b"\n".join(lines)[:_ENCODING_PREFIX].rpartition(b"\n")[0] or lines[0][:_ENCODING_PREFIX]
    )
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
    """Count the unexpected or misplaced characters for an encoding.

    Misplaced are capitals after small letters, runs of non-ASCII letters in Latin scripts, and
    words of mixed scripts in others.
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


_PICTURE = "--task image-classification, and a folder or a table with the names of images"
_BINARY = {
    b"\x89PNG": ("a PNG image", _PICTURE),
    b"\xff\xd8\xff": ("a JPEG image", _PICTURE),
    b"GIF89a": ("a GIF image", _PICTURE),
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
    """Reject bytes that begin like a binary format, whatever the name of the file.

    Raises:
        DataError: the bytes are binary, or tensors.
    """
    begins = (kind for start, kind in _BINARY.items() if data.startswith(start))
    problem, hint = next(begins, ("", ""))
    if data[:4] == b"RIFF" and data[8:12] in (b"WAVE", b"WEBP"):
        problem = "an audio file" if data[8:12] == b"WAVE" else "an image"
        hint = "a folder or a table with the names of files"
    if data[8:10] == b'{"' and len(data) > 10 and b"\0" in data[:8]:
        problem, hint = "a file of tensors", "a file of data; --backbone FOLDER for a model"
    if problem:
        raise DataError(f"{source} is {problem}, not text", expected="rows of data", hint=hint)


def file_text(source: str, encoding: str | None = None) -> DecodedText:
    """Read a text file in a given encoding, or guess the encoding.

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
        DataError: the file is missing, empty or in another encoding.
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


_USUAL = {"csv": ",", "tsv": "\t"}
_NAMED = re.compile(r"sep=(.)\r?\n", re.IGNORECASE)  # Excel's first line, in any locale
DELIMITERS = {"\t": "tab", ";": "semicolon", "|": "bar", ",": "comma"}
_PREFIX = 200_000  # characters
_ROWS = 200
_NUMBER = re.compile(r"[-+]?[\d\s.,]*\d[\d.,]*%?([eE][-+]?\d+)?")
_LONG = 40  # characters: longer cells are texts, not column names
_FEW_ROWS, _MANY_ROWS = 3, 8  # rows from which equal widths are not a coincidence


def read_delimited(
    source: str, kind: str, decoded: DecodedText, options: DataOptions, split: str = "train"
) -> Table:
    """Read delimited text as a table.

    `kind` is "csv" or "tsv", or "text" for a name that implies neither. If the split is not
    "train", the options name columns of the training data. In data to predict on (PREDICT), a
    blank line is a row if the table has one column, otherwise a note.

    Raises:
        DataError: a row is malformed.
    """
    text, skipped, delimiter = decoded.text, 0, options.delimiter
    if named := _NAMED.match(text):
        text, skipped = text[named.end() :], 1
        delimiter = delimiter or named.group(1)
    dialect = detect_dialect(text, kind, delimiter, options, recorded=split != "train")
    lines = list(
        _quoted_rows(source, text, dialect.delimiter)
        if dialect.quoted
        else _plain_rows(text, dialect.delimiter)
    )
    rows = [(line, cells) for line, cells in lines if cells]
    names = list(map(str, range(len(rows[0][1]))))
    first = rows[0][0] if dialect.header else 0
    if dialect.header:
        names = [name.strip() for name in rows.pop(0)[1]]
        while not names[-1] and len(names) > 1:
            names.pop()
    _check_widths(source, rows, len(names), dialect)
    blank = [line for line, cells in lines if not cells and line > first] * (split == PREDICT)
    if len(names) == 1:
        rows = sorted([*rows, *((line, [""]) for line in blank)])
        blank = []
    cells = {name: [row[i] for _, row in rows] for i, name in enumerate(names)}
    return Table(
        source,
        "line",
        tuple(names),
        [line + skipped for line, _ in rows],
        cells.__getitem__,
        form=dialect_text(dialect, decoded),
        header=dialect.header,
        decimal_comma=dialect.delimiter == ";",
        notes=(
            *encoding_notes(decoded),
            *filter(None, [dialect.doubt]),
            *blank_note([line + skipped for line in blank]),
        ),
    )


def detect_dialect(
    text: str,
    kind: str,
    delimiter: str | None,
    options: DataOptions,
    *,
    recorded: bool = False,
) -> Dialect:
    """Detect the dialect of a text where the options do not set it, as with a `delimiter` of None.

    If the expected columns come from other data (`recorded`), an ambiguous first line that does not
    name them is data.
    """
    delimiter = delimiter or find_delimiter(text, _USUAL.get(kind)) or ","
    quoted = options.quoted
    if quoted is None:
        quoted = (kind == "csv" and delimiter in ",;") or looks_quoted(text, delimiter)
    if options.header is not None:
        return Dialect(delimiter, quoted, options.header)
    rows = prefix_rows(text, delimiter, quoted) or [[""]]
    header, sure = find_header(rows, expected_columns(options))
    doubt = ""
    header = header and (sure or not recorded)
    if not sure:
        line = "the first line was taken to name the columns" if header else (
            "the first line was taken for data, not for names of columns"
        )  # fmt: skip
        doubt = f"{line}; data.header={str(not header).lower()} if that is wrong"
    return Dialect(delimiter, quoted, header, doubt)


def expected_columns(options: DataOptions) -> Collection[str]:
    """List the columns that the options name, except numbers, which files without names use."""
    from adapterhub.data.table import is_template, template_columns

    choices = (options.choices,) if isinstance(options.choices, str) else options.choices or ()
    names = [n for n in (options.text, options.pair, options.label, *choices) if n]
    each = [template_columns(n) if is_template(n) else [n] for n in names]
    return {name for some in each for name in some if not name.isdecimal()}


def dialect_text(dialect: Dialect, decoded: DecodedText) -> str:
    """Describe a dialect and an encoding, such as "semicolon-separated, cp1252"."""
    separated = f"{DELIMITERS.get(dialect.delimiter, repr(dialect.delimiter))}-separated"
    parts = [separated]
    if decoded.encoding != "UTF-8":
        parts.append(decoded.encoding)
    if not dialect.header:
        parts.append("no header")
    return ", ".join(parts)


def encoding_notes(decoded: DecodedText) -> tuple[str, ...]:
    """Report the guessed encoding, with a word that shows whether it is right."""
    if not decoded.sample:
        return ()
    return (
        f"not UTF-8: read as {decoded.encoding}, which gives {decoded.sample!r}; "
        "data.encoding=NAME if that is wrong",
    )


def _check_widths(
    source: str, rows: list[tuple[int, list[str]]], width: int, dialect: Dialect
) -> None:
    ragged = [(line, row) for line, row in rows if len(row) < width or any(row[width:])]
    if not ragged:
        return
    name = DELIMITERS.get(dialect.delimiter, repr(dialect.delimiter))
    raise DataError(
        f"{source} has rows with the wrong number of fields",
        offenders=first_few([f"line {line}: {len(row)} fields" for line, row in ragged]),
        expected=f"{width} fields in each line, separated by one {name} each",
        hint="data.delimiter if it is another, data.quoted=false if quotes are text, or "
        "data.format=text if each line is one text",
    )


def _plain_rows(text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the cells of each line; a blank one has none."""
    for number, line in enumerate(split_lines(text.removesuffix("\n")), start=1):
        yield number, line.split(delimiter) if line else []


def _quoted_rows(source: str, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the cells of each row; a blank line has none."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    limit = csv.field_size_limit(max(len(text), 1))
    line = 1
    try:
        for fields in reader:
            yield line, fields
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{source}, line {line}: {error}",
            expected='fields such as one, "one, two" or "a ""quoted"" word"',
            hint="data.quoted=false for files in which quotes are text",
        ) from error
    finally:
        csv.field_size_limit(limit)


@dataclass(frozen=True)
class Dialect:
    """The rules that split lines into cells; `doubt` is a note if the header was assumed."""

    delimiter: str
    quoted: bool
    header: bool
    doubt: str = ""


def prefix_rows(text: str, delimiter: str, quoted: bool) -> list[list[str]]:
    """Split the first rows of a text into cells, without a row that the prefix cuts."""
    prefix = text[:_PREFIX]
    complete = prefix if len(text) <= _PREFIX else prefix[: prefix.rfind("\n") + 1] or prefix
    if quoted:
        reader = csv.reader(io.StringIO(complete, newline=""), delimiter=delimiter)
        limit = csv.field_size_limit(_PREFIX + 1)
        try:
            rows = [row for row in itertools.islice(reader, _ROWS + 1) if row]
        except csv.Error:
            rows = []
        finally:
            csv.field_size_limit(limit)
        return rows[:_ROWS] if len(rows) < 2 or len(complete) == len(text) else rows[:-1]
    lines = (line.removesuffix("\r") for line in complete.split("\n"))
    return [line.split(delimiter) for line in itertools.islice(filter(None, lines), _ROWS)]


def find_delimiter(text: str, usual: str | None) -> str | None:
    """Return the delimiter that gives all first rows the same number of cells, else `usual`.

    `usual` is implied by the file's name; None, plain text, requires strong evidence.
    """
    fitting = [d for d in DELIMITERS if _is_regular(text, d)]
    if usual is None:
        return next((d for d in fitting if _is_surely_table(text, d)), None)
    if usual in fitting:
        others = [d for d in fitting if d != usual]
        return others[0] if others and usual == "," and _has_decimal_commas(text) else usual
    first = text.lstrip("\r\n").partition("\n")[0]
    if not fitting and usual not in first:
        fitting = [d for d in DELIMITERS if d in first and d != ","]
    return fitting[0] if fitting else usual


def _is_regular(text: str, delimiter: str) -> bool:
    return any(_width(prefix_rows(text, delimiter, quoted)) > 1 for quoted in (True, False))


def _width(rows: Sequence[Sequence[str]]) -> int:
    """Return the common number of cells of all rows, or 0; trailing empty cells do not count."""
    width = len(rows[0]) if rows else 0
    while width > 1 and not any(row[width - 1].strip() for row in rows if len(row) >= width):
        width -= 1
    return width if all(len(row) >= width and not any(row[width:]) for row in rows) else 0


def _has_decimal_commas(text: str) -> bool:
    """Return whether every comma after the first line is inside a number."""
    body = text[:_PREFIX].partition("\n")[2]
    return body.count(",") == len(re.findall(r"(?<=\d),(?=\d)", body))


def _is_surely_table(text: str, delimiter: str) -> bool:
    """Return whether plain text is clearly a table, as shown by its header or labels."""
    quoted = looks_quoted(text[:_PREFIX], delimiter)
    rows = prefix_rows(text, delimiter, quoted)
    if _width(rows) < 2:
        return False
    if _names_columns(rows[0], rows[1:]):
        return True
    if delimiter == "\t":
        return len(rows) >= _FEW_ROWS
    labels = [Counter(row[i].strip() for row in rows) for i in (0, _width(rows) - 1)]
    return len(rows) >= _MANY_ROWS and any(
        2 * len(count) <= len(rows) and max(map(len, count)) < _LONG for count in labels
    )


def find_header(rows: list[list[str]], expected: Collection[str] = ()) -> tuple[bool, bool]:
    """Return whether the first row names the columns, and whether that is certain.

    `expected` are the column names that the reader requires.
    """
    first = [cell.strip() for cell in rows[0]]
    body = [[cell.strip() for cell in row] for row in rows[1:]]
    if set(expected) & set(first) or _names_columns(first, body):
        return True, True
    columns = list(zip(*(row[: len(first)] for row in body if len(row) >= len(first)), strict=True))
    votes = [_vote(cell, column) for cell, column in zip(first, columns, strict=False)]
    names = [cell for cell in first if cell]
    if len(set(names)) < len(names) or "" in first[1 : len(names)]:
        votes.append(-1)
    if not columns:
        votes += [-1] * any(map(_is_value, first))
    for_names, against = votes.count(1), votes.count(-1)
    if for_names and against:
        return against < 2 * for_names, False
    return not against, bool(for_names or against)


def _names_columns(first: Sequence[str], body: Sequence[Sequence[str]]) -> bool:
    """Return whether a cell of the first row is a usual name that does not recur in its column."""
    for index, cell in enumerate(first):
        if plain_name(cell) in KNOWN and len(cell) < _LONG:
            below = (row[index].strip() for row in body if len(row) > index)
            if cell.strip() not in below:
                return True
    return list(first) == [str(number) for number in range(len(first))] and len(first) > 1


def _vote(cell: str, column: Sequence[str]) -> int:
    """Compare a cell with the cells below it: 1 if it is unlike them, -1 if it recurs, else 0."""
    values = [value for value in column if value]
    if not cell or not values:
        return 0
    numbers = sum(map(_is_number, values)) / len(values)
    if _is_number(cell):
        return -1 if numbers > 0.5 else 0
    if numbers == 1 and len(values) > 1:
        return 1
    counts = Counter(values)
    recurring = sum(count for count in counts.values() if count > 1) / len(values)
    if cell in counts:
        return -1 if recurring > 0.2 else 0
    if len(values) >= _MANY_ROWS and recurring > 0.95 and len(counts) * 4 <= len(values):
        return 1
    median = statistics.median(map(len, values))
    if len(cell) > _LONG or len(cell.split()) > 5:
        return -1 if median > _LONG / 2 else 0
    lengths = sorted(map(len, values))
    short = lengths[len(lengths) // 10]
    return 1 if len(cell.split()) < 3 and median >= _LONG and short > 2 * len(cell) else 0


def _is_value(cell: str) -> bool:
    return _is_number(cell) or len(cell) > _LONG or len(cell.split()) > 5


def _is_number(cell: str) -> bool:
    return bool(_NUMBER.fullmatch(cell))


def looks_quoted(text: str, delimiter: str = "\t") -> bool:
    """Return whether the quotes in a text enclose fields; in GLUE's files they are text.

    Quotes enclose fields if every quote is part of an enclosed field, and either some field needs
    its quotes (it contains the delimiter, a line end or a doubled quote, or is empty) or every row
    has an enclosed field.
    """
    text = text.rstrip("\r\n")
    if '"' not in text:
        return False
    field_pattern, needs = _patterns(delimiter)
    position, needed, in_row, in_each_row = 0, False, False, True
    while position < len(text):
        match = field_pattern.match(text, position)
        if match is None:
            return False
        field, end = match.groups()
        if field.startswith('"'):
            in_row = True
            needed = needed or field == '""' or bool(needs.search(field[1:-1]))
        if end != delimiter:
            in_each_row, in_row = in_each_row and in_row, False
        position = match.end()
    return needed or in_each_row


def _patterns(delimiter: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    escaped = re.escape(delimiter)
    field = rf'("(?:[^"]|"")*"|[^"{escaped}\r\n]*)({escaped}|\r\n|\r|\n|\Z)'
    return re.compile(field), re.compile(rf'[{escaped}\r\n"]')
