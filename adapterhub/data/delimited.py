"""Read delimited text as a table: CSV, TSV and their relatives, strictly.

The delimiter, the quotes, and whether columns have names are detected. Only a beginning of the text
is read for that, but for quotes. Where the evidence is not clear the form that the file's suffix
stands for is assumed; `Dialect.doubt` then says what to type if it is not so.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from adapterhub.data.column_names import KNOWN, plain_name
from adapterhub.data.decode import DecodedText, split_lines
from adapterhub.data.options import PREDICT, DataOptions
from adapterhub.data.table import Table, blank_note, first_few
from adapterhub.errors import DataError

_USUAL = {"csv": ",", "tsv": "\t"}
_NAMED = re.compile(r"sep=(.)\r?\n", re.IGNORECASE)  # Excel's first line, in any locale
DELIMITERS = {"\t": "tab", ";": "semicolon", "|": "bar", ",": "comma"}
_PREFIX = 200_000  # characters
_ROWS = 200
_NUMBER = re.compile(r"[-+]?[\d\s.,]*\d[\d.,]*%?([eE][-+]?\d+)?")
_LONG = 40  # characters: longer cells are texts, not names
_FEW_ROWS, _MANY_ROWS = 3, 8  # from which on equal widths are no accident


def read_delimited(
    source: str, kind: str, decoded: DecodedText, options: DataOptions, split: str = "train"
) -> Table:
    """Read delimited text as a table.

    `kind` is "csv" or "tsv", or "text" for a name that promises neither. If the split is not
    "train", the columns that the options ask for are those of other data, on which the adapter was
    trained. In data to predict on, PREDICT, a blank line of a table with one column is a row, and
    one of a table with more is a note.

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
    """Detect what the options leave open of a text's form; a `delimiter` of None is found.

    If the columns that are asked for are those of other data (`recorded`), a first line in doubt
    that does not name them is data.
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
    """List the columns that the options name, but for numbers, which files without names have."""
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
    """Say which encoding was guessed, with a word to see by whether it is right."""
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
    """How the lines of a table become cells; `doubt` is a note if the header was assumed."""

    delimiter: str
    quoted: bool
    header: bool
    doubt: str = ""


def prefix_rows(text: str, delimiter: str, quoted: bool) -> list[list[str]]:
    """Split the first rows of a text into cells; a row that the prefix cuts is left out."""
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
    """Find the delimiter by which all rows of a text's beginning have as many cells, else `usual`.

    `usual` is what the file's name stands for; None, plain text, needs strong evidence.
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
    """Return the number of cells that all rows have, or 0; empty cells at the end do not count."""
    width = len(rows[0]) if rows else 0
    while width > 1 and not any(row[width - 1].strip() for row in rows if len(row) >= width):
        width -= 1
    return width if all(len(row) >= width and not any(row[width:]) for row in rows) else 0


def _has_decimal_commas(text: str) -> bool:
    """Return whether every comma behind the first line is inside of a number."""
    body = text[:_PREFIX].partition("\n")[2]
    return body.count(",") == len(re.findall(r"(?<=\d),(?=\d)", body))


def _is_surely_table(text: str, delimiter: str) -> bool:
    """Return whether plain text is a table beyond doubt: its header or its labels show it."""
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
    """Return whether the first of some rows names the columns, and whether that is beyond doubt.

    `expected` are names of columns that the reader asks for.
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
    """Return whether a cell of the first row is a usual name that its column does not contain."""
    for index, cell in enumerate(first):
        if plain_name(cell) in KNOWN and len(cell) < _LONG:
            below = (row[index].strip() for row in body if len(row) > index)
            if cell.strip() not in below:
                return True
    return list(first) == [str(number) for number in range(len(first))] and len(first) > 1


def _vote(cell: str, column: Sequence[str]) -> int:
    """Compare a cell with those below it: 1 if it is unlike them, -1 if it is one of them, or 0."""
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
    """Return whether the quotes in a text enclose fields, or are text as in GLUE's files.

    They enclose fields if every quote is part of an enclosed field, and either some field needs its
    quotes (it contains the delimiter, a line end or a doubled quote, or is empty) or every row has
    an enclosed field.
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
