"""How the commands print numbers, tables and examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from adapterhub.config.options import options_of

_PIPE_WIDTH = 140  # characters per line of a table that is not printed on a terminal
_UNLIMITED = 1000  # characters per line in which no table wraps


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


def print_facts(facts: Mapping[str, str], width: int) -> None:
    """Print one `name value` line per fact, with the names padded to `width` columns."""
    console = Console()
    for name, text in facts.items():
        console.print(f"{name:{width}} {text}", highlight=False, markup=False, soft_wrap=True)


def print_table(table: Table, optional: Sequence[str] = ()) -> None:
    """Print a table: framed on a terminal, plain and wide to a file or pipe.

    On a terminal that is too narrow, the `optional` columns are left out, the first one first, and
    listed below the table.
    """
    for column in table.columns:
        column.overflow = "fold"
    table.columns[0].no_wrap = True
    console = Console()
    if console.is_terminal:
        table = _fitted(table, optional, console)
    else:
        console = Console(width=_PIPE_WIDTH)
        table.box = SIMPLE_HEAD
    console.print(table)


def _fitted(table: Table, optional: Sequence[str], console: Console) -> Table:
    """Remove optional columns from a table until it fits the terminal."""
    unlimited = console.options.update(width=_UNLIMITED)
    left_out: list[str] = []
    for name in optional:
        if Measurement.get(console, unlimited, table).maximum <= console.width:
            break
        table = _without(table, name)
        left_out.append(name)
    if left_out:
        table.caption = f"not shown: {', '.join(left_out)} (use --json)"
    return table


def _without(table: Table, name: str) -> Table:
    columns = [column for column in table.columns if column.header != name]
    smaller = Table(*(column.copy() for column in columns))
    for cells in zip(*(column.cells for column in columns), strict=True):
        smaller.add_row(*cells)
    return smaller


def options_table(cls: type) -> Table:
    """Build the table of the options that a dataclass defines."""
    table = Table("option", "values", "default", "description")
    for option in options_of(cls):
        table.add_row(option.name, option.type, str(option.default), option.help)
    return table
