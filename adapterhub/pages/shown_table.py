"""A table that is shown: on a page, as Markdown, or on a terminal (`cli/_format.py`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from adapterhub.files.markdown import literal

NONE = "-"  # what was not measured, or does not exist
_NUMBERS = re.compile(r"[a-zA-Z0-9 ±.,%()=<+/:-]*")


@dataclass(frozen=True)
class TableCell:
    """A text, and the number that its column is sorted by; None comes last."""

    text: str = NONE
    number: float | None = None


@dataclass(frozen=True)
class TableRow:
    """A row of a table; `taken` marks the one that is recommended."""

    name: str
    cells: Sequence[TableCell]
    taken: bool = False


@dataclass(frozen=True)
class ShownTable:
    """A table: the title and the meaning of each column, the first one for the names."""

    heads: Sequence[tuple[str, str]]
    rows: Sequence[TableRow]

    def markdown(self) -> list[str]:
        """Return the lines of the table in Markdown; whatever its texts contain stays text."""
        titles = [literal(title) for title, _ in self.heads]
        ruler = ["---", *["---:"] * (len(titles) - 1)]
        rows = [[literal(row.name), *(_literal(c.text) for c in row.cells)] for row in self.rows]
        lines = [f"| {' | '.join(titles)} |", f"|{'|'.join(ruler)}|"]
        return [*lines, *(f"| {' | '.join(cells)} |" for cells in rows)]

    def without(self, *titles: str) -> ShownTable:
        """Return the table without some columns."""
        kept = [n for n, (title, _) in enumerate(self.heads[1:]) if title not in titles]
        rows = [TableRow(row.name, [row.cells[n] for n in kept], row.taken) for row in self.rows]
        return ShownTable([self.heads[0], *(self.heads[n + 1] for n in kept)], rows)


def _literal(text: str) -> str:
    """Leave numbers readable, which a table does not read as lists or headings."""
    return text if _NUMBERS.fullmatch(text) else literal(text)
