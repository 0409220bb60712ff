"""The support tables in docs/support.md: what the full matrix found, never typed (`make matrix`).

A cell is a test with the parameters `method` and `architecture`, or `method` and `task`; one with
"refused" in its name that passes is refused on purpose, for what it recorded as "reason".
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest
import tiny_models

from adapterhub.methods import METHODS
from adapterhub.tasks import TASKS

FILE = Path(__file__).parents[2] / "docs" / "support.md"
ROWS = {"architecture": sorted(tiny_models.ARCHITECTURES), "task": sorted(TASKS)}
_found: dict[tuple[str, str, str], Counter[str]] = {}
_reasons: dict[tuple[str, str, str], str] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    params = item.callspec.params if hasattr(item, "callspec") else {}
    for rows in ROWS:
        if report.when == "call" and {"method", rows} <= params.keys():
            refused = "refused" in item.name
            cell = (rows, params[rows], params["method"], refused)
            report.user_properties.append(("cell", cell))
    return report


def pytest_runtest_logreport(report):
    properties = dict(report.user_properties)
    if report.when == "call" and "cell" in properties:
        *key, refused = properties["cell"]
        outcome = "refused" if refused and report.passed else report.outcome
        _found.setdefault(tuple(key), Counter())[outcome] += 1
        if "reason" in properties:
            _reasons[tuple(key)] = properties["reason"]


def pytest_sessionfinish(session):
    if os.environ.get("ADAPTERHUB_MATRIX") != "full" or hasattr(session.config, "workerinput"):
        return
    for rows, names in ROWS.items():
        cells = {(name, method) for kind, name, method in _found if kind == rows}
        if cells == {(name, method) for name in names for method in METHODS}:
            FILE.write_text(replaced(FILE.read_text(encoding="utf-8"), rows), encoding="utf-8")


def replaced(text: str, rows: str) -> str:
    """The file with a new table between the marks of one kind."""
    marks = re.compile(rf"(<!-- {rows}: .*? -->\n).*?(<!-- /{rows} -->)", re.DOTALL)
    assert len(marks.findall(text)) == 1
    return marks.sub(lambda found: f"{found[1]}{table(rows)}{found[2]}", text)


def table(rows: str) -> str:
    """The Markdown table of all cells of one kind, with the reasons under it."""
    methods = sorted(METHODS)
    lines = [f"| {rows} | {' | '.join(methods)} |", "|---" * (len(methods) + 1) + "|"]
    for name in ROWS[rows]:
        cells = (shown(_found[rows, name, method]) for method in methods)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, *reasons(rows)]) + "\n"


def reasons(rows: str) -> list[str]:
    """Why cells are refused: one line a reason, with its cells."""
    cells: dict[str, list[str]] = {}
    for (kind, name, method), reason in sorted(_reasons.items()):
        if kind == rows:
            cells.setdefault(reason, []).append(f"{method} for {name}")
    lines = [f"- {', '.join(where)}: {reason}" for reason, where in cells.items()]
    return ["", "Refused:", "", *lines] if lines else []


def shown(counts: Counter[str]) -> str:
    """One cell."""
    if counts["failed"]:
        return "✗"
    return "-" if counts["refused"] else str(counts["passed"] or "")
