"""Generate the table of docs/guides/interchange.md from the results of `make interchange`."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from tests.kit import tiny_models

FILE = Path(__file__).parents[2] / "docs/guides/interchange.md"
PROPERTY = "differential"
DIRECTIONS = ("import", "back", "export")
MASKS = ("none", "right", "left")
WORDS = ("equal", "refused", "peft", "none", "wrong")
MARKERS = re.compile(r"(<!-- peft: .*? -->\n).*?(<!-- /peft -->)", re.DOTALL)
_ORDER = {name: number for number, name in enumerate(DIRECTIONS)}
_results: dict[tuple[str, ...], tuple[str, str]] = {}


def pytest_runtest_logreport(report):
    for name, cell in report.user_properties if report.when == "call" else ():
        if name == PROPERTY:
            *key, word, reason = cell
            _results[tuple(key)] = (word, reason)


def pytest_sessionfinish(session):
    if not _results or not tiny_models.FULL_MATRIX or hasattr(session.config, "workerinput"):
        return
    from tests.kit.peft_differential import KINDS, tasks  # imports peft

    models = [(a, task) for a in tiny_models.ARCHITECTURES for task in tasks(a)]
    cells = {(k, *m, d, side) for k in KINDS for m in models for d in DIRECTIONS for side in MASKS}
    if _results.keys() == cells:
        page = FILE.read_text(encoding="utf-8")
        assert len(MARKERS.findall(page)) == 1
        page = MARKERS.sub(lambda match: f"{match[1]}{text(KINDS)}{match[2]}", page)
        FILE.write_text(page, encoding="utf-8")


def text(kinds: Iterable[str]) -> str:
    """Format the counts by kind and direction, and the reasons for refusals."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("peft", "transformers", "torch"))
    lines = [
        f"`make interchange`, Python {platform.python_version()}, {versions}: {len(_results):,} "
        "comparisons. Each cell: equal / refused by adapterhub / refused or failing in peft / "
        "no such method here / wrong.",
        "",
        f"| kind | {' | '.join(DIRECTIONS)} |",
        "|---" * (len(DIRECTIONS) + 1) + "|",
    ]
    for kind in kinds:
        counts = [_counts(kind, direction) for direction in DIRECTIONS]
        cells = [" / ".join(str(count[word]) for word in WORDS) for count in counts]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    for word, title in (
        ("refused", "Refused by adapterhub"),
        ("peft", "Refused or failing in peft"),
    ):
        lines += ["", f"{title}:", "", *_reasons(word)]
    return "\n".join(lines) + "\n"


def _counts(kind: str, direction: str) -> Counter[str]:
    return Counter(
        word for (k, _, _, d, _), (word, _) in _results.items() if (k, d) == (kind, direction)
    )


def _reasons(expected: str) -> list[str]:
    """List each reason once, with its kinds, directions and architectures."""
    found: dict[str, list[set[str]]] = {}
    for (kind, architecture, _, direction, _), (word, reason) in _results.items():
        if word == expected:
            places = found.setdefault(_general(reason, architecture), [set(), set(), set()])
            for names, name in zip(places, (kind, direction, architecture), strict=True):
                names.add(name)
    return sorted(f"- {text} ({'; '.join(map(_listed, places))})" for text, places in found.items())


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names, key=lambda name: (_ORDER.get(name, 0), name)))


def _general(reason: str, architecture: str) -> str:
    """Shorten a reason, and replace what differs between architectures."""
    for name in {architecture, architecture.replace("_", "-"), architecture.replace("-", "_")}:
        reason = re.sub(rf"\b{re.escape(name)}\b", "MODEL", reason)
    for pattern, text in (
        (r"^the peft checkpoint .*? on this MODEL backbone: ", ""),
        (r"^the adapter cannot be exported to peft: ", ""),
        (r"^[\w-]+ does not fit a MODEL backbone: ", ""),
        (r"^this MODEL backbone has no such site( in layers '.*?')?", "no such site"),
        (r"^\S*adapter_config.json", "adapter_config.json"),
        (r"(?<!['\w.])\w+(\.\w+)+(?!['\w.])", "MODULE"),
        (r"MODULE(, MODULE)+", "MODULE"),
        (r"\b[A-Z]\w+For[A-Z]\w+", "CLASS"),
        (r"\(\d+\)|\d+x\d+", "N"),
        (r"'(encoder|decoder)\.attn\.kv'", "'attn.kv'"),
        (r"; did you mean .*| Please .*| This might .*", ""),
    ):
        reason = re.sub(pattern, text, reason)
    return reason


def documented_counts() -> dict[str, list[list[int]]]:
    """Read the table: for each kind, the counts of each direction."""
    found = MARKERS.search(FILE.read_text(encoding="utf-8"))
    assert found
    rows = re.findall(r"^\| (.+?) \| (\d.*) \|$", found[0], re.MULTILINE)
    return {
        kind: [[int(count) for count in cell.split(" / ")] for cell in cells.split(" | ")]
        for kind, cells in rows
    }
