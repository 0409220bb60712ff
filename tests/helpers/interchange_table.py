"""Generate the table of docs/interchange.md from the results of `make interchange`."""

from __future__ import annotations

import platform
import re
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import tiny_models
from peft_differential import DIRECTIONS, KINDS, MASKS, tasks

FILE = Path(__file__).parents[2] / "docs" / "interchange.md"
PROPERTY = "differential"
WORDS = ("equal", "refused", "peft", "none", "wrong")
MARKERS = re.compile(r"(<!-- peft: .*? -->\n).*?(<!-- /peft -->)", re.DOTALL)
_results: dict[tuple[str, ...], tuple[str, str]] = {}


def pytest_runtest_logreport(report):
    for name, cell in report.user_properties if report.when == "call" else ():
        if name == PROPERTY:
            *key, word, reason = cell
            _results[tuple(key)] = (word, reason)


def pytest_sessionfinish(session):
    if not tiny_models.FULL_MATRIX or hasattr(session.config, "workerinput"):
        return
    models = [(a, task) for a in tiny_models.ARCHITECTURES for task in tasks(a)]
    cells = {(k, *m, d, side) for k in KINDS for m in models for d in DIRECTIONS for side in MASKS}
    if _results.keys() == cells:
        page = FILE.read_text(encoding="utf-8")
        assert len(MARKERS.findall(page)) == 1
        page = MARKERS.sub(lambda match: f"{match[1]}{text()}{match[2]}", page)
        FILE.write_text(page, encoding="utf-8")


def text() -> str:
    """Format the counts by kind and direction, and the reasons for refusals."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("peft", "transformers", "torch"))
    lines = [
        f"`make interchange`, Python {platform.python_version()}, {versions}: {len(_results):,} "
        f"comparisons, each cell {' / '.join(WORDS)}.",
        "",
        f"| kind | {' | '.join(DIRECTIONS)} |",
        "|---" * (len(DIRECTIONS) + 1) + "|",
    ]
    for kind in KINDS:
        counts = [_counts(kind, direction) for direction in DIRECTIONS]
        cells = [" / ".join(str(count[word]) for word in WORDS) for count in counts]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    for word, title in (("refused", "Refused by adapterhub"), ("peft", "Impossible in peft")):
        lines += ["", f"{title}:", "", *_reasons(word)]
    return "\n".join(lines) + "\n"


def _counts(kind: str, direction: str) -> Counter[str]:
    return Counter(
        word for (k, _, _, d, _), (word, _) in _results.items() if (k, d) == (kind, direction)
    )


def _reasons(expected: str) -> list[str]:
    """List each reason once, with its kinds, directions and architectures."""
    found: dict[str, dict[str, list[str]]] = {}
    for (kind, architecture, _, direction, _), (word, reason) in _results.items():
        if word == expected:
            places = found.setdefault(_general(reason, architecture), {})
            for name, value in (("kinds", kind), ("to", direction), ("on", architecture)):
                places.setdefault(name, []).append(value)
    return [
        f"- {'; '.join(', '.join(dict.fromkeys(values)) for values in places.values())}: {reason}"
        for reason, places in found.items()
    ]


def _general(reason: str, architecture: str) -> str:
    """Replace what differs between architectures: their names and the paths of modules."""
    for name in (architecture, architecture.replace("_", "-"), architecture.replace("-", "_")):
        reason = re.sub(rf"\b{re.escape(name)}\b", "MODEL", reason)
    reason = re.sub(r"\b(\w+\.)+\d+\.[\w.]+\b", "MODULE", reason)
    return reason.split(" Please ")[0]


def documented_counts() -> dict[str, list[list[int]]]:
    """Read the table: for each kind, the counts of each direction."""
    found = MARKERS.search(FILE.read_text(encoding="utf-8"))
    assert found
    rows = re.findall(r"^\| (.+?) \| (\d.*) \|$", found[0], re.MULTILINE)
    return {
        kind: [[int(count) for count in cell.split(" / ")] for cell in cells.split(" | ")]
        for kind, cells in rows
    }
