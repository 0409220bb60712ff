"""Generate the tables of docs/reference/support.md from the results of `make matrix`.

Each test with the parameters `method` and `architecture`, or `method` and `task`, counts towards
one cell, and so does each subtest. A run of some cells fills those that a table lacks: a new
method's, which is blank where nothing ran, and those that failed. A cell is refused by design if
its test `test_a_refused_cell...` passes; the table lists the "reason" that the test records.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from adapterhub.methods import METHODS
from adapterhub.tasks import TASKS
from tests.kit import tiny_models

FILE = Path(__file__).parents[2] / "docs/reference/support.md"
ROWS = {"architecture": sorted(tiny_models.ARCHITECTURES), "task": sorted(TASKS)}
_FAILED = "✗"
_results: dict[tuple[str, str, str], Counter[str]] = {}
_reasons: dict[tuple[str, str, str], str] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    params = item.callspec.params if hasattr(item, "callspec") else {}
    for rows in ROWS:
        if report.when == "call" and {"method", rows} <= params.keys():
            refused = item.originalname.startswith("test_a_refused_cell")
            cell = (rows, params[rows], params["method"], refused)
            report.user_properties.append(("cell", cell))
    return report


def pytest_runtest_logreport(report):
    properties = dict(report.user_properties)
    if report.when == "call" and "cell" in properties:
        *key, refused = properties["cell"]
        outcome = "refused" if refused and report.passed else report.outcome
        _results.setdefault(tuple(key), Counter())[outcome] += 1
        if "reason" in properties:
            _reasons[tuple(key)] = properties["reason"]


def pytest_sessionfinish(session):
    if not tiny_models.FULL_MATRIX or hasattr(session.config, "workerinput"):
        return
    for rows, names in ROWS.items():
        cells = {(name, method) for kind, name, method in _results if kind == rows}
        page = FILE.read_text(encoding="utf-8")
        if cells >= {(name, method) for name in names for method in METHODS}:
            page = with_new_table(page, rows)
        elif cells:
            page = with_new_cells(page, rows)
        FILE.write_text(page, encoding="utf-8")


def with_new_table(page: str, rows: str) -> str:
    """Replace the table between the markers of one kind."""
    markers = re.compile(rf"(<!-- {rows}: .*? -->\n).*?(<!-- /{rows} -->)", re.DOTALL)
    assert len(markers.findall(page)) == 1
    return markers.sub(lambda match: f"{match[1]}{table(rows)}{match[2]}", page)


def with_new_cells(page: str, rows: str) -> str:
    """Fill the cells that a table does not have: those of new methods that some tests ran."""
    start = page.index(f"<!-- {rows}:")
    lines = page[start:].splitlines()[1:]
    width = next(n for n, line in enumerate(lines) if not line.startswith("|"))
    head, _, *written = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[:width]]
    known = {
        (row[0], method): cell
        for row in written
        for method, cell in zip(head[1:], row[1:], strict=True)
        if cell != _FAILED
    }
    methods = sorted(METHODS)
    new = [f"| {rows} | {' | '.join(methods)} |", "|---" * (len(methods) + 1) + "|"]
    for row in written:
        cells = [
            known.get((row[0], m)) or cell_text(_results.get((rows, row[0], m), Counter()))
            for m in methods
        ]
        new.append(f"| {row[0]} | {' | '.join(cells)} |")
    return page[:start] + page[start:].replace("\n".join(lines[:width]), "\n".join(new), 1)


def table(rows: str) -> str:
    """Format all cells of one kind as a Markdown table, followed by the reasons for refusals."""
    methods = sorted(METHODS)
    lines = [f"| {rows} | {' | '.join(methods)} |", "|---" * (len(methods) + 1) + "|"]
    for name in ROWS[rows]:
        cells = (cell_text(_results[rows, name, method]) for method in methods)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, *reasons(rows)]) + "\n"


def reasons(rows: str) -> list[str]:
    """List the reasons for refusals, one per line, each with its cells."""
    cells: dict[str, list[str]] = {}
    for (kind, name, method), reason in sorted(_reasons.items()):
        if kind == rows:
            cells.setdefault(reason, []).append(f"{method} for {name}")
    lines = [f"- {', '.join(where)}: {reason}" for reason, where in cells.items()]
    return ["", "Refused:", "", *lines] if lines else []


def cell_text(counts: Counter[str]) -> str:
    """Format a cell: ✗ if a test failed, - if refused, else the number of tests that passed."""
    if counts["failed"]:
        return _FAILED
    return "-" if counts["refused"] else str(counts["passed"] or "")
