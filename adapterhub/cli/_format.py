"""How the commands print lines, JSON, numbers, tables and examples.

All output goes through this module: names, reasons, labels and cards may be a stranger's. Control
characters are escaped, and nothing is read as rich's markup or emoji codes.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from adapterhub.errors import one_line, printable

if TYPE_CHECKING:
    from adapterhub.pages.shown_table import ShownTable

_PIPE_WIDTH = 140  # characters per line of a table that is not printed on a terminal
_BLOCKS = "▁▂▃▄▅▆▇█"
_UNLIMITED = 1000  # characters per line in which no table wraps
_MOST_SAID = 10_000  # characters of a line: twenty of the longest labels, a screen or two
_MOST_IN_A_CELL = 200  # characters: longer ones push the other columns off the screen


def say(text: str, *, err: bool = False) -> None:
    """Print one line; line ends in it are escaped. `err` prints it to standard error."""
    click.echo(one_line(text, _MOST_SAID), err=err)


def say_wrapped(text: str, *, err: bool = False) -> None:
    """Print a paragraph, wrapped to the terminal; `err` prints it to standard error."""
    width = max(shutil.get_terminal_size().columns - 1, 40)
    line = one_line(text, _MOST_SAID).replace(" %", "\0%")  # a number stays with its unit
    click.echo(textwrap.fill(line, width, break_on_hyphens=False).replace("\0", " "), err=err)


def say_text(text: str, *, err: bool = False) -> None:
    """Print a text of several lines. `err` prints it to standard error."""
    click.echo(printable(text), err=err)


def print_json(value: object, *, indent: int | None = None) -> None:
    """Print a value as JSON, on one line unless `indent` gives the spaces per level.

    Only what every output stream can encode is left unescaped.
    """
    ascii_only = not str(sys.stdout.encoding).lower().startswith("utf")
    click.echo(printable(json.dumps(value, indent=indent, ensure_ascii=ascii_only)))


def console(**options: Any) -> Console:
    """Return a console that prints texts as they are, without markup, emoji codes or colours."""
    return Console(**options, markup=False, emoji=False, highlight=False)


class PlainTable(Table):
    """A table whose cells are one line each and shown as they are, without markup."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        """Add a row; texts become one printable line, other renderables stay."""
        plain = (Text(one_line(c, _MOST_IN_A_CELL)) if isinstance(c, str) else c for c in cells)
        super().add_row(*plain, **options)


def examples(*lines: str) -> str:
    """Build the epilog of a command's help from example command lines."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


def count_text(count: int) -> str:
    """Format a count: 1234567 as "1,234,567"."""
    return f"{count:,}"


def bytes_text(size: float) -> str:
    """Format a number of bytes in a unit that leaves two to four digits: "1.5 MB" (10^6 bytes)."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def seconds_text(seconds: float) -> str:
    """Format a duration: 75.2 as "1 min 15 s"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Draw values as a line of blocks, ▁ for the least and █ for the greatest.

    More values than `width` are averaged. Where the terminal's encoding has no blocks, they are
    digits from 0 to 7.
    """
    count = min(width, len(values))
    bounds = [i * len(values) // count for i in range(count + 1)]
    means = [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    low, high = min(means), max(means)
    blocks = _BLOCKS if _can_print(_BLOCKS) else "01234567"
    steps = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((mean - low) * steps)] for mean in means)


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def print_facts(facts: Mapping[str, str], width: int) -> None:
    """Print one `name value` line per fact, with the names padded to `width` columns."""
    for name, text in facts.items():
        say(f"{name:{width}} {text}")


def print_table(table: Table, optional: Sequence[str] = (), elsewhere: str = "use --json") -> None:
    """Print a table: framed on a terminal, plain and wide to a file or pipe.

    On a terminal that is too narrow, the `optional` columns are left out, the first one first, and
    listed below the table.

    Args:
        table: the table.
        optional: the titles of those columns.
        elsewhere: where they are shown.
    """
    for column in table.columns:
        column.overflow = "fold"
    table.columns[0].no_wrap = True
    output = console()
    if output.is_terminal:
        table = _fitted(table, optional, output, elsewhere)
    else:
        output = console(width=_PIPE_WIDTH)
        table.box = SIMPLE_HEAD
    output.print(table)


def print_shown(
    shown: ShownTable, title: str, optional: Sequence[str] = (), elsewhere: str = "use --json"
) -> None:
    """Print a table that pages and Markdown show as well, with a title.

    Args:
        shown: the table.
        title: what is above it.
        optional: the titles of columns that a narrow terminal leaves out, the first one first.
        elsewhere: where they are shown.
    """
    table = PlainTable(title=title, title_justify="left")
    for place, (name, _) in enumerate(shown.heads):
        table.add_column(name, justify="right" if place else "left")
    for row in shown.rows:
        table.add_row(row.name, *(cell.text for cell in row.cells))
    print_table(table, optional, elsewhere)


def _fitted(table: Table, optional: Sequence[str], output: Console, elsewhere: str) -> Table:
    """Remove optional columns from a table until it fits the terminal.

    Args:
        table: the table.
        optional: the titles of those columns, the first to go first.
        output: the terminal.
        elsewhere: where they are shown.
    """
    unlimited = output.options.update(width=_UNLIMITED)
    left_out: list[str] = []
    for name in optional:
        if Measurement.get(output, unlimited, table).maximum <= output.width:
            break
        table = _without(table, name)
        left_out.append(name)
    if left_out:
        table.caption = f"not shown: {', '.join(left_out)} ({elsewhere})"
    return table


def _without(table: Table, name: str) -> Table:
    columns = [column for column in table.columns if column.header != name]
    justify = table.title_justify
    smaller = Table(
        *(column.copy() for column in columns), title=table.title, title_justify=justify
    )
    for cells in zip(*(column.cells for column in columns), strict=True):
        smaller.add_row(*cells)
    return smaller
