"""Detect how a table is written as text: the delimiter, the quotes, and whether columns have names.

Only a beginning of the text is read, but for quotes. Where the evidence is not clear the form that
the file's suffix stands for is assumed; `Dialect.doubt` then says what to type if it is not so.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
import statistics
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from adapterhub.data.column_names import KNOWN, plain_name

DELIMITERS = {"\t": "tab", ";": "semicolon", "|": "bar", ",": "comma"}
_PREFIX = 200_000  # characters
_ROWS = 200
_NUMBER = re.compile(r"[-+]?[\d\s.,]*\d[\d.,]*%?([eE][-+]?\d+)?")
_LONG = 40  # characters: longer cells are texts, not names
_FEW_ROWS, _MANY_ROWS = 3, 8  # from which on equal widths are no accident


@dataclass(frozen=True)
class Dialect:
    """How the lines of a table become cells; `doubt` is a note if the header was assumed."""

    delimiter: str
    quoted: bool
    header: bool
    doubt: str = ""


def prefix_rows(text: str, delimiter: str, quoted: bool) -> list[list[str]]:
    """Split the first rows of a text into cells; a row that the prefix cuts is left out.

    Args:
        text: the text, or its beginning.
        delimiter: the delimiter of the cells.
        quoted: whether quotes enclose cells.
    """
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
    """Find the delimiter by which all rows of a text's beginning have as many cells.

    Args:
        text: the text.
        usual: the delimiter that the file's name stands for; None if it stands for plain text,
            for which the evidence must be strong.

    Returns:
        The delimiter; `usual` if none fits.
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
    """Find out whether the first of some rows names the columns.

    Args:
        rows: the first rows of a table.
        expected: names of columns that the reader asks for.

    Returns:
        Whether it does, and whether that is beyond doubt.
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
