"""Read JSON as a table: lines of objects, an array of objects, or an object of columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from adapterhub.data.table import Table, blank_note, first_few
from adapterhub.errors import DataError

_LISTS = ("data", "rows", "examples", "train", "items", "records")
_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_EXPECTED = 'one object per line, such as {"text": "good", "label": "1"}, or a list of objects'


def read_json(source: str, text: str) -> Table:
    """Read JSON lines, or one JSON value that is a table; blank lines are a note.

    Raises:
        DataError: the text is neither.
    """
    start = text.lstrip()[:1]
    first, _, rest = text.strip().partition("\n")
    lines = start == "{" and (source.lower().endswith(_LINES) or (rest and _is_json(first)))
    if start in ("[", "{") and not lines:
        try:
            table = _table_of(source, json.loads(text))
        except (ValueError, RecursionError) as error:
            if not _is_json(first):
                raise DataError(f"{source} is not JSON: {error}", expected=_EXPECTED) from None
            table = None
        if table is not None:
            return table
    return _read_lines(source, text)


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _table_of(source: str, whole: Any) -> Table | None:
    """Build the table of a list of objects, of {"data": [...]} or of an object of columns."""
    rows = whole if isinstance(whole, list) else _inner_list(whole)
    if rows == []:
        raise DataError(f"{source} has no rows", expected=_EXPECTED)
    if rows is not None:
        wrong = [
            f"item {number}: {type(row).__name__}, not an object"
            for number, row in enumerate(rows, start=1)
            if not isinstance(row, dict)
        ]
        if wrong and len(wrong) < len(rows):
            raise DataError(
                f"{source} is not a list of objects", offenders=first_few(wrong), expected=_EXPECTED
            )
        if not wrong:
            return _rows_table(source, "item", dict(enumerate(rows, start=1)))
        return None
    lengths = {len(v) if isinstance(v, list | dict) else -1 for v in whole.values()}
    if len(lengths) != 1 or lengths <= {-1, 0}:
        return None
    # pandas writes each column as {"0": ..., "1": ...}.
    columns = {k: list(v.values()) if isinstance(v, dict) else v for k, v in whole.items()}
    (length,) = lengths
    return Table(source, "row", tuple(columns), range(1, length + 1), columns.__getitem__,
                 form="JSON columns")  # fmt: skip


def _inner_list(whole: Mapping[str, Any]) -> list[Any] | None:
    """Return the only list of objects among the values of an object with a usual name."""
    lists = {
        key: value
        for key, value in whole.items()
        if isinstance(value, list) and value and isinstance(value[0], dict)
    }
    if len(lists) != 1:
        return None
    ((key, value),) = lists.items()
    return value if key.lower() in _LISTS or len(whole) == 1 else None


def _rows_table(source: str, unit: str, rows: dict[int, dict[str, Any]], form: str = "") -> Table:
    columns = tuple(dict.fromkeys(key for row in rows.values() for key in row))
    return Table(
        source, unit, columns, list(rows), lambda name: [row.get(name) for row in rows.values()],
        form=form or "a JSON list",
    )  # fmt: skip


def _read_lines(source: str, text: str) -> Table:
    rows: dict[int, dict[str, Any]] = {}
    problems, blank = [], []
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        if not line.strip():
            blank.append(number)
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            problems.append(f"line {number}: {error}")
        else:
            if isinstance(row, dict):
                rows[number] = row
            else:
                problems.append(f"line {number}: {type(row).__name__}, not an object")
    if problems:
        raise DataError(
            f"{source} is not JSON lines", offenders=first_few(problems), expected=_EXPECTED
        )
    table = _rows_table(source, "line", rows, "JSON lines")
    return replace(table, notes=blank_note(blank))
