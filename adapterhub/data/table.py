"""A table of data: named columns that are read on demand, and templates over them.

A template such as "{title}. {body}" builds the text of a row from two of its cells. A name in
braces is replaced by the cell of that column; attributes, indices and formats are not supported.
"{{" and "}}" are literal braces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adapterhub.config.user_folders import is_file
from adapterhub.data.column_names import NEVER
from adapterhub.errors import DataError, did_you_mean, one_line

_MOST_LISTED = 10  # offenders listed in an error; the rest are counted
_MOST_NAMED = 8  # columns in a note
_MOST_UNUSED = 20
UNREAD = "not read: "
_LONGEST_SAMPLE = 40  # characters of a cell in an error
_PARTS = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|[{}]")
_LOOKED_AT = 100  # rows: fields inside their objects are columns, too
_LONGEST = 2000  # characters: a template may come with an untrusted adapter


@dataclass(frozen=True)
class Table:
    """Named columns, read on demand.

    Attributes:
        source: the file or dataset id, for errors.
        unit: the unit of `lines`: "line", "row" or "sentence at line".
        columns: the column names, in order.
        lines: the location of each row in the source.
        column: reads the values of one column.
        form: a description of the detected format, for the user; "" if it was set.
        header: whether the first line names the columns, else they are 0, 1, ...; None if the
            format has no header line.
        decimal_comma: whether numbers may have a decimal comma, as in files with semicolons.
        notes: further notes for the user on how the source was read.
        inner: the columns inside objects of other columns, such as doc.text.
        costly: whether a column is only read from its file when it is used.
        used: the columns from which examples were read so far.
    """

    source: str
    unit: str
    columns: tuple[str, ...]
    lines: Sequence[int] | Sequence[str]
    column: Callable[[str], Iterable[object]]
    form: str = ""
    header: bool | None = None
    decimal_comma: bool = False
    notes: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    costly: bool = False
    used: set[str] = field(default_factory=set, compare=False, repr=False)

    def take(self, names: Sequence[str]) -> list[Iterable[object]]:
        """Read columns by name; a template such as "{title}. {body}" is filled in.

        Raises:
            DataError: a column is missing, or its name is not unique.
        """
        self.check(names)
        self.used.update(column for name in names for column in self.uses(name))
        named = map(self.named, names)
        return [self.column(n) if n in self.columns else self._filled(n) for n in named]

    def named(self, name: str) -> str:
        """Return the column for a name; letter case is ignored if the match is unique."""
        alike = {c for c in self.columns if c.casefold() == name.casefold()}
        return name if name in alike or len(alike) != 1 else alike.pop()

    def uses(self, name: str) -> list[str]:
        """List the columns read by a name or template."""
        named = self.named(name)
        is_column = named in self.columns or not is_template(name)
        return [named] if is_column else list(map(self.named, template_columns(name)))

    def _filled(self, template: str) -> Iterable[object]:
        names = list(dict.fromkeys(template_columns(template)))
        columns = (self.column(self.named(name)) for name in names)
        for cells in zip(*columns, strict=True):
            yield fill(template, dict(zip(names, cells, strict=True)))

    def check(self, names: Sequence[str]) -> None:
        """Reject names and templates with a missing column or an ambiguous column name.

        Raises:
            DataError: a column is missing or ambiguous.
        """
        used = list(dict.fromkeys(column for name in names for column in self.uses(name)))
        missing = [name for name in used if name not in self.columns]
        if missing:
            raise DataError(
                f"columns not found in {self.source}",
                offenders=[f"{name!r}{did_you_mean(name, self.columns)}" for name in missing],
                expected=f"one of {', '.join(map(repr, self.columns))}",
                hint=self.column_hint(),
            )
        duplicates = [repr(name) for name in used if self.columns.count(name) > 1]
        if duplicates:
            raise DataError(f"{self.source} has duplicate column names", offenders=duplicates)

    def column_hint(self) -> str:
        """Return a hint on naming columns, and that the first line may be data."""
        return f"--text COLUMN (also --pair and --label){self.header_hint()}"

    def header_hint(self) -> str:
        """Return a hint on reading the assumed header line as data."""
        return "; data.header=false if the first line is data" if self.header else ""

    def unused_note(self, notes: Iterable[str] = (), rows: str = "rows") -> tuple[str, ...]:
        """Return a line that lists the columns not read by any example, and their numbers of cells.

        An object counts as used if a field inside it is. Columns without cells are left out, and
        columns already listed in `notes`: "not read: a, b; why".
        """
        lines = (note.removeprefix(UNREAD) for note in notes if note.startswith(UNREAD))
        noted = {name for line in lines for name in line.partition(";")[0].split(", ")}
        used = {part for name in self.used for part in _within(name)} | self.used
        copies = self.unit == "sentence at line"  # the first and the last column have a second name
        known = [list(self.column(name)) for name in self.used] if copies else []
        unused = []
        for name in dict.fromkeys(self.columns):
            if name in used or {*_within(name)} & ({*self.columns} - used | self.used):
                continue
            if name in noted or (copies and list(self.column(name)) in known):
                continue
            count = len(self.lines)
            if not self.costly:
                count = sum(value is not None and value != "" for value in self.column(name))
            unused += [f"{name} ({count:,} {rows})"] * bool(count)
        more = len(unused) - _MOST_UNUSED
        names = ", ".join([*unused[:_MOST_UNUSED], *[f"and {more} more"] * (more > 0)])
        return (f"columns not used: {one_line(names, _LONGEST)}",) if unused else ()

    @property
    def shown_source(self) -> str:
        """The name of the file without its folder, or the id of the dataset."""
        return Path(self.source).name if is_file(self.source) else self.source

    def samples(self) -> list[str]:
        """Show each column with its first two different values, one line per column."""
        lines = []
        for name in self.columns:
            values = dict.fromkeys(map(_shown, self.spread(name, 200)))
            shown = " | ".join(list(values)[:2])
            lines.append(f"{name}: {shown}")
        return lines

    def spread(self, name: str, most: int) -> list[object]:
        """Return values spread over a column, or its first ones if it is not a list."""
        values = self.column(name)
        if isinstance(values, Sequence):
            return list(values[:: max(len(values) // most, 1)][:most])
        return [value for value, _ in zip(values, range(most), strict=False)]

    def described(self) -> str:
        """Describe the table in one line: format, rows and columns."""
        named = [*self.columns[:_MOST_NAMED]]
        rest = len(self.columns) - len(named)
        more = f" and {rest} more" if rest else ""
        parts = [self.form, f"{len(self.lines):,} rows"]
        return f"{', '.join(filter(None, parts))}; columns: {', '.join(named)}{more}"


def _within(name: str) -> Iterator[str]:
    """Yield the objects that may contain a column: a.b and a, for a.b.c."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def inner_columns(name: str, value: object) -> dict[str, tuple[str, ...]]:
    """Return the columns in an object, `doc.text` for {"doc": {"text": ...}}, with their paths.

    An object that is read as a whole has no inner columns: a file, or answers with positions.
    """
    columns: dict[str, tuple[str, ...]] = {}
    if isinstance(value, Mapping) and not {"bytes", "answer_start"} & value.keys():
        for key, inner in value.items():
            below = inner_columns(f"{name}.{key}", inner) or {f"{name}.{key}": ()}
            columns |= {column: (str(key), *path) for column, path in below.items()}
    return columns


def columns_of_objects(
    rows: Iterable[Mapping[str, Any]],
) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Return the columns of objects, and their inner columns with paths."""
    inner: dict[str, tuple[str, ...]] = {}
    columns: dict[str, None] = {}
    for number, row in enumerate(rows):
        columns |= dict.fromkeys(row)
        for name, value in row.items() if number < _LOOKED_AT else ():
            inner |= {column: (name, *path) for column, path in inner_columns(name, value).items()}
    return tuple(columns), {name: path for name, path in inner.items() if name not in columns}


def inner_cell(value: object, path: Sequence[str]) -> object:
    """Return the value at a path in an object, or None."""
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def table_of_rows(
    source: str,
    columns: Sequence[str],
    places: Sequence[str],
    column: Callable[[str], Iterable[object]],
) -> Table:
    """Return some rows of a source as a table."""
    return Table(source, "row", tuple(columns), places, column, form="streamed")


def _shown(value: object) -> str:
    text = " ".join(str(value).split()) if value is not None else ""
    return f"{text[:_LONGEST_SAMPLE]}..." if len(text) > _LONGEST_SAMPLE else text or "(empty)"


def blank_note(lines: Sequence[int]) -> tuple[str, ...]:
    """Report blank lines that are not rows, if there are any."""
    if not lines:
        return ()
    numbers = ", ".join(first_few([f"{number:,}" for number in lines]))
    return (f"blank lines are skipped and get no prediction: {numbers}",)


def first_few(items: Sequence[str]) -> list[str]:
    """List the first ten items and the number of the rest."""
    rest = len(items) - _MOST_LISTED
    return [*items[:_MOST_LISTED], *([f"... and {rest} more"] if rest > 0 else [])]


def is_template(name: str) -> bool:
    """Return whether an option is a template, not the name of a column."""
    return any(match.group(1) for match in _PARTS.finditer(name[: _LONGEST + 1]))


def template_columns(template: str) -> list[str]:
    """List the columns in a template, in order.

    Raises:
        DataError: a brace is unmatched, or the template is too long.
    """
    if len(template) > _LONGEST:
        raise DataError(
            f"a template of {len(template):,} characters", expected=f"{_LONGEST:,} at most"
        )
    parts = list(_PARTS.finditer(template))
    if any(part.group() in ("{", "}") for part in parts):
        raise DataError(
            f"invalid template {template!r}",
            expected="names of columns in braces, as in '{title}. {body}'",
            hint="'{{' and '}}' for braces that are text",
        )
    return [part.group(1) for part in parts if part.group(1)]


def fill(template: str, cells: Mapping[str, object]) -> str:
    """Fill in a template; a cell without a value is an empty text.

    Whitespace around the whole text is removed, since empty cells may leave some.

    Raises:
        DataError: a cell is not a text, number or truth value.
    """

    def part(match: re.Match[str]) -> str:
        name = match.group(1)
        return cell_text(cells[name], name) if name else match.group()[0]

    return _PARTS.sub(part, template).strip()


def cell_text(value: object, column: str) -> str:
    """Return the text of a cell in a template.

    Raises:
        DataError: the cell is not a text, number or truth value.
    """
    if value is None or value != value:  # NaN marks a missing float
        return ""
    if not isinstance(value, (str, int, float)):
        raise DataError(
            f"column {column!r} in a template has type {type(value).__name__}",
            expected="texts or numbers",
        )
    return str(value)


def names_of_classes(feature: Any, values: list[Any]) -> list[object]:
    """Return the values of a column of `datasets`, with class names instead of numbers.

    The number -1 marks a hidden label.
    """
    if names := getattr(feature, "names", None):
        return [_name(names, value) for value in values]
    if names := getattr(getattr(feature, "feature", None), "names", None):
        return [[_name(names, each) for each in value or ()] for value in values]
    return values


def _name(names: Sequence[str], number: Any) -> Any:
    """Return the name of a class; other values are kept."""
    if not isinstance(number, int) or number >= len(names):
        return number
    return None if number < 0 else names[number]


def plain_name(name: str) -> str:
    """Return a column name in lower case, without spaces and punctuation."""
    return re.sub(r"[\W_]+", "", name.lower())


def numbers_rows(name: str) -> bool:
    """Return whether a column of this name numbers, dates or locates rows."""
    plain = plain_name(name)
    return not plain or plain in NEVER or bool(re.search(r"(^|[\W_])(id|idx)$|Id$|ID$", name))
