"""Numbers and tables as the commands print them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from adapterhub.cli import _format
from adapterhub.cli._format import bytes_text, print_table, seconds_text, sparkline
from adapterhub.files.shown_table import ShownTable


def test_bytes_and_durations():
    sizes = {0: "0 B", 999: "999 B", 1000: "1.0 kB", 317_700: "318 kB", 1_540_000: "1.5 MB",
             2.5e9: "2.50 GB", 25e9: "25.0 GB", 3e12: "3.0 TB"}  # fmt: skip
    assert {size: bytes_text(size) for size in sizes} == sizes
    assert seconds_text(59.4) == "59.4 s"
    assert seconds_text(75.2) == "1 min 15 s"


def table() -> ShownTable:
    columns = ("adapter", "task", "size")
    return ShownTable(columns, [("polite@v1", "classification", "318 kB")], numbers=True)


@pytest.mark.parametrize(("width", "missing"), [(80, []), (36, ["size"]), (20, ["size", "task"])])
def test_a_narrow_terminal_leaves_out_optional_columns(monkeypatch, width, missing):
    terminal = Console(file=io.StringIO(), force_terminal=True, width=width, no_color=True)
    monkeypatch.setattr(_format, "Console", lambda **_: terminal)
    print_table(table(), ("size", "task"))
    text = terminal.file.getvalue()
    assert "polite@v1" in text
    cells = {"size": "318 kB", "task": "classification"}
    assert [name for name, cell in cells.items() if cell not in text] == missing
    assert ("not shown:" in text) == bool(missing)


def test_a_pipe_gets_every_column_without_frames(capsys):
    print_table(table(), ("size", "task"))
    text = capsys.readouterr().out
    assert all(cell in text for cell in ("polite@v1", "classification", "318 kB"))
    assert "\u2502" not in text


def test_a_sparkline_goes_from_the_least_to_the_greatest_and_averages_many_values(monkeypatch):
    """It is digits where the encoding has no blocks."""
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert [sparkline(values) for values in ([3.0, 3.0], [2.0])] == ["▁▁", "▁"]
    line = sparkline([float(i // 100) for i in range(1000)], width=10)
    assert (len(line), line[0], line[-1]) == (10, "▁", "█")
    assert list(line) == sorted(line)
    stream = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr("sys.stdout", stream)
    assert sparkline([0.0, 0.5, 1.0]) == "047"
