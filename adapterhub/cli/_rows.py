"""How `adapterhub train --show` prints rows."""

from __future__ import annotations

import shutil
import textwrap
from typing import TYPE_CHECKING

from adapterhub.cli._format import say, say_text
from adapterhub.errors import one_line

if TYPE_CHECKING:
    from adapterhub.recipe.recipe import Recipe

_MARGIN = "  "
_MOST = 20_000  # characters of a text


def print_rows(recipe: Recipe, count: int) -> None:
    """Print the first training rows of a recipe, wrapped to the terminal, or to 80 columns."""
    from adapterhub.training.preview import preview_rows

    rows, notes = preview_rows(recipe, count)
    for note in notes:
        say_text(_wrapped("note", note, 4))
    for row in rows:
        say("")
        say(row.title)
        width = max(map(len, row.facts))
        for name, text in row.facts.items():
            say_text(_wrapped(name, text, width))


def _wrapped(name: str, text: str, width: int) -> str:
    lead = f"{_MARGIN}{name:{width}}  "
    return textwrap.fill(
        one_line(text, _MOST),
        width=max(shutil.get_terminal_size().columns - 1, 40),
        initial_indent=lead,
        subsequent_indent=" " * len(lead),
        break_on_hyphens=False,
    )
