"""Read delimited text as a table: CSV, TSV and their relatives, strictly."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Iterator

from adapterhub.data.decode import DecodedText
from adapterhub.data.dialect import (
    DELIMITERS,
    Dialect,
    find_delimiter,
    find_header,
    looks_quoted,
    prefix_rows,
)
from adapterhub.data.options import PREDICT, DataOptions
from adapterhub.data.table import Table, blank_note, first_few
from adapterhub.data.text_files import split_lines
from adapterhub.errors import DataError

_USUAL = {"csv": ",", "tsv": "\t"}
_NAMED = re.compile(r"sep=(.)\r?\n", re.IGNORECASE)  # Excel's first line, in any locale


def read_delimited(
    source: str, kind: str, decoded: DecodedText, options: DataOptions, split: str = "train"
) -> Table:
    """Read delimited text as a table.

    Args:
        source: the file, for errors.
        kind: "csv" or "tsv", or "text" for a name that promises neither.
        decoded: its text.
        options: what is fixed about its form, and the columns that are asked for.
        split: if it is not "train", these columns are those of other data, on which the adapter was
            trained. In data to predict on, PREDICT, a blank line of a table with one column is a
            row, and one of a table with more is a note.

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
    """Detect what the options leave open of a text's form.

    Args:
        text: the text.
        kind: "csv", "tsv" or "text".
        delimiter: the delimiter, or None to find it.
        options: the options `quoted` and `header`, and the columns that are asked for.
        recorded: whether these columns are those of other data. A first line in doubt that does not
            name them is then data.
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
    from adapterhub.data.template import is_template, template_columns

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
