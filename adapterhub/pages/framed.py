"""Pages of several runs: sortable tables, groups of charts, and one script, by its hash."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Protocol

from markupsafe import Markup

from adapterhub.pages.page import render_template
from adapterhub.pages.sections import Chart


class CellText(Protocol):
    """A text, and the number that its column is sorted by."""

    @property
    def text(self) -> str:
        """What is shown."""

    @property
    def number(self) -> float | None:
        """What it is sorted by; None comes last."""


@dataclass(frozen=True)
class SortableRow:
    """A row of a table; `taken` marks the one that is recommended."""

    name: str
    cells: Sequence[CellText]
    taken: bool = False


@dataclass(frozen=True)
class SortableTable:
    """A table: the title and the meaning of each column, the first one for the names."""

    heads: Sequence[tuple[str, str]]
    rows: Sequence[SortableRow]


@dataclass(frozen=True)
class ChartGroup:
    """Charts of one kind, with a title and a sentence; `wide` ones have names in them."""

    title: str
    note: str
    charts: Sequence[Chart]
    wide: bool = False


def framed_page(template: str, **values: Any) -> str:
    """Return a page that is built from `frame.html`.

    Its script runs by the hash in the page's Content-Security-Policy, so no other script can.

    Args:
        template: the name of a file in this room.
        values: what it shows.
    """
    script = resources.files("adapterhub.pages").joinpath("sort.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return render_template(
        template, script=Markup(script), script_hash=Markup(f"sha256-{digest}"), **values
    )
