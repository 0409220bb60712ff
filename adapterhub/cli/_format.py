"""How the commands print numbers and tables."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def count_text(count: int) -> str:
    """1234567 -> 1,234,567."""
    return f"{count:,}"


def bytes_text(size: float) -> str:
    """Bytes in the unit that gives up to four digits: 1.5 MB (powers of 1,000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def seconds_text(seconds: float) -> str:
    """75.2 -> 1 min 15 s."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def plain_table(table: Table) -> Table:
    """The table without frames, for files and pipes."""
    table.box = SIMPLE_HEAD
    return table


def print_table(table: Table) -> None:
    """A table for a terminal, or a plain one for files and pipes."""
    console = Console(width=None if Console().is_terminal else 140)
    console.print(table if console.is_terminal else plain_table(table))
