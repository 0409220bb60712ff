"""Read the first table of an .xlsx file as CSV; formulas have their saved values."""

from __future__ import annotations

import csv
import datetime
import io
import warnings
from typing import Any, NamedTuple
from zipfile import BadZipFile

from adapterhub.errors import DataError


class Sheet(NamedTuple):
    """A sheet: its number among the sheets, and its cells as CSV, a line for each row."""

    described: str
    text: str


def read_sheet(source: str) -> Sheet:
    """Read the first sheet with a table (two rows of two cells), else the first with any cells.

    Raises:
        DataError: openpyxl is not installed, the file is damaged, or all sheets are empty.
    """
    try:
        import openpyxl
    except ImportError as error:
        raise DataError(
            f"{source} is a spreadsheet, which needs openpyxl",
            hint='pip install "adapterhub[excel]", or save the sheet as CSV (UTF-8)',
        ) from error
    try:
        with warnings.catch_warnings():  # warnings about styles and validation, which are not read
            warnings.simplefilter("ignore")
            book = openpyxl.load_workbook(source, read_only=True, data_only=True)
            others: list[Sheet] = []
            for sheet in book.worksheets:
                written, wide = io.StringIO(newline=""), 0
                writer = csv.writer(written, lineterminator="\n")
                for row in sheet.iter_rows(values_only=True):
                    cells = list(map(_text, row))
                    writer.writerow(cells if any(cells) else [])
                    wide += sum(map(bool, cells)) > 1
                more = f" of {len(book.worksheets)}" * (len(book.worksheets) > 1)
                own = Sheet(f"sheet {sheet.title!r}{more}", written.getvalue())
                if wide > 1:
                    return own
                others += [own] * bool(own.text.strip())
            if others:
                return others[0]
    except FileNotFoundError as error:
        raise DataError(f"no file {source}") from error
    except (BadZipFile, KeyError, ValueError, OSError, TypeError) as error:
        raise DataError(
            f"{source} is not an .xlsx file: {error}",
            hint="save the sheet as CSV (UTF-8), and give that file",
        ) from error
    raise DataError(f"{source} is empty")


def _text(value: Any) -> str:
    """Return a cell as displayed: 3 for 3.0, a date without midnight."""
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, datetime.datetime) and value.time() == datetime.time():
        return str(value.date())
    return str(value)
