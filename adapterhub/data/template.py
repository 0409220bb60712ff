"""Templates over columns: "{title}. {body}" is the text of a row, made of two of its cells.

A name in braces is replaced by the cell of that column, and nothing else is done: there are no
attributes, indices or formats. "{{" and "}}" stand for braces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from adapterhub.errors import DataError

_PARTS = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|[{}]")
_LONGEST = 2000  # characters: a template may come with the adapter of a stranger


def is_template(name: str) -> bool:
    """Return whether an option is a template and not the name of a column."""
    return any(match.group(1) for match in _PARTS.finditer(name[: _LONGEST + 1]))


def template_columns(template: str) -> list[str]:
    """List the columns in a template, in order.

    Raises:
        DataError: a brace is alone, or the template is too long.
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

    White space around the whole text is removed, as it may be left by empty cells.

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
