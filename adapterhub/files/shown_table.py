"""Display of scores with their errors, and of tables of texts.

A score has its number of rows and its 95 % interval, as recorded and written:

    accuracy     0.7333 (0.61-0.83, n = 60)     with an en dash, where it can be printed

A table is rendered here in Markdown and HTML, and by `cli/_format.py` on a terminal. Titles and
cells may be untrusted text: each form escapes them.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from adapterhub.errors import counted, one_line, printable

EN_DASH = "\N{EN DASH}"
ERRORS = "errors"  # in the training record of a manifest: {metric: {n, low, high}}
TEST = "test/"  # prefix of metrics on rows that were not used for selection
_FEWEST_DIGITS, _MOST_DIGITS = 2, 4  # decimals of an interval


@dataclass(frozen=True)
class ScoreError:
    """The uncertainty of a score.

    Attributes:
        rows: the number of rows that it was computed from.
        groups: the number of groups, such as queries; None: each row is its own group.
        low: the lower end of its 95 % interval; None if unknown.
        high: the upper end.
    """

    rows: int
    low: float | None = None
    high: float | None = None
    groups: int | None = None

    @property
    def interval(self) -> str:
        """The interval, rounded to its significant digits; "" without one."""
        if self.low is None or self.high is None:
            return ""
        width = self.high - self.low
        needed = 1 + math.floor(-math.log10(width)) if width > 0 else _MOST_DIGITS
        digits = min(max(needed, _FEWEST_DIGITS), _MOST_DIGITS)
        to = " to " if self.low < 0 else EN_DASH
        return f"{self.low:.{digits}f}{to}{self.high:.{digits}f}"

    def __str__(self) -> str:
        number = f"n = {self.rows:,}"
        if self.groups is not None:
            number += f" in {counted(self.groups, 'group')}"
        return ", ".join(filter(None, (self.interval, number)))

    def record(self) -> dict[str, float]:
        """Return the record: the known values of {n, groups, low, high}, in six digits."""
        counts = {"n": self.rows}
        counts |= {} if self.groups is None else {"groups": self.groups}
        if self.low is None or self.high is None:
            return {**counts}
        low, high = (float(f"{end:.6g}") for end in (self.low, self.high))
        return {**counts, "low": low, "high": high}


def score_text(value: str, error: ScoreError | None) -> str:
    """Format a score with its error: "0.7333 (0.61-0.83, n = 60)"; only the score if unknown."""
    return f"{value} ({error})" if error else value


def recorded_errors(records: object) -> dict[str, ScoreError]:
    """Read the errors of scores, by metric; malformed records, by strangers, are skipped."""
    errors = {}
    for name, record in records.items() if isinstance(records, Mapping) else ():
        rows, *ends = (_number(record, key) for key in ("n", "low", "high"))
        if rows is not None and rows >= 0:
            low, high = ends if None not in ends else (None, None)
            groups = _number(record, "groups")
            errors[str(name)] = ScoreError(
                int(rows), low, high, None if groups is None or groups < 0 else int(groups)
            )
    return errors


def _number(record: Any, name: str) -> float | None:
    value = record.get(name) if isinstance(record, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None


# A table does not read these as lists or headings, so that numbers need no backslashes.
_NUMBERS = re.compile(r"[a-zA-Z0-9 ±.,%()=<+/:\N{EN DASH}-]*")
_MOST = 4000  # characters of one value: twice the longest description
# Inline markup, HTML and entities; underscores inside a word are literal anyway (section 6.2).
_INLINE = re.compile(r"[\\`*\[\]<>|~&]|(?<![^\W_])_|_(?![^\W_])")
# Markers at the start of a line: a heading, list, quote, rule or heading underline.
_START = re.compile(r"[#+=:-]|\d+(?=[.)])")


@dataclass(frozen=True)
class TableCell:
    """A cell with more than its text.

    Attributes:
        text: the displayed text.
        number: the sort key of its column; None comes last.
        markdown: a replacement for the text in Markdown, such as a link.
        link: the target of the text in HTML: an address relative to the page.
    """

    text: str
    number: float | None = None
    markdown: str | None = None
    link: str = ""


@dataclass(frozen=True)
class ShownTable:
    """A table, whose first column has names.

    Attributes:
        columns: the titles of the columns.
        rows: the cells of each row.
        numbers: whether the other columns are numbers, which are aligned on the right.
        title: the title of the table.
        meanings: the meaning of each column, in HTML; empty if none is explained.
        taken: the indices of the rows that are recommended.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str | TableCell]]
    numbers: bool = False
    title: str = ""
    meanings: Sequence[str] = ()
    taken: Collection[int] = ()

    def without(self, *titles: str) -> ShownTable:
        """Return the table without some columns."""
        kept = [i for i, title in enumerate(self.columns) if title not in titles]
        return replace(
            self,
            columns=[self.columns[i] for i in kept],
            rows=[[row[i] for i in kept] for row in self.rows],
            meanings=[self.meanings[i] for i in kept] if self.meanings else (),
        )

    def texts(self) -> list[list[str]]:
        """Return the text of each cell, by row."""
        return [[cell.text for cell in row] for row in self._cells()]

    def text(self) -> str:
        """Return the table in columns of text, below its title."""
        lines = [[*self.columns], *([one_line(text) for text in row] for row in self.texts())]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
        return "\n".join([self.title] * bool(self.title) + [*rows])

    def markdown(self) -> str:
        """Return the table in Markdown, without its title."""
        others = "---:" if self.numbers else "---"
        rules = ["---", *[others] * (len(self.columns) - 1)]
        rows = [
            [_in_markdown(cell, is_name=i == 0) for i, cell in enumerate(row)]
            for row in self._cells()
        ]
        lines = [[literal(title) for title in self.columns], rules, *rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def html(self, *, sortable: bool = False) -> str:
        """Return the table in HTML, without its title.

        `sortable`: the page's script sorts it by the clicked column.
        """
        heads = "".join(map(_head, self.columns, self.meanings or [""] * len(self.columns)))
        rows = "\n".join(
            f"<tr{' class=taken' * (i in self.taken)}>"
            f'<th scope="row">{_shown(name)}</th>'
            f"{''.join(_data(cell, sortable) for cell in cells)}</tr>"
            for i, (name, *cells) in enumerate(self._cells())
        )
        kind = ' class="study sortable"' if sortable else ""
        return (
            f'<div class="scroll" tabindex="0">\n<table{kind}>\n<thead><tr>{heads}</tr></thead>\n'
            f"<tbody>\n{rows}\n</tbody>\n</table>\n</div>"
        )

    def _cells(self) -> list[list[TableCell]]:
        return [[c if isinstance(c, TableCell) else TableCell(c) for c in row] for row in self.rows]


def _in_markdown(cell: TableCell, *, is_name: bool) -> str:
    if cell.markdown is not None:
        return cell.markdown
    return literal(cell.text) if is_name or not _NUMBERS.fullmatch(cell.text) else cell.text


def _head(title: str, meaning: str) -> str:
    tooltip = f' title="{html.escape(printable(meaning))}"' if meaning else ""
    return f'<th scope="col"{tooltip}>{_in_html(title)}</th>'


def _data(cell: TableCell, sortable: bool) -> str:
    number = "" if cell.number is None else str(cell.number)
    value = f' data-value="{number}"' if sortable else ""
    return f"<td{value}>{_shown(cell)}</td>"


def _shown(cell: TableCell) -> str:
    text = _in_html(cell.text)
    return f'<a href="{html.escape(cell.link)}">{text}</a>' if cell.link else text


def _in_html(text: str) -> str:
    return f"<bdi>{html.escape(printable(text))}</bdi>"


def literal(text: str) -> str:
    """Escape untrusted text for a paragraph, a heading or a table cell: one line, no markup."""
    line = _INLINE.sub(r"\\\g<0>", one_line(" ".join(text.split()), _MOST).replace("\x00", ""))
    if start := _START.match(line):
        end = start.end() if start.group().isdigit() else 0
        line = f"{line[:end]}\\{line[end:]}"
    return line


def code_block(language: str, lines: Iterable[str]) -> str:
    """Write a code block whose fence is longer than any run of backticks in it."""
    text = "\n".join(lines)
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
