"""The support table in docs/support.md: what the full matrix found, never typed (`make matrix`)."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

TABLE = Path(__file__).parents[2] / "docs" / "support.md"
HEAD = """# Which method works on which architecture

Made by `make matrix` from the results of the contract suite. A number says how many invariants the
cell was shown to hold (start, gradients, counts, saving, padding, generation with and without cache
and more: tests/contract); - is refused when attaching, with an error that names the methods that
fit; ✗ failed.

"""
_found: dict[tuple[str, str], Counter[str]] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if report.when == "call" and {"method", "architecture"} <= params.keys():
        refused = "refused" in item.name
        report.user_properties.append(("cell", (params["method"], params["architecture"], refused)))
    return report


def pytest_runtest_logreport(report):
    for name, value in report.user_properties:
        if name == "cell" and report.when == "call":
            method, architecture, refused = value
            outcome = "refused" if refused and report.passed else report.outcome
            _found.setdefault((method, architecture), Counter())[outcome] += 1


def pytest_sessionfinish(session):
    full = os.environ.get("ADAPTERHUB_MATRIX") == "full"
    if full and _found and not hasattr(session.config, "workerinput"):
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(HEAD + table(), encoding="utf-8")


def table() -> str:
    """The Markdown table of all cells."""
    methods = sorted({method for method, _ in _found})
    order = list(dict.fromkeys(architecture for _, architecture in _found))
    lines = [f"| architecture | {' | '.join(methods)} |", "|---" * (len(methods) + 1) + "|"]
    for architecture in sorted(order):
        cells = (shown(_found.get((method, architecture), Counter())) for method in methods)
        lines.append(f"| {architecture} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def shown(counts: Counter[str]) -> str:
    """One cell."""
    if counts["failed"]:
        return "✗"
    return "-" if counts["refused"] else str(counts["passed"] or "")
