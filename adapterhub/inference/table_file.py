"""Files of table rows with their predictions: CSV, TSV, JSON lines or Parquet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from adapterhub.config.user_folders import is_there
from adapterhub.data.table import Table
from adapterhub.errors import ConfigError, OutputError
from adapterhub.files.atomic import explained, replace_file
from adapterhub.tasks import Prediction, Task

Columns = Mapping[str, list[Any]]
"""The cells of a table, by column."""


def check_table_file(path: Path, argument: str = "--output") -> None:
    """Check before predicting that a table file can be written.

    `argument` is the user's name for the path.

    Raises:
        ConfigError: its suffix does not belong to a format.
        OutputError: it exists.
    """
    if path.suffix.lower() not in _WRITERS:
        raise ConfigError(
            f"{argument} {path} is of an unknown format",
            expected=f"a name that ends in {', '.join(_WRITERS)}",
            hint=f"{argument} {path}.csv; a folder is for --input FILES.parquet"
            if argument == "--output"
            else f"{path}.csv",
        )
    check_new(path)


def check_new(path: Path) -> None:
    """Check that a file does not exist yet.

    Raises:
        OutputError: it exists.
    """
    if is_there(path):
        raise OutputError(f"{path} is already there", hint="another --output")


def input_columns(table: Table | None, task: Task, examples: Sequence[Any]) -> Columns:
    """Return the columns of a table; without a table of the same rows, the texts of the examples.

    Raises:
        DataError: two columns have the same name.
    """
    if table is not None and len(table.lines) == len(examples):
        names = [name for name in table.columns if name not in table.inner]
        table.check(names)
        return {name: list(table.column(name)) for name in names}
    shown = [task.shown(example) for example in examples]
    names = [task.input_name, *(task.pair_name or "pair" for _ in max(shown, key=len)[1:2])]
    return {
        name: [texts[n] if n < len(texts) else None for texts in shown]
        for n, name in enumerate(names)
    }


def with_predictions(
    columns: Columns, predictions: Sequence[Prediction], every: bool, *, cuts: bool = False
) -> Columns:
    """Add the columns of predictions; a name that is taken becomes predicted_NAME.

    With `cuts`, inputs may be cut, and the column `truncated` counts their lost tokens.
    """
    cells = [p.columns(every) | ({"truncated": p.truncated} if cuts else {}) for p in predictions]
    joined = dict(columns)
    for name in dict.fromkeys(name for row in cells for name in row):
        free = name
        while free.casefold() in {taken.casefold() for taken in joined}:
            free = f"predicted_{free}"
        joined[free] = [row.get(name) for row in cells]
    return joined


def write_table_file(path: Path, columns: Columns) -> None:
    """Write a table in the format of the file's suffix; a crash leaves the whole file or none.

    Raises:
        OutputError: the file cannot be written.
    """
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, _WRITERS[path.suffix.lower()](columns))


def table_text(columns: Columns) -> str:
    """Return a table as CSV; as JSON lines if cells are lists, such as chats."""
    nested = any(isinstance(cell, list) for cells in columns.values() for cell in cells[:1])
    return (_json_lines(columns) if nested else _delimited(columns, ",")).decode()


def _delimited(columns: Columns, delimiter: str) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(map(_texts, zip(*columns.values(), strict=True)))
    return text.getvalue().encode("utf-8", "backslashreplace")


def _texts(cells: Iterable[Any]) -> list[str]:
    return [_text(cell) for cell in cells]


def _text(cell: Any) -> str:
    """Return a cell as text: lists and objects as JSON, missing values as an empty text."""
    cell = _plain(cell)
    if cell is None or isinstance(cell, str):
        return cell or ""
    is_json = isinstance(cell, bool | int | float | list | tuple | dict)
    return json.dumps(cell, ensure_ascii=False, default=str) if is_json else str(cell)


def _plain(cell: Any) -> Any:
    """Return a cell without values that text formats lack: NaN, and the bytes of files."""
    if isinstance(cell, float) and cell != cell:
        return None
    is_file = isinstance(cell, dict) and "bytes" in cell
    return cell.get("path") if is_file else cell


def _json_lines(columns: Columns) -> bytes:
    rows = zip(*(map(_plain, values) for values in columns.values()), strict=True)
    lines = (
        json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False, default=str)
        for row in rows
    )
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")


def _parquet(columns: Columns) -> bytes:
    import pyarrow
    from pyarrow.parquet import write_table

    def array(values: list[Any]) -> Any:
        try:
            return pyarrow.array(values)
        except (pyarrow.ArrowException, OverflowError):  # values of several kinds
            return pyarrow.array([None if v is None else _text(v) for v in values])

    content = io.BytesIO()
    write_table(pyarrow.table({name: array(v) for name, v in columns.items()}), content)
    return content.getvalue()


_WRITERS: Mapping[str, Callable[[Columns], bytes]] = {
    ".csv": lambda columns: _delimited(columns, ","),
    ".tsv": lambda columns: _delimited(columns, "\t"),
    ".jsonl": _json_lines,
    ".parquet": _parquet,
}
